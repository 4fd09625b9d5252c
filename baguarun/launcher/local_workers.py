"""The workers of this node, whichever World they are of: what each is started with, and how all are ended."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol

from baguarun.contract import World
from baguarun.launcher.binding import BindingPlan
from baguarun.launcher.keeper import Keeper, LeftBehind
from baguarun.launcher.logs import Logs
from baguarun.launcher.settings import RunSettings
from baguarun.launcher.worker_commands import WorkerCommands
from baguarun.launcher.workers import GroupResult, WorkerGroup

_QUIET_S = 2.0
"""A stop that takes longer is explained."""


class StoppableWorkers(Protocol):
    """What the end of an agent needs to know of its workers."""

    async def stop(self, grace_s: float) -> None:
        """End all of them and whatever they started; calling again shortens the grace."""

    def close(self) -> None:
        """Remove what they leave behind; nothing is started any more."""


class LocalWorkers:
    """At most one generation of workers at a time. Threads: the agent's event loop."""

    def __init__(self, settings: RunSettings, binding: BindingPlan, keeper: Keeper, logs: Logs) -> None:
        self._node = settings.node_name
        self._commands = WorkerCommands(settings, binding)
        self._keeper = keeper
        self._logs = logs
        self._group: WorkerGroup | None = None
        self._starting = asyncio.Lock()

    @property
    def running(self) -> bool:
        return self._group is not None

    async def start(self, world: World) -> None:
        """Start every worker of `world` on this node; raises `UsageError` if that cannot be."""
        commands = [self._commands.for_world(world, i) for i in range(world.local_world_size)]
        async with self._starting:
            self._group = await WorkerGroup.start(
                self._keeper, commands, world=world, node=self._node, logs=self._logs
            )

    async def wait(self) -> GroupResult:
        """How the running generation ends here; cancel it before `stop`."""
        if self._group is None:
            raise RuntimeError("no workers are running")
        return await self._group.wait()

    async def stop(self, grace_s: float) -> None:
        """End all of them and whatever they started; calling again shortens the grace."""
        async with self._starting:
            group = self._group
        if group is None:
            return
        await stop_and_tell(group.stop(grace_s), grace_s, self._logs)
        self._group = None

    def close(self) -> None:
        for line in self._commands.close():
            self._logs.say(f"baguarun: {line}")


async def stop_and_tell(
    stop: Coroutine[Any, Any, tuple[LeftBehind, ...]], grace_s: float, logs: Logs
) -> None:
    """Await the stop of workers, and explain one that takes long or does not succeed."""
    stopping = asyncio.ensure_future(stop)
    try:
        done, _ = await asyncio.wait((stopping,), timeout=_QUIET_S)
        if not done and grace_s > _QUIET_S:
            logs.say(
                f"baguarun: some workers go on after SIGTERM; they have {grace_s:g} s to save their work"
            )
        left_behind = await stopping
    finally:
        stopping.cancel()
    for left in left_behind:
        logs.say(
            f"baguarun: process {left.pid} ({left.name}, state {left.state}) "
            "cannot be killed and is left behind"
        )
