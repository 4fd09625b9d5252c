"""What each worker of this node is started with: its words, its environment, its CPUs, its error file."""

from __future__ import annotations

import os

from baguarun.contract import WorkerEnv, World
from baguarun.elastic.membership.records import Process
from baguarun.elastic.membership.scratch import ScratchFolder
from baguarun.launcher.bagua_net import worker_environ
from baguarun.launcher.binding import BindingPlan
from baguarun.launcher.command import worker_argv
from baguarun.launcher.keeper_process import CONTROL_FD
from baguarun.launcher.settings import RunSettings
from baguarun.launcher.timeline import TimelineMerge
from baguarun.launcher.workers import WorkerCommand

_AGENT_ONLY = ("BAGUARUN_STORE_PASSWORD", "BAGUARUN_STORE")
"""Variables that a worker has no use for and should not be able to print."""
_OF_A_WORLD = ("MASTER_ADDR", "MASTER_PORT")
"""Inherited, they would send a newcomer to somebody else's store."""


class WorkerCommands:
    """Threads: the agent's event loop."""

    def __init__(self, settings: RunSettings, binding: BindingPlan) -> None:
        self._settings = settings
        self._binding = binding
        self._errors = ScratchFolder("baguarun-errors-")
        self._timeline = TimelineMerge(settings)

    def for_world(self, world: World, local_rank: int, *, control: bool = False) -> WorkerCommand:
        """For a worker that is started for `world`; with `control` it gets a control channel."""
        settings = self._settings
        rank = world.rank_of(local_rank)
        error_file = os.path.join(self._errors.path, f"generation-{world.generation}", f"rank-{rank}.json")
        env = WorkerEnv.for_worker(
            world,
            local_rank,
            role=settings.role,
            error_file=error_file,
            algorithm=settings.algorithm,
            timeline=self._timeline.path,
            control_fd=CONTROL_FD if control else None,
            detect_timeout_s=settings.detect_timeout_s if control else None,
            extra={**self._binding.workers[local_rank].env, **worker_environ(settings, world.net_secret)},
        )
        return self._command(env, error_file)

    def for_newcomer(self, process: Process, net_secret: str) -> WorkerCommand:
        """For a worker that waits to be taken into a World."""
        settings, local_rank = self._settings, process.local_rank
        error_file = os.path.join(self._errors.path, f"newcomer-{process.number}.json")
        timeline = self._timeline.path
        if timeline:
            timeline = f"{timeline}.{settings.node_name}.newcomer{process.number}"
        env = WorkerEnv.for_newcomer(
            settings.job_id,
            local_rank,
            restart_count=0,
            max_restarts=settings.max_restarts,
            role=settings.role,
            error_file=error_file,
            algorithm=settings.algorithm,
            timeline=timeline,
            control_fd=CONTROL_FD,
            detect_timeout_s=settings.detect_timeout_s,
            extra={**self._binding.workers[local_rank].env, **worker_environ(settings, net_secret)},
        )
        return self._command(env, error_file)

    def close(self) -> list[str]:
        """Lines for the user."""
        self._errors.remove()
        return self._timeline.finish()

    def _command(self, env: WorkerEnv, error_file: str) -> WorkerCommand:
        settings = self._settings
        self._timeline.expect(env)
        hidden = (*_AGENT_ONLY, *_OF_A_WORLD)
        inherited = {name: value for name, value in settings.environ.items() if name not in hidden}
        return WorkerCommand(
            local_rank=env.local_rank,
            argv=tuple(worker_argv(settings)),
            env={**inherited, **env.to_environ()},
            cpus=self._binding.workers[env.local_rank].cpus,
            error_file=error_file,
        )
