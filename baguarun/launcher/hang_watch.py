"""Carries out what `hang_guard` finds about the workers of this node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from baguarun.contract import ControlMessage, Topic
from baguarun.launcher.crew import Crew, Worker
from baguarun.launcher.hang_guard import HangGuard, Verdict, describe
from baguarun.launcher.step_clock import HangLimit


@dataclass(frozen=True, kw_only=True)
class HangSettings:
    limit: HangLimit | None
    """None: nobody looks."""
    removes: bool
    """A worker that hangs is killed, and so replaced; otherwise it is only spoken of."""


class HangWatch:
    """Threads: the agent's event loop."""

    def __init__(self, crew: Crew, node: str, say: Callable[[str], None], settings: HangSettings) -> None:
        self._crew = crew
        self._node = node
        self._say = say
        self._removes = settings.removes
        self._guard = HangGuard(settings.limit, removes=settings.removes) if settings.limit else None

    def hear(self, worker: Worker, message: ControlMessage) -> None:
        """Note what a worker has said."""
        if self._guard is None:
            return
        body, now_s = message.body, asyncio.get_running_loop().time()
        match message.topic:
            case Topic.READY:
                self._guard.pause(worker.id)
            case Topic.PROGRESS if body.get("ends"):
                self._guard.pause(worker.id)
            case Topic.PROGRESS if body.get("begins"):
                self._guard.begin(worker.id, now_s, body["steps"])
            case Topic.PROGRESS:
                self._guard.progressed(worker.id, now_s, body["steps"])
            case Topic.PONG:
                self._guard.answered(worker.id, body.get("waits"))
                if "steps" in body:
                    self._guard.progressed(worker.id, now_s, body["steps"])
            case _:
                pass

    def told_to_stop(self, worker: Worker) -> None:
        """It was told of a World that is lost: that it takes its time to leave counts from now on."""
        if self._guard is not None and worker.port is None:
            self._guard.begin(worker.id, asyncio.get_running_loop().time(), worker.steps)

    def forget(self, worker: Worker) -> None:
        """It has ended."""
        if self._guard is not None:
            self._guard.forget(worker.id)

    def slept(self, seconds: float) -> None:
        """The agent itself stood for so long."""
        if self._guard is not None:
            self._guard.slept(seconds)

    async def look(self) -> None:
        """Do something about those whose steps take too long."""
        if self._guard is None:
            return
        for finding in self._guard.judge(asyncio.get_running_loop().time()):
            worker = self._crew.living.get(finding.worker)
            if worker is None:
                continue
            who = (
                f"rank {worker.rank} on node {self._node} (local rank {worker.id.local_rank}, "
                f"pid {worker.process.pid})"
            )
            log = worker.log.path or "its output"
            self._say("baguarun: " + describe(finding, who, log, removes=self._removes))
            if finding.verdict is Verdict.REMOVE:
                await self._crew.kill(worker)
            else:
                await self._crew.dump_stacks(worker)
