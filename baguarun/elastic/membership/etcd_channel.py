"""One way to an etcd cluster: endpoints with failover, TLS, login and the rules of repeating a call."""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from baguarun.elastic.membership.etcd_faults import Fault, classify, error_for, is_not_etcd
from baguarun.elastic.membership.etcd_probe import Finding, probe
from baguarun.elastic.membership.etcdpb import etcd_pb2 as pb
from baguarun.elastic.membership.store_url import HostPort, StoreUrl
from baguarun.errors import SetupError, StoreLostError, StoreRefusedError

_log = logging.getLogger("baguarun.store")

ATTEMPT_S = 3.0
"""With several endpoints, seconds one of them has for an answer: more than an election takes (1 to 2.6 s)."""
MIN_VERSION = (3, 4)
BELOW_VERSION = (4,)
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 0.5
_ANONYMOUS: tuple[tuple[str, str], ...] = (("hasleader", "true"),)
_PING_TIMEOUT_MS = 2000
_PROBE_S = 2.0
_SYSTEM_ROOTS = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/cert.pem",
)


@dataclass(frozen=True, eq=False)
class Rpc:
    """One RPC of etcd: its path on the wire and the messages it takes and gives."""

    path: str
    request: type[Any]
    response: type[Any]


RANGE = Rpc("/etcdserverpb.KV/Range", pb.RangeRequest, pb.RangeResponse)
PUT = Rpc("/etcdserverpb.KV/Put", pb.PutRequest, pb.PutResponse)
DELETE_RANGE = Rpc("/etcdserverpb.KV/DeleteRange", pb.DeleteRangeRequest, pb.DeleteRangeResponse)
TXN = Rpc("/etcdserverpb.KV/Txn", pb.TxnRequest, pb.TxnResponse)
LEASE_GRANT = Rpc("/etcdserverpb.Lease/LeaseGrant", pb.LeaseGrantRequest, pb.LeaseGrantResponse)
LEASE_REVOKE = Rpc("/etcdserverpb.Lease/LeaseRevoke", pb.LeaseRevokeRequest, pb.LeaseRevokeResponse)
LEASE_KEEP_ALIVE = Rpc(
    "/etcdserverpb.Lease/LeaseKeepAlive", pb.LeaseKeepAliveRequest, pb.LeaseKeepAliveResponse
)
WATCH = Rpc("/etcdserverpb.Watch/Watch", pb.WatchRequest, pb.WatchResponse)
AUTHENTICATE = Rpc("/etcdserverpb.Auth/Authenticate", pb.AuthenticateRequest, pb.AuthenticateResponse)
STATUS = Rpc("/etcdserverpb.Maintenance/Status", pb.StatusRequest, pb.StatusResponse)


class Pauses:
    """Waits between attempts: 50 ms doubling to half a second, each drawn at random from its upper half."""

    def __init__(self) -> None:
        self._next_s = _FIRST_PAUSE_S

    async def sleep(self, at_most_s: float = _LONGEST_PAUSE_S) -> None:
        pause_s = self._next_s * random.uniform(0.5, 1.0)
        self._next_s = min(2 * self._next_s, _LONGEST_PAUSE_S)
        await asyncio.sleep(max(0.0, min(pause_s, at_most_s)))

    def reset(self) -> None:
        self._next_s = _FIRST_PAUSE_S


class Connection:
    """One gRPC channel to one endpoint; when it is left for another, `lost` is set and `on_lost` called."""

    def __init__(self, endpoint: HostPort, channel: grpc.aio.Channel) -> None:
        self.endpoint = endpoint
        self.lost = False
        self.on_lost: set[Callable[[], None]] = set()
        self._channel = channel
        self._calls: dict[Rpc, Any] = {}

    def unary(self, rpc: Rpc) -> Any:
        """A callable `(request, timeout=, metadata=) -> awaitable response`."""
        call = self._calls.get(rpc)
        if call is None:
            call = self._calls[rpc] = self._channel.unary_unary(
                rpc.path, rpc.request.SerializeToString, rpc.response.FromString
            )
        return call

    def stream(self, rpc: Rpc, metadata: tuple[tuple[str, str], ...]) -> Any:
        """A new two-way stream with `write()` and `read()`."""
        call = self._channel.stream_stream(rpc.path, rpc.request.SerializeToString, rpc.response.FromString)
        return call(metadata=metadata)

    def mark_lost(self) -> None:
        self.lost = True
        for tell in tuple(self.on_lost):
            tell()

    async def close(self, grace_s: float | None) -> None:
        await self._channel.close(grace_s)


