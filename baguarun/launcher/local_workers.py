"""The workers of this node, whichever World they are of: what each is started with, and how all are ended."""

from __future__ import annotations

import asyncio
import os

from baguarun.contract import WorkerEnv, World
from baguarun.elastic.membership.scratch import ScratchFolder
from baguarun.launcher.bagua_net import worker_environ
from baguarun.launcher.binding import BindingPlan
from baguarun.launcher.command import worker_argv
from baguarun.launcher.keeper import Keeper
from baguarun.launcher.logs import Logs
from baguarun.launcher.settings import RunSettings
from baguarun.launcher.timeline import TimelineMerge
from baguarun.launcher.workers import GroupResult, WorkerCommand, WorkerGroup

_AGENT_ONLY = ("BAGUARUN_STORE_PASSWORD", "BAGUARUN_STORE")
"""Variables that a worker has no use for and should not be able to print."""
_QUIET_S = 2.0
"""A stop that takes longer is explained."""


class LocalWorkers:
    """At most one generation of workers at a time. Threads: the agent's event loop."""

    def __init__(self, settings: RunSettings, binding: BindingPlan, keeper: Keeper, logs: Logs) -> None:
        self._settings = settings
        self._binding = binding
        self._keeper = keeper
        self._logs = logs
        self._group: WorkerGroup | None = None
        self._starting = asyncio.Lock()
        self._errors = ScratchFolder("baguarun-errors-")
        self._timeline = TimelineMerge(settings)

    @property
    def running(self) -> bool:
        return self._group is not None

    async def start(self, world: World) -> None:
        """Start every worker of `world` on this node; raises `UsageError` if that cannot be."""
        commands = [self._command(world, local_rank) for local_rank in range(world.local_world_size)]
        async with self._starting:
            self._group = await WorkerGroup.start(
                self._keeper, commands, world=world, node=self._settings.node_name, logs=self._logs
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
        stopping = asyncio.ensure_future(group.stop(grace_s))
        try:
            done, _ = await asyncio.wait((stopping,), timeout=_QUIET_S)
            if not done and grace_s > _QUIET_S:
                self._logs.say(
                    f"baguarun: some workers go on after SIGTERM; they have {grace_s:g} s to save their work"
                )
            left_behind = await stopping
        finally:
            stopping.cancel()
        for left in left_behind:
            self._logs.say(
                f"baguarun: process {left.pid} ({left.name}, state {left.state}) "
                "cannot be killed and is left behind"
            )
        self._group = None

    def close(self) -> None:
        self._errors.remove()
        for line in self._timeline.finish():
            self._logs.say(f"baguarun: {line}")

    def _command(self, world: World, local_rank: int) -> WorkerCommand:
        settings, bound = self._settings, self._binding.workers[local_rank]
        rank = world.first_rank + local_rank
        error_file = os.path.join(self._errors.path, f"generation-{world.generation}", f"rank-{rank}.json")
        env = WorkerEnv.for_worker(
            world,
            local_rank,
            role=settings.role,
            error_file=error_file,
            algorithm=settings.algorithm,
            timeline=self._timeline.path,
            extra={**bound.env, **worker_environ(settings, world.net_secret)},
        )
        self._timeline.expect(env)
        inherited = {name: value for name, value in settings.environ.items() if name not in _AGENT_ONLY}
        return WorkerCommand(
            local_rank=local_rank,
            argv=tuple(worker_argv(settings)),
            env={**inherited, **env.to_environ()},
            cpus=bound.cpus,
            error_file=error_file,
        )
