"""The store under fire: servers killed, restarted, frozen, compacted, and come back empty."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from baguarun.elastic.membership.etcd import EtcdStore
from baguarun.elastic.membership.store import Change, Put, WatchBatch, WatchRange
from baguarun.elastic.membership.store_url import StoreUrl
from baguarun.errors import RejoinError, StoreLostError
from tests.support.etcd_servers import EtcdCluster, EtcdServer, free_port, running
from tests.support.loop import in_loop

Told = tuple[int, str, bytes]

KEYS = WatchRange("/k/", prefix=True)
END = "/k/end"


@contextlib.asynccontextmanager
async def opened(url: StoreUrl, timeout_s: float = 60, **options: float) -> AsyncIterator[EtcdStore]:
    store = await EtcdStore.open(url, timeout_s=timeout_s, **options)
    try:
        yield store
    finally:
        await store.close()


async def follow(store: EtcdStore, start: int, seen: list[Told]) -> None:
    """Collect changes into `seen` until END is written."""
    async for batch in store.watch([KEYS], start):
        assert not batch.resynced
        for event in batch.events:
            seen.append((event.entry.mod_revision, event.entry.key, event.entry.value))
            if event.entry.key == END:
                return


async def history(url: StoreUrl, start: int) -> list[Told]:
    """What really happened, told by a watch that nothing disturbs."""
    async with opened(url) as store:
        seen: list[Told] = []
        await follow(store, start, seen)
        return seen


async def write(store: EtcdStore, count: int, name: str) -> None:
    for i in range(count):
        await store.put(f"/k/{name}", str(i).encode())


async def current(watcher: EtcdStore, cluster: EtcdCluster) -> EtcdServer:
    """The member that `watcher` is connected to."""
    return cluster.at(watcher._channel.connection.endpoint.port)


@in_loop
async def test_a_watch_goes_on_after_the_server_was_killed_and_restarted(etcd: EtcdServer) -> None:
    async with opened(etcd.url) as store:
        start = await store.put("/k/a", b"")
        seen: list[Told] = []
        watching = asyncio.ensure_future(follow(store, start, seen))
        await write(store, 20, "before")
        etcd.kill()
        await asyncio.sleep(0.2)
        etcd.start()
        await write(store, 20, "after")
        await store.put(END, b"")
        await watching
        assert seen == await history(etcd.url, start)
        assert len({revision for revision, _, _ in seen}) == len(seen) >= 42


@in_loop
async def test_a_frozen_server_loses_nothing_when_it_thaws(etcd: EtcdServer) -> None:
    async with opened(etcd.url) as store:
        start = await store.put("/k/a", b"")
        seen: list[Told] = []
        watching = asyncio.ensure_future(follow(store, start, seen))
        etcd.freeze()
        writing = asyncio.ensure_future(write(store, 5, "late"))
        await asyncio.sleep(0.5)
        assert not writing.done()
        etcd.thaw()
        await writing
        await store.put(END, b"")
        await watching
        assert seen == await history(etcd.url, start)


@in_loop
async def test_calls_to_a_frozen_server_end_and_heal(etcd: EtcdServer) -> None:
    async with opened(etcd.url) as store:
        await store.put("/k/a", b"1")
        lease = await store.grant_lease(60)
        patient_s = store._channel.timeout_s
        etcd.freeze()
        store._channel.timeout_s = store._channel.attempt_s = 1.0
        for call in (store.get("/k/a"), store.transact([], [Put("/k/b", b"")]), store.keep_alive(lease)):
            with pytest.raises(StoreLostError, match=f"store etcd://{etcd.endpoint}: .*no answer"):
                await call
        store._channel.timeout_s = store._channel.attempt_s = patient_s
        etcd.thaw()
        assert await store.keep_alive(lease) == 60.0
        entry = await store.get("/k/a")
        assert entry is not None and entry.value == b"1"


@in_loop
async def test_a_lease_outlives_a_restart_and_can_be_renewed(etcd: EtcdServer) -> None:
    async with opened(etcd.url) as store:
        lease = await store.grant_lease(60)
        await store.put("/k/mine", b"", lease)
        assert await store.keep_alive(lease) == 60.0
        etcd.restart()
        assert await store.keep_alive(lease) == 60.0
        assert await store.count("/k/") == 1


@in_loop
async def test_a_transaction_with_a_lost_reply_is_not_repeated(etcd: EtcdServer) -> None:
    async with opened(etcd.url) as store:
        start = await store.put("/k/a", b"")
        etcd.freeze()
        transaction = asyncio.ensure_future(store.transact([], [Put("/k/once", b"")]))
        await asyncio.sleep(0.2)
        etcd.restart()
        with pytest.raises(StoreLostError, match="transaction on /k/once and 0 more: no answer"):
            await transaction
        await store.put(END, b"")
        times = [key for _, key, _ in await history(etcd.url, start)].count("/k/once")
        assert times <= 1


@in_loop
async def test_a_transaction_that_never_left_is_repeated_until_the_server_is_back(etcd: EtcdServer) -> None:
    async with opened(etcd.url) as store:
        await store.put("/k/a", b"")
        etcd.kill()
        await asyncio.sleep(1.5)  # the connection's end is seen
        transaction = asyncio.ensure_future(store.transact([], [Put("/k/c", b"")]))
        await asyncio.sleep(0.3)
        etcd.start()
        assert (await transaction).succeeded


@in_loop
async def test_a_compacted_history_is_told_and_the_watch_goes_on(etcd: EtcdServer) -> None:
    async with opened(etcd.url) as store:
        start = await store.put("/k/a", b"")
        await write(store, 10, "lost")
        last = await store.put("/k/b", b"")
        etcd.etcdctl("compact", str(last))
        watch = store.watch([KEYS, WatchRange("/other")], start)
        batch = await anext(watch)
        assert batch.resynced and not batch.events
        snapshot = await store.list("/k/")
        assert batch.revision <= snapshot.revision
        await store.put("/k/new", b"")
        await store.put("/other", b"")
        fresh = [
            event.entry.key for batch in [await anext(watch), await anext(watch)] for event in batch.events
        ]
        assert sorted(fresh) == ["/k/new", "/other"]
        await watch.aclose()  # type: ignore[attr-defined]


@in_loop
async def test_a_history_compacted_while_the_watch_was_cut_off_is_told(etcd: EtcdServer) -> None:
    async with opened(etcd.url) as store:
        start = await store.put("/k/a", b"")
        watch = store.watch([KEYS], start)
        await anext(watch)
        waiting = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0.1)
        etcd.kill()
        port, etcd.port = etcd.port, free_port()  # where the watch cannot reach it
        etcd.start()
        async with opened(etcd.url) as other:
            await other.put("/k/b", b"")
            last = await other.put("/k/c", b"")
        etcd.etcdctl("compact", str(last))
        etcd.kill()
        etcd.port = port
        etcd.start()
        assert (await waiting).resynced
        revision = await store.put("/k/d", b"")
        assert [e.entry.mod_revision for e in (await anext(watch)).events] == [revision]
        await watch.aclose()  # type: ignore[attr-defined]


@in_loop
async def test_a_server_that_came_back_empty_is_noticed(etcd: EtcdServer) -> None:
    async with opened(etcd.url) as store:
        lease = await store.grant_lease(60)
        for _ in range(10):
            start = await store.put("/k/a", b"")
        watch = store.watch([KEYS], start + 1)
        waiting: asyncio.Future[WatchBatch] = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0.2)
        etcd.kill()
        etcd.lose_data()
        etcd.start()
        batch = await waiting
        assert batch.resynced
        assert batch.revision < start
        revision = await store.put("/k/new", b"")
        event = (await anext(watch)).events[0]
        assert (event.change, event.entry.key, event.entry.mod_revision) == (Change.PUT, "/k/new", revision)
        with pytest.raises(RejoinError):
            await store.keep_alive(lease)
        await watch.aclose()  # type: ignore[attr-defined]


@pytest.mark.parametrize("fault", ["kill", "freeze"])
@in_loop
async def test_a_member_that_goes_is_left_for_another(cluster: EtcdCluster, fault: str) -> None:
    async with opened(cluster.url) as watcher:
        start = await watcher.put("/k/a", b"")
        lease = await watcher.grant_lease(60)
        await watcher.keep_alive(lease)
        seen: list[Told] = []
        watching = asyncio.ensure_future(follow(watcher, start, seen))
        victim = await current(watcher, cluster)
        others = StoreUrl(endpoints=tuple(m.endpoint for m in cluster.members if m is not victim))
        async with opened(others) as writer:
            await write(writer, 20, "before")
            victim.kill() if fault == "kill" else victim.freeze()
            await write(writer, 20, "during")
            # The renewal is what an agent does anyway; it finds the dead member before the pings do.
            assert await watcher.keep_alive(lease) > 0
            assert await current(watcher, cluster) is not victim
            await writer.put(END, b"")
            await watching
        victim.start() if fault == "kill" else victim.thaw()
        assert seen == await history(others, start)
        assert await watcher.count("/k/") == 4


@in_loop
async def test_an_idle_watch_leaves_a_frozen_member_by_itself(cluster: EtcdCluster) -> None:
    async with opened(cluster.url) as watcher:
        start = await watcher.put("/k/a", b"")
        watch = watcher.watch([KEYS], start + 1)
        waiting = asyncio.ensure_future(anext(watch))
        victim = await current(watcher, cluster)
        others = StoreUrl(endpoints=tuple(m.endpoint for m in cluster.members if m is not victim))
        await asyncio.sleep(0.2)
        victim.freeze()
        async with opened(others) as writer:
            await writer.put("/k/b", b"")
        assert [event.entry.key for event in (await waiting).events] == ["/k/b"]
        await watch.aclose()  # type: ignore[attr-defined]


@pytest.mark.parametrize("fault", ["kill", "freeze"])
@in_loop
async def test_opening_finds_a_member_that_is_up(cluster: EtcdCluster, fault: str) -> None:
    victim = cluster.members[0]
    victim.kill() if fault == "kill" else victim.freeze()
    for _ in range(3):  # wherever it starts
        async with opened(cluster.url) as store:
            await store.put("/k/a", b"")
            assert await current(store, cluster) is not victim


@in_loop
async def test_without_a_quorum_calls_end_and_heal_with_the_quorum(cluster: EtcdCluster) -> None:
    async with opened(cluster.url, timeout_s=4) as store:
        await store.put("/k/a", b"")
        first, second, _ = cluster.members
        first.kill()
        second.kill()
        with pytest.raises(StoreLostError):
            await store.put("/k/b", b"")
        first.start(wait=False)
        second.start(wait=False)
        first.wait_ready()
        second.wait_ready()
        await store.put("/k/b", b"")


@in_loop
async def test_a_store_that_starts_late_is_waited_for(etcd_binary: Path, tmp_path: Path) -> None:
    server = EtcdServer(tmp_path / "late", etcd_binary)
    opening = asyncio.ensure_future(EtcdStore.open(server.url, timeout_s=60))
    await asyncio.sleep(0.5)
    assert not opening.done()
    with running(server):
        store = await opening
        assert await store.count("/") == 0
        await store.close()


@in_loop
async def test_closing_a_store_leaves_no_task_behind(etcd: EtcdServer) -> None:
    before = asyncio.all_tasks()
    store = await EtcdStore.open(etcd.url)
    await store.keep_alive(await store.grant_lease(60))
    watch = store.watch([KEYS], 1)
    waiting = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0.1)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    await watch.aclose()  # type: ignore[attr-defined]
    await store.close()
    while asyncio.all_tasks() != before:  # gRPC's own end a moment later
        await asyncio.sleep(0.01)
