"""Asks the workers of a node whether they live, tells them news, and acts on who is silent or hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from baguarun.contract import ControlMessage, Topic
from baguarun.launcher.crew import Crew
from baguarun.launcher.hang_watch import HangWatch

_PART = 1 / 3
"""Of the detection time, between two questions to workers that have answered the last one."""
_LONGEST_S = 1.0
"""Between two questions, however long the detection time is: answers tell whether a worker hangs, too."""
_SILENT_PART = 1 / 16
"""While one has not: so much later at most is its silence noticed."""
_SLEPT_PART = 1 / 4
"""Of the detection time: an agent that stood for so long longer than it wished blames no worker for it."""
_LATE_S = 60.0
"""A worker that has not entered `baguarun.elastic.run` so long after its start is spoken of."""


class Pings:
    """Threads: the agent's event loop."""

    def __init__(
        self,
        crew: Crew,
        hangs: HangWatch,
        say: Callable[[str], None],
        *,
        detect_timeout_s: float,
        news: Callable[[], dict[str, Any]],
        may_hang: Callable[[], bool],
    ) -> None:
        """A worker that is silent for `detect_timeout_s` is killed. `news`: what a PING tells. `may_hang`:
        whether long steps mean anything now."""
        self._crew = crew
        self._hangs = hangs
        self._say = say
        self._detect_timeout_s = detect_timeout_s
        self._news = news
        self._may_hang = may_hang
        self._said_late = False

    async def run(self) -> None:
        """For ever."""
        loop = asyncio.get_running_loop()
        part = _PART
        while True:
            before_s = loop.time()
            interval_s = min(self._detect_timeout_s * part, _LONGEST_S)
            await asyncio.sleep(interval_s)
            now_s = loop.time()
            has_slept = now_s - before_s - interval_s > self._detect_timeout_s * _SLEPT_PART
            if has_slept:
                self._hangs.slept(now_s - before_s)
            if self._may_hang():
                await self._hangs.look()
            are_heard = await self._ask(now_s, has_slept=has_slept)
            part = _PART if are_heard else _SILENT_PART

    async def _ask(self, now_s: float, *, has_slept: bool) -> bool:
        """Ask everybody; whether all have answered the last time."""
        are_heard = True
        for worker in tuple(self._crew.living.values()):
            if not worker.entered:
                self._mention_late(worker.rank, now_s - worker.started_s, arrived=worker.arrived)
                continue
            if has_slept:
                # It was us who slept.
                worker.heard_s = now_s
            if worker.signs.is_lost(now_s - worker.heard_s):
                self._say(
                    f"baguarun: rank {worker.rank} (pid {worker.process.pid}) has not answered for "
                    f"{now_s - worker.heard_s:.1f} s; killing it"
                )
                await self._crew.kill(worker)
            are_heard &= worker.heard_s >= worker.asked_s
            worker.asked_s = now_s
            worker.channel.send(ControlMessage(Topic.PING, self._news()))
        return are_heard

    def _mention_late(self, rank: int, since_s: float, *, arrived: bool) -> None:
        if self._said_late or arrived or since_s < _LATE_S:
            return
        self._said_late = True
        self._say(
            f"baguarun: rank {rank} has not called baguarun.elastic.run for {_LATE_S:g} s; "
            "until all workers have, nobody can join, and who fails takes the others with it"
        )
