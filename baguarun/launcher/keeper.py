"""The agent's handle on the keeper, the small process that parents every worker of a node.

The agent forks the keeper before anything else. The keeper is a child subreaper: whatever a worker starts,
double-forked daemons included, ends up below it, so it can kill all of them, also when the agent is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SpawnRequest:
    """One process to start; `stdout_fd` and `stderr_fd` stay the caller's and may be closed afterwards."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    """The whole environment of the process; its PATH finds `argv[0]`."""
    stdout_fd: int
    stderr_fd: int
    cwd: str | None = None
    """Working directory, None for the agent's."""
    cpus: tuple[int, ...] = ()
    """CPUs to bind to, empty for no binding."""


@dataclass(frozen=True)
class ExitNotice:
    """How a process ended: `exit_code` or `signal`, and when it was reaped (Unix time)."""

    exit_code: int | None
    signal: int | None
    timestamp_s: float


@dataclass(frozen=True)
class LeftBehind:
    """A process that outlived SIGKILL (state D: stuck in the kernel), or that may not be signalled."""

    pid: int
    name: str
    state: str


class KeeperProcess:
    """One started process; `exited` resolves with its `ExitNotice`, or fails with `JobFailedError`."""

    pid: int
    exited: asyncio.Future[ExitNotice]


class Keeper:
    """Starts, signals and stops processes. Threads: one event loop, the one that makes the first call."""

    pid: int

    @classmethod
    def fork(cls) -> Keeper:
        """Fork the keeper; call it first thing in the agent, before threads and grpc exist."""
        raise NotImplementedError

    def spare(self, pid: int) -> None:
        """Name a child of the agent itself (etcd) that must live on when the keeper is lost."""
        raise NotImplementedError

    async def spawn(self, request: SpawnRequest) -> KeeperProcess:
        """Start a process in its own session. Raises UsageError if the file cannot be executed."""
        raise NotImplementedError

    async def signal(self, process: KeeperProcess, signum: int) -> None:
        """Send a signal to the process's group; nothing happens if it has ended."""
        raise NotImplementedError

    async def stop_all(self, grace_s: float) -> tuple[LeftBehind, ...]:
        """SIGTERM, after `grace_s` SIGKILL, for every descendant; returns those that could not be ended."""
        raise NotImplementedError

    async def close(self) -> None:
        """End the keeper and all that is still below it."""
        raise NotImplementedError
