"""A watch that outlives endpoints: resumed by revision, so that no change is lost and none comes twice."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio

from baguarun.elastic.membership.etcd_channel import RANGE, WATCH, Connection, EtcdChannel, Pauses
from baguarun.elastic.membership.etcd_faults import Fault, StreamEndedError, classify
from baguarun.elastic.membership.etcd_keys import end_of, entry_of
from baguarun.elastic.membership.etcdpb import etcd_pb2 as pb
from baguarun.elastic.membership.store import Change, Event, WatchBatch, WatchRange
from baguarun.elastic.membership.waiting import within
from baguarun.errors import StoreLostError

_log = logging.getLogger("baguarun.store")

_QUEUE_LENGTH = 64


class _Position:
    """How far one range has been delivered."""

    def __init__(self, watched: WatchRange, start_revision: int) -> None:
        self.watched = watched
        self.next_revision = start_revision
        self.created = False
        self.fragments: list[Any] = []

    def create_request(self, watch_id: int) -> pb.WatchRequest:
        self.created = False
        self.fragments = []
        create = pb.WatchCreateRequest(
            key=self.watched.key.encode(),
            range_end=end_of(self.watched.key) if self.watched.prefix else b"",
            start_revision=self.next_revision,
            progress_notify=True,
            watch_id=watch_id,
            fragment=True,
        )
        if not self.watched.deletes:
            create.filters.append(pb.WatchCreateRequest.NODELETE)
        return pb.WatchRequest(create_request=create)

    def take(self, response: pb.WatchResponse) -> WatchBatch | None:
        """The changes in `response`, once its last fragment is here; moves the position past them."""
        self.fragments.extend(response.events)
        if response.fragment:
            return None
        raw, self.fragments = self.fragments, []
        if not raw:  # a progress notice: all up to here has been delivered
            self.next_revision = max(self.next_revision, response.header.revision + 1)
            return None
        events = tuple(
            Event(Change.PUT if event.type == pb.Event.PUT else Change.DELETE, entry_of(event.kv))
            for event in raw
            if event.kv.mod_revision >= self.next_revision
        )
        if not events:
            return None
        self.next_revision = events[-1].entry.mod_revision + 1
        return WatchBatch(events, self.next_revision - 1)


class _Stream:
    """One watch stream on one connection, read by a task of its own.

    gRPC reports a stream that is cancelled from our side as `CancelledError`. Only the reading task meets
    that one, so that a cancelled consumer can never be taken for a lost connection, nor the reverse.
    """

    def __init__(self, connection: Connection, metadata: tuple[tuple[str, str], ...]) -> None:
        self.connection = connection
        self._call = connection.stream(WATCH, metadata)
        self._queue: asyncio.Queue[pb.WatchResponse | StreamEndedError] = asyncio.Queue(_QUEUE_LENGTH)
        self._reader = asyncio.ensure_future(self._read())
        connection.on_lost.add(self._call.cancel)

    async def create(self, requests: Sequence[pb.WatchRequest]) -> None:
        try:
            for request in requests:
                await self._call.write(request)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the reader learns the reason and tells it in `next`

    async def next(self, timeout_s: float | None) -> pb.WatchResponse:
        """The next response; raises `StreamEndedError` when there will be none, or none in time."""
        try:
            wait = self._queue.get()
            item = await (wait if timeout_s is None else within(timeout_s, wait))
        except asyncio.TimeoutError:
            raise StreamEndedError(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer to the watch") from None
        if isinstance(item, StreamEndedError):
            raise item
        return item

    async def _read(self) -> None:
        code, details = grpc.StatusCode.UNAVAILABLE, "the server ended the stream"
        try:
            while (response := await self._call.read()) is not grpc.aio.EOF:
                await self._queue.put(response)
        except grpc.aio.AioRpcError as error:
            code, details = error.code(), error.details() or ""
        except asyncio.CancelledError:
            if not self.connection.lost:
                raise
            details = "the connection was left"
        await self._queue.put(StreamEndedError(code, details))

    def close(self) -> None:
        self.connection.on_lost.discard(self._call.cancel)
        self._reader.cancel()
        self._call.cancel()


class EtcdWatch:
    """Several ranges on one stream; see `Store.watch` for what is promised.

    Within a range changes come in the order of revisions. Between ranges they do too, but for the moments
    after a reconnect in which one range may catch up sooner than another.
    """

    def __init__(self, channel: EtcdChannel, ranges: Sequence[WatchRange], start_revision: int) -> None:
        self._channel = channel
        # etcd numbers watches from 0 by itself; ours start at 1, as 0 would mean "choose one".
        self._positions = {
            number: _Position(watched, start_revision) for number, watched in enumerate(ranges, 1)
        }
        self._pauses = Pauses()
        self._fresh_login = False

    async def batches(self) -> AsyncIterator[WatchBatch]:
        while True:
            token = self._channel.token
            stream = _Stream(self._channel.connection, self._channel.metadata)
            try:
                await stream.create([p.create_request(number) for number, p in self._positions.items()])
                while True:
                    waiting = not all(p.created for p in self._positions.values())
                    response = await stream.next(self._channel.attempt_s if waiting else None)
                    batch = self._take(response) or await self._check_history(response)
                    if batch is not None:
                        yield batch
                        if batch.resynced:
                            break
            except StreamEndedError as end:
                await self._recover(stream.connection, end, token)
            finally:
                stream.close()

    def _take(self, response: pb.WatchResponse) -> WatchBatch | None:
        position = self._positions.get(response.watch_id)
        if response.canceled and response.compact_revision == 0:
            # etcd answers a refused watch with id -1.
            raise StreamEndedError(*_reason(response.cancel_reason))
        if position is None or response.canceled:
            return None
        if response.created:
            position.created = True
            if all(p.created for p in self._positions.values()):
                self._pauses.reset()
                self._fresh_login = False
            return None
        return position.take(response)

    async def _check_history(self, response: pb.WatchResponse) -> WatchBatch | None:
        """Notice that changes cannot be had any more; skip them, and tell the consumer to list.

        Either they are compacted, or the store came back without its data and our revision would never come.
        """
        ahead = max(p.next_revision for p in self._positions.values()) - 1
        compacted = response.canceled and response.compact_revision > 0
        if not compacted and not (response.created and response.header.revision < ahead):
            return None
        try:
            reply = await self._channel.call(
                RANGE, pb.RangeRequest(key=b"\0", count_only=True), "read the revision", repeatable=True
            )
        except StoreLostError as error:
            raise StreamEndedError(grpc.StatusCode.UNAVAILABLE, str(error)) from error
        revision = reply.header.revision
        if not compacted and revision >= ahead:
            return None  # only this member lagged behind
        for position in self._positions.values():
            position.next_revision = revision + 1
        _log.warning(
            "store %s: changes up to revision %d are gone; listing again", self._channel.url, revision
        )
        return WatchBatch((), revision, resynced=True)

    async def _recover(self, connection: Connection, end: StreamEndedError, token: str | None) -> None:
        """Make the next attempt possible, after a pause; raises `StoreRefusedError` where there is none."""
        fault = classify(end.code, end.details)
        # etcd 3.4 calls a watch with a stale token "permission denied".
        stale = fault is Fault.TOKEN or "permission denied" in end.details
        if stale and self._channel.url.user is not None and not self._fresh_login:
            self._fresh_login = True
            await self._log_in(token)
            return
        if fault in (Fault.REFUSED, Fault.TOKEN):
            raise self._channel.error(Fault.REFUSED, connection, self._name(), end.code, end.details)
        _log.info("store %s: watch interrupted (%s); resuming", self._channel.url, end.details)
        self._channel.leave(connection, end.details)
        await self._pauses.sleep()

    async def _log_in(self, token: str | None) -> None:
        try:
            await self._channel.login(token)
        except StoreLostError as error:
            self._fresh_login = False
            _log.info("%s", error)

    def _name(self) -> str:
        return "watch " + ", ".join(p.watched.key for p in self._positions.values())


def _reason(text: str) -> tuple[grpc.StatusCode, str]:
    """Code and details of a watch that etcd cancelled, out of its text."""
    if "permission denied" in text:
        return grpc.StatusCode.PERMISSION_DENIED, text
    return grpc.StatusCode.UNAVAILABLE, text or "the server cancelled the watch"
