"""A store in memory that behaves as etcd does: revisions, leases that expire, watches, and trouble."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar

from baguarun.elastic.membership.store import (
    Change,
    Compare,
    Delete,
    Entry,
    Event,
    Put,
    PutIfAbsent,
    Snapshot,
    TxnResult,
    WatchBatch,
    WatchRange,
)
from baguarun.elastic.membership.waiting import within
from baguarun.errors import RejoinError, StoreLostError, StoreRefusedError

T = TypeVar("T")
Operation = Put | PutIfAbsent | Delete


class FakeServer:
    """The data behind all `FakeStore`s of a test. Leases expire by the loop's clock."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.revision = 1
        self.history: list[Event] = []
        self.compacted = 0
        self.changed = asyncio.Event()
        self._lease_keys: dict[int, set[str]] = {}
        self._expiries: dict[int, asyncio.TimerHandle] = {}
        self._ttls: dict[int, int] = {}
        self._next_lease = 100
        self.running = asyncio.Event()
        self.running.set()
        self.puts: Counter[str] = Counter()
        """How often each key has been written."""

    # -- trouble

    def freeze(self) -> None:
        """Answer nobody; leases go on running and expire when it thaws."""
        self.running.clear()

    def thaw(self) -> None:
        self.running.set()
        self._wake()

    def restart(self) -> None:
        """Back from a stop: every lease has its whole time before it again."""
        for lease in tuple(self._ttls):
            self._arm(lease)
        self.thaw()

    def lose_data(self) -> None:
        """Come back empty, counting revisions from the beginning."""
        for handle in self._expiries.values():
            handle.cancel()
        self.entries, self.history, self.revision, self.compacted = {}, [], 1, 0
        self._lease_keys, self._expiries, self._ttls = {}, {}, {}
        self.thaw()

    def expire_all(self) -> None:
        """Every lease ends at once."""
        for lease in tuple(self._ttls):
            self.end_lease(lease)

    def compact(self) -> None:
        self.compacted = self.revision
        self.history = [event for event in self.history if event.entry.mod_revision > self.compacted]

    # -- what a server does

    def keys(self, prefix: str = "") -> list[str]:
        return sorted(key for key in self.entries if key.startswith(prefix))

    def grant(self, ttl_s: int) -> int:
        self._next_lease += 1
        self._ttls[self._next_lease] = ttl_s
        self._lease_keys[self._next_lease] = set()
        self._arm(self._next_lease)
        return self._next_lease

    def renew(self, lease: int) -> float:
        if lease not in self._ttls:
            raise RejoinError(f"lease {lease} has expired")
        self._arm(lease)
        return float(self._ttls[lease])

    def end_lease(self, lease: int) -> None:
        if self._ttls.pop(lease, None) is None:
            return
        self._expiries.pop(lease).cancel()
        self.apply([Delete(key) for key in sorted(self._lease_keys.pop(lease))])

    def _arm(self, lease: int) -> None:
        if lease in self._expiries:
            self._expiries[lease].cancel()
        loop = asyncio.get_running_loop()
        self._expiries[lease] = loop.call_later(self._ttls[lease], self._expire, lease)

    def _expire(self, lease: int) -> None:
        if self.running.is_set():
            self.end_lease(lease)
        else:
            # Not while frozen: when it thaws, pending renewals come too late.
            self._expiries[lease] = asyncio.get_running_loop().call_later(0.01, self._expire, lease)

    def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> TxnResult:
        _check_shape(operations)
        for operation in operations:
            lease = getattr(operation, "lease", 0)
            if lease and lease not in self._ttls:
                raise RejoinError(f"lease {lease} has expired")
        if not all(self._holds(compare) for compare in compares):
            return TxnResult(False, self.revision)
        created = tuple(op.key not in self.entries for op in operations if isinstance(op, PutIfAbsent))
        self.apply(operations)
        return TxnResult(True, self.revision, created)

    def _holds(self, compare: Compare) -> bool:
        if compare.prefix:
            return not self.keys(compare.key)
        entry = self.entries.get(compare.key)
        if compare.exists is not None:
            return compare.exists == (entry is not None)
        if compare.value is not None:
            return entry is not None and entry.value == compare.value
        return (entry.mod_revision if entry else 0) == compare.mod_revision

    def apply(self, operations: Sequence[Operation]) -> None:
        events: list[Event] = []
        revision = self.revision + 1
        for operation in operations:
            if isinstance(operation, Delete):
                keys = self.keys(operation.key) if operation.prefix else [operation.key]
                for key in keys:
                    if key in self.entries:
                        events.append(self._delete(key, revision))
            elif isinstance(operation, Put) or operation.key not in self.entries:
                events.append(self._put(operation, revision))
        if events:
            self.revision = revision
            self.history += events
            self._wake()

    def _put(self, operation: Put | PutIfAbsent, revision: int) -> Event:
        key, old = operation.key, self.entries.get(operation.key)
        created = old.create_revision if old else revision
        entry = Entry(key, operation.value, created, revision, operation.lease)
        self._detach(old)
        self.entries[key] = entry
        self.puts[key] += 1
        if operation.lease:
            self._lease_keys[operation.lease].add(key)
        return Event(Change.PUT, entry)

    def _delete(self, key: str, revision: int) -> Event:
        self._detach(self.entries.pop(key))
        return Event(Change.DELETE, Entry(key, b"", 0, revision))

    def _detach(self, entry: Entry | None) -> None:
        if entry is not None and entry.lease:
            self._lease_keys.get(entry.lease, set()).discard(entry.key)

    def _wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


