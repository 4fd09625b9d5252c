"""The workers of one node in one generation."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baguarun.contract import Failure, World
from baguarun.errors import JobFailedError, SetupError
from baguarun.launcher.failure import Cause, cause_from_output, read_error_file
from baguarun.launcher.keeper import ExitNotice, Keeper, KeeperProcess, LeftBehind, SpawnRequest
from baguarun.launcher.logs import Logs, WorkerLog

_TEARDOWN_S = 2.0
"""How long a worker that recorded an earlier exception may take to exit, to be named as the first."""

_FILE_TIME_LAG_S = 0.01
"""File times come from a clock that is up to a scheduler tick (10 ms) behind."""

_CRASHES = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
"""Ends that no lost peer causes: of two workers that ended at once, the one with such an end was first."""

_IN_USE = re.compile("EADDRINUSE|address already in use", re.IGNORECASE)


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


@dataclass(frozen=True)
class _Worker:
    command: WorkerCommand
    log: WorkerLog
    process: KeeperProcess

    def notice(self) -> ExitNotice | None:
        return self.process.exited.result() if self.process.exited.done() else None

    def failed(self) -> bool:
        notice = self.notice()
        return notice is not None and (notice.signal is not None or notice.exit_code != 0)

    def failed_at_s(self) -> float:
        """When it recorded an exception or ended, whichever was first; infinity if neither."""
        recorded = read_error_file(self.command.error_file)
        notice = self.notice()
        recorded_s = recorded[1] + _FILE_TIME_LAG_S if recorded else math.inf
        return min(recorded_s, notice.timestamp_s if notice else math.inf)


class WorkerGroup:
    """The running workers of one generation. `stop` must be called in the end, also after a success."""

    def __init__(
        self, keeper: Keeper, workers: Sequence[_Worker], world: World, node: str, logs: Logs
    ) -> None:
        """Use `start`."""
        self._keeper = keeper
        self._workers = tuple(workers)
        self._world = world
        self._node = node
        self._logs = logs

    @classmethod
    async def start(
        cls, keeper: Keeper, commands: Sequence[WorkerCommand], *, world: World, node: str, logs: Logs
    ) -> WorkerGroup:
        """Start all of them, or none: raises UsageError if a command cannot be executed."""
        opened: list[WorkerLog] = []
        try:
            for command in commands:
                clear_error_file(command.error_file)
                rank = world.first_rank + command.local_rank
                opened.append(
                    logs.open_worker(generation=world.generation, rank=rank, local_rank=command.local_rank)
                )
            started = await asyncio.gather(
                *(
                    keeper.spawn(spawn_request(command, log))
                    for command, log in zip(commands, opened, strict=True)
                ),
                return_exceptions=True,
            )
        finally:
            for log in opened:
                log.close_write_ends()
        workers = []
        for command, log, process in zip(commands, opened, started, strict=True):
            if isinstance(process, BaseException):
                with contextlib.suppress(JobFailedError):
                    await keeper.stop_all(0)
                await logs.finish(opened)
                raise process
            workers.append(_Worker(command, log, process))
        return cls(keeper, workers, world, node, logs)

    @property
    def pids(self) -> tuple[int, ...]:
        """By local rank."""
        return tuple(worker.process.pid for worker in self._workers)

    async def signal(self, signum: int) -> None:
        """Send a signal to every worker's process group."""
        for worker in self._workers:
            await self._keeper.signal(worker.process, signum)

    async def wait(self) -> GroupResult:
        """Every worker exited with 0, or the first failure; may be cancelled and awaited again.

        Raises JobFailedError if the keeper was killed (all workers are dead by then).
        """
        pending = {worker.process.exited for worker in self._workers}
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for exited in done:
                exited.result()
            if any(worker.failed() for worker in self._workers):
                return await self._first_failure()
        return GroupResult(failure=None)

    async def stop(self, grace_s: float) -> tuple[LeftBehind, ...]:
        """End whatever still runs and write out the rest of the output; call again to shorten the grace."""
        left: tuple[LeftBehind, ...] = ()
        # Without a keeper everything is dead already; `wait` and the next `start` say why.
        with contextlib.suppress(JobFailedError):
            left = await self._keeper.stop_all(grace_s)
        await self._logs.finish([worker.log for worker in self._workers])
        return left

    async def _first_failure(self) -> GroupResult:
        await self._await_earlier_failures()
        first = min((worker for worker in self._workers if worker.failed()), key=_order_of_failure)
        await self._logs.catch_up([first.log, self._workers[0].log])
        notice = first.notice()
        assert notice is not None
        recorded = read_error_file(first.command.error_file)
        cause = recorded[0] if recorded else cause_from_output(*first.log.tail())
        return GroupResult(
            failure=self._describe(first, notice, cause, first.failed_at_s()), port_in_use=self._port_in_use()
        )

    async def _await_earlier_failures(self) -> None:
        """A worker may record its exception and die slowly, while its peers fail of it at once."""
        first_s = min(worker.failed_at_s() for worker in self._workers if worker.failed())
        suspects = set()
        for worker in self._workers:
            if worker.notice() is None and worker.failed_at_s() < first_s:
                suspects.add(worker.process.exited)
        if suspects:
            await asyncio.wait(suspects, timeout=_TEARDOWN_S)

    def _describe(self, worker: _Worker, notice: ExitNotice, cause: Cause, failed_at_s: float) -> Failure:
        local_rank = worker.command.local_rank
        return Failure(
            generation=self._world.generation,
            node=self._node,
            rank=self._world.first_rank + local_rank,
            local_rank=local_rank,
            pid=worker.process.pid,
            exit_code=notice.exit_code,
            signal=notice.signal,
            timestamp_s=failed_at_s,
            message=cause.message,
            traceback=cause.traceback,
            log_path=worker.log.path,
        )

    def _port_in_use(self) -> bool:
        """Whether rank 0's own words say that it could not bind the World's port."""
        if self._world.first_rank != 0:
            return False
        return says_port_in_use(self._workers[0].log, self._world.master_port)


def says_port_in_use(log: WorkerLog, port: int) -> bool:
    """Whether a worker's last words are that it could not bind that port."""
    number = re.compile(rf"\b{port}\b")
    lines = "\n".join(log.tail()).splitlines()
    return any(_IN_USE.search(line) and number.search(line) for line in lines)


def _order_of_failure(worker: _Worker) -> tuple[float, bool]:
    notice = worker.notice()
    return worker.failed_at_s(), notice is None or notice.signal not in _CRASHES


def spawn_request(command: WorkerCommand, log: WorkerLog, control_fd: int | None = None) -> SpawnRequest:
    stdout_fd, stderr_fd = log.write_fds
    return SpawnRequest(
        argv=command.argv,
        env=command.env,
        stdout_fd=stdout_fd,
        stderr_fd=stderr_fd,
        control_fd=control_fd,
        cwd=command.cwd,
        cpus=command.cpus,
    )


def clear_error_file(path: str) -> None:
    if not path:
        return
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    except OSError as error:
        raise SetupError(f"no room for the workers' error files: {path}: {error.strerror}") from error
