"""EtcdStore keeps what the Store protocol promises, on every etcd version at hand."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest

from baguarun.elastic.membership.etcd import EtcdStore
from baguarun.elastic.membership.store import (
    Change,
    Compare,
    Delete,
    Entry,
    Event,
    Put,
    PutIfAbsent,
    TxnResult,
    WatchRange,
)
from baguarun.errors import RejoinError, StoreRefusedError
from tests.support.etcd_servers import EtcdServer
from tests.support.loop import in_loop


@contextlib.asynccontextmanager
async def opened(server: EtcdServer) -> AsyncIterator[EtcdStore]:
    store = await EtcdStore.open(server.url, timeout_s=30)
    try:
        yield store
    finally:
        await store.close()


async def collect(store: EtcdStore, ranges: list[WatchRange], start: int, until: str) -> list[Event]:
    """Changes from `start` on, up to and without the first of the key `until`."""
    events: list[Event] = []
    watch = store.watch(ranges, start)
    async for batch in watch:
        for event in batch.events:
            if event.entry.key == until:
                await watch.aclose()  # type: ignore[attr-defined]
                return events
            events.append(event)
    raise AssertionError("the watch ended")


@in_loop
async def test_a_key_can_be_written_read_and_deleted(shared_etcd: EtcdServer, prefix: str) -> None:
    async with opened(shared_etcd) as store:
        assert await store.get(prefix + "a") is None
        first = await store.put(prefix + "a", b"\x00\xff")
        second = await store.put(prefix + "a", b"2")
        assert await store.get(prefix + "a") == Entry(prefix + "a", b"2", first, second, 0)
        assert await store.delete(prefix + "a") == 1
        assert await store.delete(prefix + "a") == 0


@in_loop
async def test_a_list_is_in_the_order_of_creation(shared_etcd: EtcdServer, prefix: str) -> None:
    async with opened(shared_etcd) as store:
        for name in ("c", "a", "b"):
            await store.put(prefix + name, b"")
        last = await store.put(prefix + "c", b"again")
        await store.put(prefix.removesuffix("/") + "0", b"beside the prefix")
        snapshot = await store.list(prefix)
        assert [entry.key.removeprefix(prefix) for entry in snapshot.entries] == ["c", "a", "b"]
        assert snapshot.revision == last + 1
        assert await store.count(prefix) == 3
        assert await store.delete(prefix, prefix=True) == 3


@in_loop
async def test_a_transaction_applies_all_or_nothing(shared_etcd: EtcdServer, prefix: str) -> None:
    async with opened(shared_etcd) as store:
        a, b, gone = prefix + "a", prefix + "b", prefix + "gone"
        await store.put(gone, b"")
        revision = await store.put(a, b"1")
        holds = [Compare(a, exists=True), Compare(a, value=b"1"), Compare(a, mod_revision=revision)]
        fails = Compare(b, exists=True)
        assert await store.transact([*holds, fails], [Put(b, b""), Delete(gone)]) == TxnResult(
            False, revision
        )
        assert await store.get(gone) is not None
        result = await store.transact(holds, [Put(b, b"2"), Delete(gone)])
        assert result == TxnResult(True, revision + 1)
        assert [entry.key for entry in (await store.list(prefix)).entries] == [a, b]


@in_loop
async def test_put_if_absent_says_which_keys_it_made(shared_etcd: EtcdServer, prefix: str) -> None:
    async with opened(shared_etcd) as store:
        await store.put(prefix + "old", b"kept")
        operations = [
            PutIfAbsent(prefix + "old", b"lost"),
            Put(prefix + "x", b""),
            PutIfAbsent(prefix + "new", b"made"),
        ]
        result = await store.transact([], operations)
        assert (result.succeeded, result.created) == (True, (False, True))
        old, new = await store.get(prefix + "old"), await store.get(prefix + "new")
        assert old is not None and new is not None
        assert (old.value, new.value) == (b"kept", b"made")


@in_loop
async def test_a_compare_can_ask_for_an_empty_prefix(shared_etcd: EtcdServer, prefix: str) -> None:
    async with opened(shared_etcd) as store:
        nobody = Compare(prefix + "nodes/", exists=False, prefix=True)
        assert (await store.transact([nobody], [Put(prefix + "nodes/1", b"")])).succeeded
        assert not (await store.transact([nobody], [Put(prefix + "nodes/2", b"")])).succeeded


@in_loop
async def test_as_many_operations_as_promised_fit_into_one_transaction(
    shared_etcd: EtcdServer, prefix: str
) -> None:
    async with opened(shared_etcd) as store:
        made = await store.transact([], [PutIfAbsent(f"{prefix}{i}", b"") for i in range(127)])
        assert made.created == (True,) * 127
        assert (await store.transact([], [Put(f"{prefix}{i}", b"") for i in range(128)])).succeeded


@in_loop
async def test_a_transaction_that_touches_a_key_twice_is_refused(
    shared_etcd: EtcdServer, prefix: str
) -> None:
    async with opened(shared_etcd) as store:
        with pytest.raises(StoreRefusedError, match="duplicate key"):
            await store.transact([], [Put(prefix + "a", b""), Delete(prefix, prefix=True)])


@in_loop
async def test_revoking_a_lease_takes_its_keys_along(shared_etcd: EtcdServer, prefix: str) -> None:
    async with opened(shared_etcd) as store:
        lease = await store.grant_lease(30)
        await store.put(prefix + "a", b"", lease)
        await store.transact([], [PutIfAbsent(prefix + "b", b"", lease), Put(prefix + "c", b"")])
        entry = await store.get(prefix + "a")
        assert entry is not None and entry.lease == lease
        assert await store.keep_alive(lease) == 30.0
        assert await store.keep_alive(lease) == 30.0
        await store.revoke_lease(lease)
        assert [entry.key for entry in (await store.list(prefix)).entries] == [prefix + "c"]
        await store.revoke_lease(lease)


@in_loop
async def test_whatever_needs_an_expired_lease_says_register_again(
    shared_etcd: EtcdServer, prefix: str
) -> None:
    async with opened(shared_etcd) as store:
        lease = await store.grant_lease(30)
        await store.revoke_lease(lease)
        with pytest.raises(RejoinError, match=r"renew lease .* expired"):
            await store.keep_alive(lease)
        with pytest.raises(RejoinError, match=f"put {prefix}a: the lease has expired"):
            await store.put(prefix + "a", b"", lease)
        with pytest.raises(RejoinError):
            await store.transact([], [Put(prefix + "a", b"", lease)])
        other = await store.grant_lease(30)
        assert await store.keep_alive(other) == 30.0


@in_loop
async def test_a_watch_tells_past_and_present_in_order(shared_etcd: EtcdServer, prefix: str) -> None:
    async with opened(shared_etcd) as store:
        start = await store.put(prefix + "a", b"1")
        await store.put(prefix + "a", b"2")
        await store.delete(prefix + "a")
        await store.put(prefix + "end", b"")
        events = await collect(store, [WatchRange(prefix, prefix=True)], start, prefix + "end")
        assert [(e.change, e.entry.value, e.entry.mod_revision - start) for e in events] == [
            (Change.PUT, b"1", 0),
            (Change.PUT, b"2", 1),
            (Change.DELETE, b"", 2),
        ]


@in_loop
async def test_a_watch_of_several_ranges_tells_nothing_else(shared_etcd: EtcdServer, prefix: str) -> None:
    async with opened(shared_etcd) as store:
        start = await store.put(prefix + "before", b"")
        for key in ("one", "one/below", "many/1", "many/2", "other"):
            await store.put(prefix + key, b"")
        await store.delete(prefix + "many/1")
        await store.delete(prefix + "one")
        await store.put(prefix + "one/end", b"")
        await store.put(prefix + "many/2", b"")
        await store.put(prefix + "one", b"")
        ranges = [WatchRange(prefix + "one"), WatchRange(prefix + "many/", prefix=True, deletes=False)]
        watch = store.watch(ranges, start)
        told: dict[str, list[Change]] = {"one": [], "many/1": [], "many/2": []}
        # One range may run ahead of the other in old history: only the order within each counts.
        while [len(changes) for changes in told.values()] != [3, 1, 2]:
            for event in (await anext(watch)).events:
                told[event.entry.key.removeprefix(prefix)].append(event.change)
        await watch.aclose()  # type: ignore[attr-defined]
        assert told["one"] == [Change.PUT, Change.DELETE, Change.PUT]
        assert {*told["many/1"], *told["many/2"]} == {Change.PUT}


@in_loop
async def test_a_batch_larger_than_one_message_arrives_whole(shared_etcd: EtcdServer, prefix: str) -> None:
    async with opened(shared_etcd) as store:
        start = await store.put(prefix + "start", b"")
        for i in range(6):
            await store.transact([], [Put(f"{prefix}{i}/{j}", bytes(60_000)) for j in range(20)])
        await store.put(prefix + "end", b"")
        events = await collect(store, [WatchRange(prefix, prefix=True)], start + 1, prefix + "end")
        revisions = [event.entry.mod_revision for event in events]
        assert revisions == sorted(revisions)
        assert len({event.entry.key for event in events}) == len(events) == 120
        assert len((await store.list(prefix)).entries) == 122


@in_loop
async def test_a_watch_can_be_dropped_and_the_store_goes_on(shared_etcd: EtcdServer, prefix: str) -> None:
    async with opened(shared_etcd) as store:
        revision = await store.put(prefix + "a", b"")
        watch = store.watch([WatchRange(prefix, prefix=True)], revision)
        await anext(watch)
        await watch.aclose()  # type: ignore[attr-defined]
        assert await store.count(prefix) == 1
