"""The worker's end of its control channel, read by a C++ thread whatever training does."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import Any

from baguarun.comm.extension import load_extension
from baguarun.contract import ControlMessage, Topic
from baguarun.errors import CommunicationError

_SLICE_S = 0.2
"""Between two looks for signals of the program, such as Ctrl-C."""


class ControlChannel:
    """Answers PING without the GIL and keeps all else for `next`; the process ends when the agent is gone.

    ABORT also acts at once: all baguanet and NCCL groups of the process end with an error, and none can be
    made, until `arm` is called for the generation that it announced, or a later one.

    Takes over `fd` and closes it in children of the process, which cannot use the channel. A process has one
    at a time. Threads: any.
    """

    def __init__(self, fd: int) -> None:
        self._channel = load_extension().ControlChannel(fd)

    def next(self, timeout_s: float | None = None) -> ControlMessage | None:
        """The oldest message that was not handed out, waited for; None after `timeout_s` (None: no end)."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = _SLICE_S if deadline is None else min(_SLICE_S, deadline - time.monotonic())
            found = self._open().next(timedelta(seconds=max(left, 0)))
            if found is not None:
                return _decode(found)
            if deadline is not None and time.monotonic() >= deadline:
                return None

    @property
    def pending(self) -> ControlMessage | None:
        """The newest SWITCH, LEAVE or ABORT that `next` has not handed out. Cheap where there is none."""
        found = self._open().pending()
        return None if found is None else _decode(found)

    def send(self, message: ControlMessage) -> None:
        """Raises `CommunicationError` if the agent is gone."""
        self._open().send(message.encode())

    @property
    def is_leased(self) -> bool:
        """Whether the job cannot be going on elsewhere without this node; True if the agent never told."""
        found: bool = self._open().is_leased()
        return found

    @property
    def expects_newcomers(self) -> bool:
        """Whether workers are likely to come soon that will have to be taken in, as the agent said last."""
        found: bool = self._open().expects_newcomers()
        return found

    def note(self, generation: int, steps: int) -> None:
        """So many steps are committed in that World: told with every PONG from now on. Wakes nobody."""
        self._open().note(generation, steps)

    def arm(self, generation: int) -> None:
        """The groups to come are of `generation`: an ABORT that announced it, or an older one, is past."""
        load_extension().enter_generation(generation)

    @property
    def interruption(self) -> str | None:
        """The reason of an ABORT for a generation that was not armed yet; None if there is none."""
        found: str | None = load_extension().interruption()
        return found

    def close(self) -> None:
        """Stop to listen; the agent sees the end of the channel."""
        self._channel = None

    def _open(self) -> Any:
        if self._channel is None:
            raise CommunicationError("the control channel was closed")
        return self._channel


def _decode(found: tuple[int, bytes]) -> ControlMessage:
    topic, body = found
    return ControlMessage(Topic(topic), json.loads(body))
