"""The workers of one node in one generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baguarun.contract import Failure, World
from baguarun.launcher.keeper import Keeper, LeftBehind
from baguarun.launcher.logs import Logs


@dataclass(frozen=True, kw_only=True)
class WorkerCommand:
    """How to start one worker."""

    local_rank: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    """The whole environment, `WorkerEnv.to_environ()` included."""
    cwd: str | None = None
    cpus: tuple[int, ...] = ()
    """CPUs to bind to (`binding.plan_binding`), empty for no binding."""
    error_file: str = ""
    """The worker's TORCHELASTIC_ERROR_FILE; its folder is made, a stale file removed."""


@dataclass(frozen=True, kw_only=True)
class GroupResult:
    """How a generation ended on this node."""

    failure: Failure | None
    """The first failure here, None if every worker exited with 0."""
    port_in_use: bool = False
    """Rank 0 could not bind the TCPStore's port: try again on another, without charging a restart."""


class WorkerGroup:
    """The running workers of one generation. `stop` must be called in the end, also after a success."""

    @classmethod
    async def start(cls, keeper: Keeper, commands: Sequence[WorkerCommand], *, world: World, node: str,
                    logs: Logs) -> WorkerGroup:
        """Start all of them, or none: raises UsageError if a command cannot be executed."""
        raise NotImplementedError

    @property
    def pids(self) -> tuple[int, ...]:
        """By local rank."""
        raise NotImplementedError

    async def wait(self) -> GroupResult:
        """Every worker exited with 0, or the first failure; may be cancelled and awaited again.

        Raises JobFailedError if the keeper was killed (all workers are dead by then).
        """
        raise NotImplementedError

    async def stop(self, grace_s: float) -> tuple[LeftBehind, ...]:
        """End whatever still runs and write out the rest of the output; call again to shorten the grace."""
        raise NotImplementedError