def _check_shape(operations: Sequence[Operation]) -> None:
    """etcd refuses such transactions, so a test must not pass with them."""
    assert len(operations) <= 128, f"{len(operations)} operations in one transaction"
    keys = [op.key for op in operations if not (isinstance(op, Delete) and op.prefix)]
    assert len(keys) == len(set(keys)), f"one key twice in a transaction: {keys}"
    for prefix in (op.key for op in operations if isinstance(op, Delete) and op.prefix):
        clash = [op.key for op in operations if isinstance(op, Put) and op.key.startswith(prefix)]
        assert not clash, f"puts under a deleted prefix: {clash}"


class FakeStore:
    """One client: a `Store`. Its link can be cut or stalled; calls take a little (random, seeded) time."""

    def __init__(self, server: FakeServer, seed: int = 0, timeout_s: float = 5.0) -> None:
        self.server = server
        self.timeout_s = timeout_s
        self._random = random.Random(seed)
        self._link = asyncio.Event()
        self._link.set()
        self._cut = False
        self.lost_replies = 0
        """So many of the next transactions are applied, and their replies lost."""
        self.stall_at = ""
        """The next transaction that writes this key meets a stalled link."""
        self.is_full = False
        """Writes are refused, as by an etcd that has no space left."""

    # -- trouble

    def cut(self) -> None:
        """Calls fail at once, watches go silent."""
        self._cut = True

    def stall(self) -> None:
        """Everything in both directions waits, as if this process were stopped."""
        self._link.clear()

    def mend(self) -> None:
        self._cut = False
        self._link.set()

    # -- Store

    async def get(self, key: str) -> Entry | None:
        return await self._call(lambda: self.server.entries.get(key))

    async def list(self, prefix: str) -> Snapshot:
        return await self._call(lambda: self._list(prefix))

    async def count(self, prefix: str) -> int:
        return await self._call(lambda: len(self.server.keys(prefix)))

    async def put(self, key: str, value: bytes, lease: int = 0) -> int:
        if self.is_full:
            raise StoreRefusedError("found database space exceeded")
        return (await self._call(lambda: self.server.transact([], [Put(key, value, lease)]))).revision

    async def delete(self, key: str, prefix: bool = False) -> int:
        before = len(self.server.entries)
        await self._call(lambda: self.server.transact([], [Delete(key, prefix)]))
        return before - len(self.server.entries)

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> TxnResult:
        if self.stall_at and any(operation.key == self.stall_at for operation in operations):
            self.stall_at = ""
            self.stall()
        if self.is_full:
            raise StoreRefusedError("found database space exceeded")
        result = await self._call(lambda: self.server.transact(compares, operations))
        if self.lost_replies:
            self.lost_replies -= 1
            raise StoreLostError("the reply was lost")
        return result

    async def grant_lease(self, ttl_s: int) -> int:
        return await self._call(lambda: self.server.grant(ttl_s))

    async def keep_alive(self, lease: int) -> float:
        return await self._call(lambda: self.server.renew(lease))

    async def revoke_lease(self, lease: int) -> None:
        await self._call(lambda: self.server.end_lease(lease))

    async def watch(self, ranges: Sequence[WatchRange], start_revision: int) -> AsyncIterator[WatchBatch]:
        position = start_revision
        while True:
            changed = self.server.changed
            if self._cut:
                await asyncio.sleep(0.1)
                continue
            await self._link.wait()
            await self.server.running.wait()
            if position <= self.server.compacted:
                position = self.server.revision + 1
                yield WatchBatch((), self.server.revision, resynced=True)
                continue
            revision = self.server.revision
            events = tuple(
                event
                for event in self.server.history
                if event.entry.mod_revision >= position and _is_watched(event, ranges)
            )
            if events:
                await asyncio.sleep(self._random.uniform(0.0, 0.002))
                if self._cut or not self._link.is_set():
                    continue
            position = max(position, revision + 1)
            if events:
                yield WatchBatch(events, revision)
            elif changed is self.server.changed:
                await changed.wait()

    async def close(self) -> None:
        return None

    def _list(self, prefix: str) -> Snapshot:
        found = [self.server.entries[key] for key in self.server.keys(prefix)]
        return Snapshot(tuple(sorted(found, key=lambda e: e.create_revision)), self.server.revision)

    async def _call(self, call: Callable[[], T]) -> T:
        await self._reach()
        result = call()
        await self._reach()
        return result

    async def _reach(self) -> None:
        """One way over the link."""
        await asyncio.sleep(self._random.uniform(0.0, 0.001))
        if self._cut:
            await asyncio.sleep(0.01)
            raise StoreLostError("the link is cut")
        await self._link.wait()
        try:
            await within(self.timeout_s, self.server.running.wait())
        except asyncio.TimeoutError:
            raise StoreLostError("the store does not answer") from None


def _is_watched(event: Event, ranges: Sequence[WatchRange]) -> bool:
    key = event.entry.key
    return any(
        (key.startswith(r.key) if r.prefix else key == r.key) and (r.deletes or event.change is Change.PUT)
        for r in ranges
    )
