"""The store, implemented: etcd v3 (3.4 to 3.6) through grpc.aio."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from baguarun.elastic.membership.etcd_channel import (
    DELETE_RANGE,
    LEASE_GRANT,
    LEASE_REVOKE,
    PUT,
    RANGE,
    TXN,
    EtcdChannel,
)
from baguarun.elastic.membership.etcd_keys import delete_request, end_of, entry_of, txn_request
from baguarun.elastic.membership.etcd_lease import LeaseRenewals
from baguarun.elastic.membership.etcd_watch import EtcdWatch
from baguarun.elastic.membership.etcdpb import etcd_pb2 as pb
from baguarun.elastic.membership.store import (
    Compare,
    Delete,
    Entry,
    Put,
    PutIfAbsent,
    Snapshot,
    TxnResult,
    WatchBatch,
    WatchRange,
)
from baguarun.elastic.membership.store_url import StoreUrl
from baguarun.errors import RejoinError

PING_INTERVAL_S = 6.0
"""Seconds between pings of an idle connection: etcd hangs up on clients that ping oftener than every 5 s."""


class EtcdStore:
    """A `Store` on an etcd cluster, over one connection. Made by `open`.

    What is repeated when a reply is lost: reads, puts, lease grants and renewals, revocations. Transactions
    and deletions are not: they raise `StoreLostError`, and the caller reads what became of them.

    Threads: one asyncio event loop, the one that opened it.
    """

    def __init__(self, channel: EtcdChannel) -> None:
        self._channel = channel
        self._renewals = LeaseRenewals(channel)

    @classmethod
    async def open(
        cls, url: StoreUrl, *, timeout_s: float = 10.0, ping_interval_s: float = PING_INTERVAL_S
    ) -> EtcdStore:
        """Connect, log in and check the server's version (3.4 <= version < 4).

        `timeout_s` bounds the opening and, later, each operation with all its attempts. `ping_interval_s`
        may be below 5 only for an etcd that was told so (`--grpc-keepalive-min-time`), as a `PrivateEtcd` is.

        Raises `StoreRefusedError` when the URL cannot be right (not an etcd, wrong version, login or
        certificate) and `StoreLostError` when nobody answers in time; both say what each endpoint is.
        """
        channel = EtcdChannel(url, timeout_s=timeout_s, ping_interval_s=ping_interval_s)
        try:
            await channel.open()
        except BaseException:
            await channel.close()
            raise
        return cls(channel)

    async def get(self, key: str) -> Entry | None:
        request = pb.RangeRequest(key=key.encode())
        reply = await self._channel.call(RANGE, request, f"get {key}", repeatable=True)
        return entry_of(reply.kvs[0]) if reply.kvs else None

    async def list(self, prefix: str) -> Snapshot:
        request = pb.RangeRequest(key=prefix.encode() or b"\0", range_end=end_of(prefix))
        reply = await self._channel.call(RANGE, request, f"list {prefix}", repeatable=True)
        # Sorted here: a sorted range costs etcd as much again.
        entries = sorted(map(entry_of, reply.kvs), key=lambda entry: (entry.create_revision, entry.key))
        return Snapshot(tuple(entries), reply.header.revision)

    async def count(self, prefix: str) -> int:
        request = pb.RangeRequest(key=prefix.encode() or b"\0", range_end=end_of(prefix), count_only=True)
        reply = await self._channel.call(RANGE, request, f"count {prefix}", repeatable=True)
        return int(reply.count)

    async def put(self, key: str, value: bytes, lease: int = 0) -> int:
        request = pb.PutRequest(key=key.encode(), value=value, lease=lease)
        reply = await self._channel.call(PUT, request, f"put {key}", repeatable=True)
        return int(reply.header.revision)

    async def delete(self, key: str, prefix: bool = False) -> int:
        reply = await self._channel.call(
            DELETE_RANGE, delete_request(key, prefix), f"delete {key}", repeatable=False
        )
        return int(reply.deleted)

    async def transact(
        self, compares: Sequence[Compare], operations: Sequence[Put | PutIfAbsent | Delete]
    ) -> TxnResult:
        request = txn_request(compares, operations)
        keys = [item.key for item in (*operations, *compares)]
        what = f"transaction on {keys[0]} and {len(keys) - 1} more" if keys else "empty transaction"
        reply = await self._channel.call(TXN, request, what, repeatable=False)
        created = tuple(
            response.response_txn.succeeded
            for response, operation in zip(reply.responses, operations, strict=False)
            if isinstance(operation, PutIfAbsent)
        )
        return TxnResult(reply.succeeded, reply.header.revision, created)

    async def grant_lease(self, ttl_s: int) -> int:
        # Repeated after a lost reply, the first lease is left to expire unused.
        request = pb.LeaseGrantRequest(TTL=ttl_s)
        reply = await self._channel.call(LEASE_GRANT, request, f"grant a lease of {ttl_s} s", repeatable=True)
        return int(reply.ID)

    async def keep_alive(self, lease: int) -> float:
        return await self._renewals.renew(lease)

    async def revoke_lease(self, lease: int) -> None:
        request = pb.LeaseRevokeRequest(ID=lease)
        try:
            await self._channel.call(LEASE_REVOKE, request, f"revoke lease {lease:x}", repeatable=True)
        except RejoinError:
            pass  # gone already, which is what was wanted

    def watch(self, ranges: Sequence[WatchRange], start_revision: int) -> AsyncIterator[WatchBatch]:
        return EtcdWatch(self._channel, ranges, start_revision).batches()

    async def close(self) -> None:
        """Drop the connection. End your calls and watches first: what is in flight is cancelled."""
        self._renewals.close()
        await self._channel.close()
