"""How long a worker waits where nobody says that anything is wrong, derived from the detection time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from baguarun.comm.extension import load_extension

_LEAST_NEWS_S = 0.3
"""The news that a worker died takes less, after communication broke; the leader waits for that of hosts."""
_NEWS_PART = 0.1
_LEAST_MEETING_S = 3.0
"""A busy machine may take as long to make the groups of a World."""
_MEETING_PART = 2.0
_MOST_DOUBLINGS = 6
_STALL_PART = 2.0
"""Meetings that took so many times their bound have no bound of their own, as NCCL's."""


class Patience:
    """Bounds the waits of one worker. Without a detection time only the groups' timeout does.

    Membership hears of ranks that are gone. Two that live and do not reach each other are heard of from no
    one: who waits for the other complains after a while. It doubles each time that it was not enough, for
    machines that need longer. Threads: the one that trains.
    """

    def __init__(self, detect_timeout_s: float | None) -> None:
        self._detect_timeout_s = detect_timeout_s
        self._failures = 0

    @property
    def news_s(self) -> float:
        """For news of the membership, when communication broke."""
        return max(_LEAST_NEWS_S, _NEWS_PART * (self._detect_timeout_s or 0.0))

    @property
    def meeting_s(self) -> float | None:
        """For the ranks of a World to meet, from the moment that all of them are ready."""
        if self._detect_timeout_s is None:
            return None
        doublings = min(self._failures, _MOST_DOUBLINGS)
        return (_LEAST_MEETING_S + _MEETING_PART * self._detect_timeout_s) * float(2**doublings)

    @contextmanager
    def meeting(self, generation: int) -> Iterator[timedelta | None]:
        """While the World of `generation` is formed: the bound of the groups made in it.

        Whatever is under way is aborted after twice that time, as by an ABORT for the World after it.
        """
        bound_s = self.meeting_s
        if bound_s is None:
            yield None
            return
        extension = load_extension()
        bound = timedelta(seconds=bound_s)
        reason = f"the ranks of generation {generation} have not met within {_STALL_PART * bound_s:g} s"
        stall = threading.Timer(
            _STALL_PART * bound_s, extension.interrupt_generation, (generation + 1, reason)
        )
        stall.daemon = True
        extension.bound_meetings(bound)
        stall.start()
        try:
            yield bound
        except Exception:
            self._failures += 1
            raise
        else:
            self._failures = 0
        finally:
            stall.cancel()
            extension.bound_meetings(None)
