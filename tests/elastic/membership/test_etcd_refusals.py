"""Whatever else may listen on the port: one clear error, and never a hang."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import grpc
import grpc.aio
import pytest

from baguarun.elastic.membership.etcd import EtcdStore
from baguarun.elastic.membership.etcd_faults import Fault, classify
from baguarun.elastic.membership.etcdpb import etcd_pb2 as pb
from baguarun.elastic.membership.store_url import HostPort, StoreUrl
from baguarun.errors import BaguarunError, StoreLostError, StoreRefusedError
from tests.support.etcd_servers import EtcdServer, free_port
from tests.support.loop import in_loop

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def url_of(*ports: int) -> StoreUrl:
    return StoreUrl(endpoints=tuple(HostPort("127.0.0.1", port) for port in ports))


async def failure(url: StoreUrl, kind: type[BaguarunError], timeout_s: float) -> str:
    with pytest.raises(kind) as caught:
        await EtcdStore.open(url, timeout_s=timeout_s)
    assert type(caught.value) is kind
    assert str(caught.value).startswith(f"store {url}: ")
    return str(caught.value)


@contextlib.asynccontextmanager
async def listening(serve: Serve) -> AsyncIterator[int]:
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()


@contextlib.asynccontextmanager
async def etcd_of_version(version: str) -> AsyncIterator[int]:
    """A gRPC server that has only one thing in common with etcd: it tells a version."""

    async def status(request: pb.StatusRequest, context: object) -> pb.StatusResponse:
        return pb.StatusResponse(version=version)

    handler = grpc.unary_unary_rpc_method_handler(
        status, pb.StatusRequest.FromString, pb.StatusResponse.SerializeToString
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("etcdserverpb.Maintenance", {"Status": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


@pytest.fixture
def web_port() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("version", ["3.3.9", "2.3.8", "4.0.0", "", "unknown"])
@in_loop
async def test_a_wrong_version_is_named_with_the_wanted_one(version: str) -> None:
    async with etcd_of_version(version) as port:
        with pytest.raises(StoreRefusedError) as caught:
            await EtcdStore.open(url_of(port), timeout_s=60)
    assert f"found etcd {version or '(no version)'}; want 3.4 or later, below 4" in str(caught.value)


@pytest.mark.parametrize("version", ["3.4.0", "3.5.21", "3.6.0-rc.2", "3.10.1"])
@in_loop
async def test_every_version_from_3_4_to_below_4_is_taken(version: str) -> None:
    async with etcd_of_version(version) as port:
        store = await EtcdStore.open(url_of(port), timeout_s=60)
        await store.close()


@in_loop
async def test_a_grpc_server_that_is_not_etcd_is_refused_at_once() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    message = await failure(url_of(port), StoreRefusedError, timeout_s=100)
    assert f"found an HTTP/2 server that is not etcd on 127.0.0.1:{port}; correct the address" in message
    await server.stop(None)


@in_loop
async def test_a_web_server_is_refused_at_once(web_port: int) -> None:
    message = await failure(url_of(web_port), StoreRefusedError, timeout_s=100)
    assert (
        f"not etcd on 127.0.0.1:{web_port} (it says 'HTTP/1.0 " in message or "it says '<!DOCTYPE" in message
    )


@in_loop
async def test_a_redis_is_refused_at_once() -> None:
    async def redis(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            await reader.read(1)
            writer.write(b"-ERR unknown command 'PRI', with args beginning with: '*' 'HTTP/2.0'\r\n")
            await writer.drain()
            await reader.read()
        writer.close()

    async with listening(redis) as port:
        message = await failure(url_of(port), StoreRefusedError, timeout_s=100)
    assert "it says \"-ERR unknown command 'PRI'" in message


@in_loop
async def test_a_port_that_swallows_everything_is_given_up_in_time() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while await reader.read(1000):
                pass
        writer.close()

    async with listening(silent) as port:
        message = await failure(url_of(port), StoreLostError, timeout_s=2)
    assert f"no answer for 2 s: found that 127.0.0.1:{port} takes connections but says nothing" in message


@in_loop
async def test_a_port_that_hangs_up_is_given_up_in_time() -> None:
    async def rude(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with listening(rude) as port:
        message = await failure(url_of(port), StoreLostError, timeout_s=1)
    assert "closes the connection at once" in message


@in_loop
async def test_a_closed_port_is_given_up_in_time() -> None:
    port = free_port()
    message = await failure(url_of(port), StoreLostError, timeout_s=1)
    assert f"found nobody listening on 127.0.0.1:{port}; start etcd there" in message


@in_loop
async def test_an_unknown_host_is_given_up_in_time() -> None:
    url = StoreUrl(endpoints=(HostPort("no-such-host.invalid", 2379),))
    message = await failure(url, StoreLostError, timeout_s=1)
    assert "found no way to no-such-host.invalid:2379" in message


@in_loop
async def test_every_endpoint_is_named_when_none_will_do(web_port: int) -> None:
    closed = free_port()
    message = await failure(url_of(closed, web_port), StoreLostError, timeout_s=1)
    assert f"nobody listening on 127.0.0.1:{closed}" in message
    assert f"not etcd on 127.0.0.1:{web_port}" in message


@in_loop
async def test_one_good_endpoint_is_enough(web_port: int, shared_etcd: EtcdServer) -> None:
    url = url_of(free_port(), web_port, shared_etcd.port)
    for _ in range(3):  # wherever it starts
        store = await EtcdStore.open(url, timeout_s=60)
        await store.count("/")
        await store.close()


@in_loop
async def test_a_proxy_in_the_environment_is_not_asked(
    shared_etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    store = await EtcdStore.open(shared_etcd.url, timeout_s=60)
    await store.close()


@pytest.mark.parametrize(
    ("code", "details", "fault"),
    [
        ("UNAVAILABLE", "failed to connect to all addresses; last error: ...", Fault.NOT_APPLIED),
        ("UNAVAILABLE", "etcdserver: no leader", Fault.NOT_APPLIED),
        ("RESOURCE_EXHAUSTED", "etcdserver: too many requests", Fault.NOT_APPLIED),
        ("UNAVAILABLE", "etcdserver: leader changed", Fault.UNKNOWN),
        ("UNAVAILABLE", "etcdserver: request timed out", Fault.UNKNOWN),
        ("UNAVAILABLE", "Socket closed", Fault.UNKNOWN),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", Fault.UNKNOWN),
        ("UNAUTHENTICATED", "etcdserver: invalid auth token", Fault.TOKEN),
        ("INVALID_ARGUMENT", "etcdserver: revision of auth store is old", Fault.TOKEN),
        ("NOT_FOUND", "etcdserver: requested lease not found", Fault.LEASE_GONE),
        ("PERMISSION_DENIED", "etcdserver: permission denied", Fault.REFUSED),
        ("RESOURCE_EXHAUSTED", "etcdserver: mvcc: database space exceeded", Fault.REFUSED),
        ("INVALID_ARGUMENT", "etcdserver: request is too large", Fault.REFUSED),
        ("UNIMPLEMENTED", "unknown service etcdserverpb.KV", Fault.REFUSED),
    ],
)
def test_each_failure_says_what_may_be_done_next(code: str, details: str, fault: Fault) -> None:
    assert classify(grpc.StatusCode[code], details) is fault
