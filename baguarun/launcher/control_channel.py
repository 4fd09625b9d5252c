"""The agent's end of a worker's control channel (`contract.Topic`)."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import cast

from baguarun.contract import ControlDecoder, ControlMessage
from baguarun.errors import SetupError


class ControlChannel(asyncio.Protocol):
    """Sends and receives messages without blocking. Threads: the agent's event loop.

    A worker that has gone is no error here: the keeper tells how it ended.
    """

    def __init__(self, heard: Callable[[ControlMessage], None], broken: Callable[[str], None]) -> None:
        """Use `open`."""
        self._heard = heard
        self._broken = broken
        self._decoder = ControlDecoder()
        self._transport: asyncio.WriteTransport | None = None

    @classmethod
    async def open(
        cls, heard: Callable[[ControlMessage], None], broken: Callable[[str], None]
    ) -> tuple[ControlChannel, socket.socket]:
        """A channel, and the worker's end of it, to be closed when the worker has it.

        `heard` gets every message; `broken` hears, with the reason, of a worker that sends no messages but
        something else.
        """
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise SetupError(
                f"no control channel for a worker: {error.strerror} (see `ulimit -n`)"
            ) from error
        channel = cls(heard, broken)
        await asyncio.get_running_loop().create_connection(lambda: channel, sock=ours)
        return channel, theirs

    def send(self, message: ControlMessage) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(message.encode())

    def close(self) -> None:
        """The worker, if it still lives, ends at once."""
        if self._transport is not None:
            self._transport.abort()

    # -- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            messages = self._decoder.feed(data)
        except ValueError as error:
            self._broken(str(error))
            self.close()
            return
        for message in messages:
            self._heard(message)
