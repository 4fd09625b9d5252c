"""Starts a process for every local rank of a node that has none, while the others train."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from baguarun.elastic.membership.records import Process
from baguarun.launcher.crew import Crew, Worker
from baguarun.launcher.respawns import Respawns


class Newcomers:
    """Threads: the agent's event loop."""

    def __init__(
        self,
        crew: Crew,
        count: int,
        *,
        may_start: Callable[[], bool],
        place: Callable[[], tuple[int, str]],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        """`count`: workers and spares that the node is to have. `place`: the generation that newcomers are
        started in, and the job's secret. `spawn` runs a task whose failure ends the agent."""
        self._crew = crew
        self._count = count
        self._may_start = may_start
        self._place = place
        self._spawn = spawn
        self._respawns = Respawns()
        self._started = 0
        self._timer: asyncio.TimerHandle | None = None
        self._round = 0
        """Counts what makes newcomers that are still to be started pointless."""
        self._filling = asyncio.Lock()

    def fill_later(self, pause_s: float = 0.0) -> None:
        """Start a newcomer for every local rank without a worker, unless `stop` comes before; where the last
        ones failed, when their pause is over."""
        self.stop()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(pause_s, lambda: self._spawn(self._fill(self._round)))

    def stop(self) -> None:
        """Start no more of them, until `fill_later` is called again."""
        self._round += 1
        if self._timer is not None:
            self._timer.cancel()

    async def kill(self) -> None:
        """Those that have been in no World: nobody waits for them any more."""
        for worker in tuple(self._crew.living.values()):
            if not worker.generation:
                worker.unwanted = True
                await self._crew.kill(worker)

    def failed(self, worker: Worker) -> bool:
        """`worker` has ended without success. Returns whether the next process in its place has to wait
        longer than the one before had to."""
        now_s = asyncio.get_running_loop().time()
        return self._respawns.failed(
            worker.id.local_rank,
            now_s,
            is_newcomer=not worker.id.generation,
            steps=worker.own_steps,
            trained_s=now_s - worker.joined_s if worker.joined_s is not None else 0.0,
        )

    def describe(self, local_rank: int, why: str) -> str:
        """One line for people, after `failed`."""
        return self._respawns.describe(local_rank, why)

    async def _fill(self, this_round: int) -> None:
        pauses_s: list[float] = []
        async with self._filling:
            for local_rank in range(self._count):
                taken = {process.local_rank for process in self._crew.living}
                if self._round != this_round or not self._may_start():
                    return
                if local_rank in taken:
                    continue
                if pause_s := self._respawns.wait_s(local_rank, asyncio.get_running_loop().time()):
                    pauses_s.append(pause_s)
                    continue
                self._started += 1
                await self._crew.start_newcomer(Process(local_rank, 0, self._started), *self._place())
        if pauses_s and self._round == this_round:
            self.fill_later(min(pauses_s))
