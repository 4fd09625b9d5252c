"""What membership needs of a store: keys with revisions, leases, one atomic transaction, ordered watches.

One protocol, one implementation (`etcd.py`). Keys are text, values bytes. Every call may raise
`StoreLostError` (no endpoint answers: try again later) or `StoreRefusedError` (it answers and says no).
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Entry:
    """One key as the store holds it."""

    key: str
    value: bytes
    create_revision: int
    """Store revision at which the key came into being: the order of joining."""
    mod_revision: int
    """Store revision of the last write."""
    lease: int = 0
    """Lease that the key dies with, 0 for none."""


@dataclass(frozen=True)
class Snapshot:
    """All keys under a prefix at one revision; a watch from `revision + 1` misses nothing."""

    entries: tuple[Entry, ...]
    revision: int


class Change(enum.Enum):
    PUT = "put"
    DELETE = "delete"


@dataclass(frozen=True)
class Event:
    """One change of one key; for a deletion `entry.value` is empty and `mod_revision` is the deletion's."""

    change: Change
    entry: Entry


@dataclass(frozen=True)
class WatchBatch:
    """Changes in revision order. `resynced` says that history was compacted away: list again, then go on."""

    events: tuple[Event, ...]
    revision: int
    resynced: bool = False


@dataclass(frozen=True)
class Compare:
    """A condition of a transaction. Exactly one of the fields besides `key` is set."""

    key: str
    exists: bool | None = None
    value: bytes | None = None
    mod_revision: int | None = None
    prefix: bool = False
    """Compare every key under `key` (only with `exists=False`: no such key exists)."""


@dataclass(frozen=True)
class Put:
    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True)
class PutIfAbsent:
    """Nested in a transaction: written only if the key does not exist; reported in `TxnResult.created`."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True)
class Delete:
    key: str
    prefix: bool = False


@dataclass(frozen=True)
class TxnResult:
    succeeded: bool
    revision: int
    created: tuple[bool, ...] = ()
    """One flag per `PutIfAbsent`, in order."""


@dataclass(frozen=True)
class WatchRange:
    key: str
    prefix: bool = False
    deletes: bool = True
    """Report deletions too."""


class Store(Protocol):
    """Threads: one asyncio event loop; every call belongs to the loop that opened the store."""

    async def get(self, key: str) -> Entry | None: ...

    async def list(self, prefix: str) -> Snapshot:
        """All keys under `prefix`, oldest first (by create_revision)."""
        ...

    async def count(self, prefix: str) -> int: ...

    async def put(self, key: str, value: bytes, lease: int = 0) -> int:
        """Write; returns the revision. A lease that has expired raises `RejoinError`."""
        ...

    async def delete(self, key: str, prefix: bool = False) -> int:
        """Delete; returns how many keys went."""
        ...

    async def transact(
        self, compares: Sequence[Compare], operations: Sequence[Put | PutIfAbsent | Delete]
    ) -> TxnResult:
        """Apply all operations if all compares hold, else none.

        At most 128 operations (127 with a `PutIfAbsent` among them); none may touch a key that another
        touches (etcd refuses a put under a deleted prefix, too). `StoreLostError` leaves open whether it
        was applied: read before repeating. A lease that has expired raises `RejoinError`.
        """
        ...

    async def grant_lease(self, ttl_s: int) -> int:
        """A new lease id. etcd grants no less than about 2 s."""
        ...

    async def keep_alive(self, lease: int) -> float:
        """Renew once; returns the seconds it is now good for. Raises `RejoinError` when it has expired."""
        ...

    async def revoke_lease(self, lease: int) -> None:
        """End a lease and its keys now; a lease that is already gone is no error."""
        ...

    def watch(self, ranges: Sequence[WatchRange], start_revision: int) -> AsyncIterator[WatchBatch]:
        """Changes from `start_revision` on, across endpoint failures, none lost and none twice.

        Never raises `StoreLostError`: it goes on trying. `StoreRefusedError` ends it.
        Ranges must not overlap. While it catches up after a reconnect one range may run ahead of another.
        After a batch with `resynced`, list; changes that your list already holds (mod_revision <= the
        list's revision) may still follow and are to be dropped.
        """
        ...

    async def close(self) -> None: ...
