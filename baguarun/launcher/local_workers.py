"""The workers of this node, whichever World they are of: what each is started with, and how all are ended."""

from __future__ import annotations

import os
import shutil
import tempfile

from baguarun.contract import WorkerEnv, World
from baguarun.launcher.binding import BindingPlan
from baguarun.launcher.command import worker_argv
from baguarun.launcher.keeper import Keeper
from baguarun.launcher.logs import Logs
from baguarun.launcher.settings import RunSettings
from baguarun.launcher.workers import GroupResult, WorkerCommand, WorkerGroup

_AGENT_ONLY = ("BAGUARUN_STORE_PASSWORD", "BAGUARUN_STORE")
"""Variables that a worker has no use for and should not be able to print."""


class LocalWorkers:
    """At most one generation of workers at a time. Threads: the agent's event loop."""

    def __init__(self, settings: RunSettings, binding: BindingPlan, keeper: Keeper, logs: Logs) -> None:
        self._settings = settings
        self._binding = binding
        self._keeper = keeper
        self._logs = logs
        self._group: WorkerGroup | None = None
        self._error_dir = tempfile.mkdtemp(prefix="baguarun-errors-")

    @property
    def running(self) -> bool:
        return self._group is not None

    async def start(self, world: World) -> None:
        """Start every worker of `world` on this node; raises `UsageError` if that cannot be."""
        commands = [self._command(world, local_rank) for local_rank in range(world.local_world_size)]
        self._group = await WorkerGroup.start(
            self._keeper, commands, world=world, node=self._settings.node_name, logs=self._logs
        )

    async def wait(self) -> GroupResult:
        """How the running generation ends here; cancel it before `stop`."""
        if self._group is None:
            raise RuntimeError("no workers are running")
        return await self._group.wait()

    async def stop(self, grace_s: float) -> None:
        """End all of them and whatever they started; calling again meanwhile shortens the grace."""
        group = self._group
        if group is None:
            return
        for left in await group.stop(grace_s):
            self._logs.say(
                f"baguarun: process {left.pid} ({left.name}, state {left.state}) "
                "cannot be killed and is left behind"
            )
        self._group = None

    def close(self) -> None:
        shutil.rmtree(self._error_dir, ignore_errors=True)

    def _command(self, world: World, local_rank: int) -> WorkerCommand:
        settings, bound = self._settings, self._binding.workers[local_rank]
        rank = world.first_rank + local_rank
        error_file = os.path.join(self._error_dir, f"generation-{world.generation}", f"rank-{rank}.json")
        env = WorkerEnv.for_worker(
            world,
            local_rank,
            role=settings.role,
            error_file=error_file,
            algorithm=settings.algorithm,
            extra=bound.env,
        )
        inherited = {name: value for name, value in settings.environ.items() if name not in _AGENT_ONLY}
        return WorkerCommand(
            local_rank=local_rank,
            argv=tuple(worker_argv(settings)),
            env={**inherited, **env.to_environ()},
            cpus=bound.cpus,
            error_file=error_file,
        )