class EtcdChannel:
    """Calls to a cluster over one connection at a time, moved to the next endpoint when it fails.

    Threads: one asyncio event loop.
    """

    def __init__(self, url: StoreUrl, *, timeout_s: float, ping_interval_s: float) -> None:
        self.url = url
        self.timeout_s = timeout_s
        """Seconds that one operation may take, with all its attempts."""
        self.attempt_s = min(ATTEMPT_S, timeout_s) if len(url.endpoints) > 1 else timeout_s
        """Seconds that one attempt may take; a lone endpoint gets all the time: there is no other."""
        self.metadata = _ANONYMOUS
        """Sent with every call: fail at once where there is no leader, and the login's token."""
        self._ping_interval_s = ping_interval_s
        self._credentials = _credentials(url) if url.tls else None
        self._token: str | None = None
        self._login_lock = asyncio.Lock()
        # Agents that start together spread over the members.
        self._index = random.randrange(len(url.endpoints))
        self._closing: set[asyncio.Task[None]] = set()
        self.connection = self._connect()

    # -- connections

    def _connect(self) -> Connection:
        endpoint = self.url.endpoints[self._index]
        options = [
            ("grpc.keepalive_time_ms", int(self._ping_interval_s * 1000)),
            ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
            # Without it a frozen server is noticed after a minute, whatever keepalive says.
            ("grpc.http2.ping_timeout_ms", _PING_TIMEOUT_MS),
            ("grpc.http2.min_time_between_pings_ms", 1000),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 2000),
            ("grpc.max_reconnect_backoff_ms", 1000),
            # The store is inside the cluster; a proxy for the world outside must not get in between.
            ("grpc.enable_http_proxy", 0),
            # A new channel means a new connection, not the failed one out of a process-wide pool.
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_receive_message_length", -1),
        ]
        target = str(endpoint)
        if self._credentials is None:
            return Connection(endpoint, grpc.aio.insecure_channel(target, options))
        return Connection(endpoint, grpc.aio.secure_channel(target, self._credentials, options))

    def leave(self, connection: Connection, why: str) -> None:
        """Go on with the next endpoint, unless that has happened already or there is no other.

        A lone endpoint keeps its channel: gRPC reconnects by itself.
        """
        if connection is not self.connection or len(self.url.endpoints) == 1:
            return
        self._index = (self._index + 1) % len(self.url.endpoints)
        self.connection = self._connect()
        _log.info(
            "store %s: left %s (%s) for %s", self.url, connection.endpoint, why, self.connection.endpoint
        )
        connection.mark_lost()
        # Calls of other tasks on the old connection end by their own deadlines, which lie within the grace.
        task = asyncio.ensure_future(connection.close(self.attempt_s + 1.0))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Drop every connection; calls in flight are cancelled."""
        self.connection.mark_lost()
        await self.connection.close(None)
        for task in tuple(self._closing):
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)

    # -- calls

    async def call(self, rpc: Rpc, request: Any, what: str, *, repeatable: bool) -> Any:
        """The response, from whichever endpoint gives one within `timeout_s`.

        A call that may not run twice (`repeatable=False`) is tried again only if it surely had no effect;
        when its reply is lost, `StoreLostError` tells the caller to look what became of it. `what` names the
        operation in errors.
        """
        clock = asyncio.get_running_loop().time
        give_up = clock() + self.timeout_s
        pauses: Pauses | None = None
        logged_in = False
        while True:
            connection, token = self.connection, self._token
            left_s = give_up - clock()
            try:
                metadata = _ANONYMOUS if rpc is AUTHENTICATE else self.metadata
                return await connection.unary(rpc)(
                    request, timeout=max(0.01, min(self.attempt_s, left_s)), metadata=metadata
                )
            except grpc.aio.AioRpcError as error:
                code, details = error.code(), error.details() or ""
                fault = classify(code, details)
                if fault is Fault.TOKEN and token is not None and not logged_in and rpc is not AUTHENTICATE:
                    await self.login(token)
                    logged_in = True
                    continue
                again = fault is Fault.NOT_APPLIED or (fault is Fault.UNKNOWN and repeatable)
                if fault in (Fault.NOT_APPLIED, Fault.UNKNOWN):
                    self.leave(connection, details)
                if not again or clock() >= give_up:
                    raise self.error(fault, connection, what, code, details) from error
            if pauses is None:
                pauses = Pauses()
            await pauses.sleep(give_up - clock())

    async def login(self, stale_token: str | None) -> None:
        """Fetch a new token, unless another task has done so since `stale_token` was current."""
        async with self._login_lock:
            if self._token != stale_token:
                return
            what = f"log in as {self.url.user}"
            reply = await self.call(AUTHENTICATE, self._login_request(), what, repeatable=True)
            self._use_token(reply.token)

    @property
    def token(self) -> str | None:
        """The token in use, to hand to `login` when it turns out to be stale."""
        return self._token

    def error(
        self, fault: Fault, connection: Connection, what: str, code: grpc.StatusCode, details: str
    ) -> Exception:
        """The error to raise for a failed call on `connection`."""
        where = f"store {self.url}"
        if len(self.url.endpoints) > 1:
            where += f" (at {connection.endpoint})"
        return error_for(fault, where, what, code, details)

    # -- opening

    async def open(self) -> None:
        """Find an endpoint that serves us: an etcd of a version we speak that accepts our login.

        Raises `StoreRefusedError` as soon as no endpoint can be right, `StoreLostError` after `timeout_s`.
        """
        clock = asyncio.get_running_loop().time
        give_up = clock() + self.timeout_s
        pauses = Pauses()
        while True:
            findings: dict[HostPort, Finding] = {}
            for _ in self.url.endpoints:
                connection = self.connection
                finding = await self._greet(connection, max(0.1, min(ATTEMPT_S, give_up - clock())))
                if finding is None:
                    return
                findings[connection.endpoint] = finding
                self.leave(connection, finding.message)
            if all(finding.refused for finding in findings.values()):
                raise StoreRefusedError(f"store {self.url}: {_joined(findings)}")
            if clock() >= give_up:
                raise StoreLostError(
                    f"store {self.url}: no answer for {self.timeout_s:g} s: {_joined(findings)}"
                )
            await pauses.sleep(give_up - clock())

    async def _greet(self, connection: Connection, timeout_s: float) -> Finding | None:
        """Log in and read the version; None if all is well, else what stands against this endpoint."""
        try:
            if self.url.user is not None and self._token is None:
                reply = await self._ask(connection, AUTHENTICATE, self._login_request(), timeout_s)
                self._use_token(reply.token)
            status = await self._ask(connection, STATUS, pb.StatusRequest(), timeout_s)
        except grpc.aio.AioRpcError as error:
            code, details = error.code(), error.details() or ""
            fault = classify(code, details)
            if is_not_etcd(code, details):
                return Finding(
                    True,
                    f"found an HTTP/2 server that is not etcd on {connection.endpoint}; correct the address",
                )
            if fault is Fault.REFUSED:
                raise self.error(fault, connection, "open", code, details) from error
            if "etcdserver:" in details:
                return Finding(False, f"found {details!r} on {connection.endpoint}; is its cluster complete?")
            return await probe(self.url, connection.endpoint, min(_PROBE_S, timeout_s))
        check_version(status.version, f"store {self.url} (at {connection.endpoint})")
        return None

    async def _ask(self, connection: Connection, rpc: Rpc, request: Any, timeout_s: float) -> Any:
        return await connection.unary(rpc)(request, timeout=timeout_s, metadata=self.metadata)

    def _login_request(self) -> pb.AuthenticateRequest:
        return pb.AuthenticateRequest(name=self.url.user or "", password=self.url.password or "")

    def _use_token(self, token: str) -> None:
        self._token = token
        self.metadata = (*_ANONYMOUS, ("token", token))


def check_version(version: str, where: str) -> None:
    """Raise `StoreRefusedError` unless 3.4 <= version < 4."""
    numbers = tuple(int(part) for part in version.split("-")[0].split(".")[:2] if part.isdigit())
    if not (MIN_VERSION <= numbers < BELOW_VERSION):
        raise StoreRefusedError(
            f"{where}: found etcd {version or '(no version)'}; want 3.4 or later, below 4; "
            f"upgrade the server or point the URL at another"
        )


def _joined(findings: dict[HostPort, Finding]) -> str:
    return "; ".join(finding.message for finding in findings.values())


def _credentials(url: StoreUrl) -> grpc.ChannelCredentials:
    roots = Path(url.cacert).read_bytes() if url.cacert else _system_roots(url)
    key = Path(url.key).read_bytes() if url.key else None
    cert = Path(url.cert).read_bytes() if url.cert else None
    return grpc.ssl_channel_credentials(roots, key, cert)


def _system_roots(url: StoreUrl) -> bytes:
    """The machine's own authorities, as Python's ssl finds them (gRPC would take a list of its own)."""
    known = ssl.get_default_verify_paths()
    for path in (known.cafile, *_SYSTEM_ROOTS):
        if path and Path(path).is_file():
            return Path(path).read_bytes()
    raise SetupError(
        f"store {url}: found no certificate authorities on this machine; give one by cacert=FILE"
    )
