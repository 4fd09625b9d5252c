"""Lease renewals on one long-lived stream: the cheapest way, as an agent does little else while training."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio

from baguarun.elastic.membership.etcd_channel import LEASE_KEEP_ALIVE, Connection, EtcdChannel, Pauses
from baguarun.elastic.membership.etcd_faults import Fault, StreamEndedError, classify
from baguarun.elastic.membership.etcdpb import etcd_pb2 as pb
from baguarun.elastic.membership.waiting import within
from baguarun.errors import RejoinError


class LeaseRenewals:
    """Renews leases one at a time; a stream that fails is made anew on the channel's current connection."""

    def __init__(self, channel: EtcdChannel) -> None:
        self._channel = channel
        self._lock = asyncio.Lock()
        self._connection: Connection | None = None
        self._call: Any = None

    async def renew(self, lease: int) -> float:
        """Renew once, trying for the channel's `timeout_s`; the seconds that the lease is now good for."""
        clock = asyncio.get_running_loop().time
        give_up = clock() + self._channel.timeout_s
        pauses = Pauses()
        logged_in = False
        async with self._lock:
            while True:
                connection, token = self._channel.connection, self._channel.token
                try:
                    attempt_s = max(0.01, min(self._channel.attempt_s, give_up - clock()))
                    return await within(attempt_s, self._ask(connection, lease))
                except asyncio.TimeoutError:
                    code, details = grpc.StatusCode.DEADLINE_EXCEEDED, "no answer in time"
                except grpc.aio.AioRpcError as error:
                    code, details = error.code(), error.details() or ""
                except StreamEndedError as end:
                    code, details = end.code, end.details
                fault = classify(code, details)
                if fault is Fault.TOKEN and self._channel.url.user is not None and not logged_in:
                    await self._channel.login(token)
                    logged_in = True
                    continue
                passing = fault in (Fault.NOT_APPLIED, Fault.UNKNOWN)
                if passing:
                    self._channel.leave(connection, details)
                if not passing or clock() >= give_up:
                    raise self._channel.error(fault, connection, f"renew lease {lease:x}", code, details)
                await pauses.sleep(give_up - clock())

    async def _ask(self, connection: Connection, lease: int) -> float:
        if self._call is None or self._connection is not connection:
            self.close()
            self._connection = connection
            self._call = connection.stream(LEASE_KEEP_ALIVE, self._channel.metadata)
        call = self._call
        answered = False
        try:
            try:
                await call.write(pb.LeaseKeepAliveRequest(ID=lease))
            except asyncio.InvalidStateError:
                pass  # the stream has ended; reading tells why
            reply = await call.read()
            if reply is grpc.aio.EOF:
                raise StreamEndedError(grpc.StatusCode.UNAVAILABLE, "the server ended the stream")
            answered = True
        finally:
            if not answered:
                self.close()
        if reply.TTL <= 0:
            raise RejoinError(
                f"store {self._channel.url}: renew lease {lease:x}: it has expired; register again"
            )
        return float(reply.TTL)

    def close(self) -> None:
        """End the stream, if there is one."""
        if self._call is not None:
            self._call.cancel()
        self._call = self._connection = None
