"""TLS, client certificates, logins and permissions, on real servers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from baguarun.elastic.membership.etcd import EtcdStore
from baguarun.elastic.membership.store import Put, WatchRange
from baguarun.elastic.membership.store_url import StoreUrl
from baguarun.errors import StoreRefusedError
from tests.support.etcd_servers import Certificates, EtcdServer, running
from tests.support.loop import in_loop

ROOT = "root:rootpw"


@pytest.fixture
def tls_etcd(etcd_binary: Path, tmp_path: Path, certificates: Certificates) -> Iterator[EtcdServer]:
    with running(EtcdServer(tmp_path / "tls", etcd_binary, certificates=certificates)) as server:
        yield server


def guard(server: EtcdServer) -> None:
    """Switch logins on: bob may use /job/ only."""
    for command in (
        f"user add {ROOT}",
        "user add bob:bobpw",
        "role add root",
        "role add job",
        "role grant-permission job --prefix=true readwrite /job/",
        "user grant-role bob job",
        "user grant-role root root",
        "auth enable",
    ):
        server.etcdctl(*command.split())


def as_user(url: StoreUrl, user: str, password: str) -> StoreUrl:
    return replace(url, user=user, password=password)


async def refusal(url: StoreUrl) -> str:
    with pytest.raises(StoreRefusedError) as caught:
        await EtcdStore.open(url, timeout_s=60)
    return str(caught.value)


@in_loop
async def test_client_certificate_and_login_together_open_the_store(tls_etcd: EtcdServer) -> None:
    guard(tls_etcd)
    store = await EtcdStore.open(as_user(tls_etcd.url, "bob", "bobpw"), timeout_s=60)
    revision = await store.put("/job/a", b"1")
    assert await store.keep_alive(await store.grant_lease(60)) == 60.0
    watch = store.watch([WatchRange("/job/", prefix=True)], revision)
    assert (await anext(watch)).revision == revision
    await watch.aclose()  # type: ignore[attr-defined]
    await store.close()


@in_loop
async def test_a_server_of_another_authority_is_refused(tls_etcd: EtcdServer, tmp_path: Path) -> None:
    others = Certificates.make(tmp_path / "others")
    message = await refusal(replace(tls_etcd.url, cacert=others.ca))
    assert f"certificate of {tls_etcd.endpoint} that does not pass" in message
    assert "cacert=" in message


@in_loop
async def test_the_system_roots_do_not_vouch_for_a_private_authority(tls_etcd: EtcdServer) -> None:
    message = await refusal(replace(tls_etcd.url, cacert=None))
    assert "does not pass" in message


@in_loop
async def test_a_missing_client_certificate_is_named(tls_etcd: EtcdServer) -> None:
    message = await refusal(replace(tls_etcd.url, cert=None, key=None))
    assert "does not accept our client certificate" in message
    assert "cert= and key=" in message


@in_loop
async def test_a_client_certificate_of_another_authority_is_named(
    tls_etcd: EtcdServer, tmp_path: Path
) -> None:
    others = Certificates.make(tmp_path / "others")
    message = await refusal(replace(tls_etcd.url, cert=others.cert("client"), key=others.key("client")))
    assert "does not accept our client certificate" in message


@in_loop
async def test_plain_etcd_to_a_tls_server_says_etcds(tls_etcd: EtcdServer) -> None:
    assert "write etcds://" in await refusal(StoreUrl(endpoints=(tls_etcd.endpoint,)))


@in_loop
async def test_etcds_to_a_plain_server_says_etcd(shared_etcd: EtcdServer, certificates: Certificates) -> None:
    assert "write etcd://" in await refusal(replace(shared_etcd.url, tls=True, cacert=certificates.ca))


@in_loop
async def test_a_missing_or_wrong_login_is_refused(etcd: EtcdServer) -> None:
    guard(etcd)
    assert "check user and password" in await refusal(as_user(etcd.url, "bob", "wrong"))
    assert "check user and password" in await refusal(as_user(etcd.url, "nobody", "bobpw"))
    store = await EtcdStore.open(etcd.url, timeout_s=60)
    with pytest.raises(StoreRefusedError, match=r"get /job/a: found user name is empty; .*USER:PASSWORD@"):
        await store.get("/job/a")
    await store.close()


@in_loop
async def test_a_login_to_a_store_without_logins_is_refused(shared_etcd: EtcdServer) -> None:
    message = await refusal(as_user(shared_etcd.url, "bob", "bobpw"))
    assert "authentication is not enabled; take the user out of the URL" in message
    assert "bobpw" not in message


@in_loop
async def test_a_key_outside_the_role_is_named(etcd: EtcdServer) -> None:
    guard(etcd)
    store = await EtcdStore.open(as_user(etcd.url, "bob", "bobpw"), timeout_s=60)
    await store.put("/job/a", b"")
    with pytest.raises(
        StoreRefusedError, match=r"put /other/a: found permission denied; ask .* grant-permission"
    ):
        await store.put("/other/a", b"")
    with pytest.raises(StoreRefusedError, match="list /other/"):
        await store.list("/other/")
    with pytest.raises(StoreRefusedError, match="transaction on /other/a"):
        await store.transact([], [Put("/other/a", b"")])
    watch = store.watch([WatchRange("/job/", prefix=True), WatchRange("/other/", prefix=True)], 1)
    with pytest.raises(StoreRefusedError, match=r"watch /job/, /other/: found .*permission denied"):
        async for _ in watch:
            pass
    await store.close()


@in_loop
async def test_a_login_that_has_run_out_is_renewed_unseen(etcd: EtcdServer) -> None:
    """A restarted etcd has forgotten every token."""
    guard(etcd)
    store = await EtcdStore.open(as_user(etcd.url, "bob", "bobpw"), timeout_s=60)
    revision = await store.put("/job/a", b"")
    lease = await store.grant_lease(60)
    await store.keep_alive(lease)
    watch = store.watch([WatchRange("/job/", prefix=True)], revision + 1)
    waiting = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0.2)
    etcd.restart()
    results = await asyncio.gather(*(store.transact([], [Put(f"/job/{i}", b"")]) for i in range(5)))
    assert all(result.succeeded for result in results)
    assert await store.keep_alive(lease) == 60.0
    assert (await waiting).events[0].entry.key.startswith("/job/")
    await watch.aclose()  # type: ignore[attr-defined]
    await store.close()


@in_loop
async def test_a_role_taken_away_ends_the_watch_with_the_reason(etcd: EtcdServer) -> None:
    guard(etcd)
    store = await EtcdStore.open(as_user(etcd.url, "bob", "bobpw"), timeout_s=60)
    revision = await store.put("/job/a", b"")
    watch = store.watch([WatchRange("/job/", prefix=True)], revision + 1)
    waiting = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0.2)
    etcd.etcdctl("user", "revoke-role", "bob", "job", user=ROOT)
    etcd.restart()
    with pytest.raises(StoreRefusedError, match="watch /job/"):
        await waiting
    await store.close()
