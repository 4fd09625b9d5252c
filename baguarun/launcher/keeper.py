"""The agent's handle on the keeper, the small process that parents every worker of a node.

The agent forks the keeper before anything else. The keeper is a child subreaper: whatever a worker starts,
double-forked daemons included, ends up below it, so it can kill all of them, also when the agent is gone.
If the keeper itself is killed, the workers die with it (parent death signal) and the rest is handed up to
the agent, a subreaper too, which kills it. Only if both are killed at once can a worker's child live on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal as signals
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baguarun.errors import JobFailedError, SetupError, UsageError
from baguarun.launcher import linux
from baguarun.launcher.keeper_process import KILL_BOUND_S, run_keeper
from baguarun.launcher.keeper_wire import Decoder, Message, encode


@dataclass(frozen=True, kw_only=True)
class SpawnRequest:
    """One process to start; `stdout_fd` and `stderr_fd` stay the caller's and may be closed afterwards."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    """The whole environment of the process; its PATH finds `argv[0]`."""
    stdout_fd: int
    stderr_fd: int
    control_fd: int | None = None
    """The worker's end of its control channel, a third descriptor of the caller's; the worker's `CONTROL_FD`.
    With one, what the worker leaves in its process group is killed when it ends: the others live on."""
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

    def __init__(self, pid: int, exited: asyncio.Future[ExitNotice]) -> None:
        self.pid = pid
        self.exited = exited


class Keeper:
    """Starts, signals and stops processes. Threads: one event loop, the one that makes the first call."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        """Use `fork`; takes over `channel`."""
        self.pid = pid
        self._channel = channel
        self._decoder = Decoder()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._send_lock = asyncio.Lock()
        self._next_id = 0
        self._answers: dict[int, asyncio.Future[Message]] = {}
        self._processes: dict[int, KeeperProcess] = {}
        self._spared: set[int] = set()
        self._closing = False
        self._end_of_file = asyncio.Event()
        self._ended: asyncio.Task[None] | None = None

    @classmethod
    def fork(cls) -> Keeper:
        """Fork the keeper; call it first thing in the agent, before threads and grpc exist."""
        _open_standard_fds()
        agent_end, keeper_end = socket.socketpair()
        linux.set_child_subreaper()
        # Held back until the keeper has said which signals it ignores: a ^C may come at any moment.
        mask = signals.pthread_sigmask(signals.SIG_BLOCK, signals.valid_signals())
        pid = os.fork()
        if pid == 0:
            agent_end.close()
            run_keeper(keeper_end)
        signals.pthread_sigmask(signals.SIG_SETMASK, mask)
        keeper_end.close()
        agent_end.setblocking(False)
        return cls(pid, agent_end)

    def spare(self, pid: int) -> None:
        """Name a child of the agent itself (etcd) that must live on when the keeper is lost."""
        self._spared.add(pid)

    async def spawn(self, request: SpawnRequest) -> KeeperProcess:
        """Start a process in its own session. Raises UsageError if the file cannot be executed."""
        message = {
            "op": "spawn",
            "argv": request.argv,
            "env": dict(request.env),
            "cwd": request.cwd,
            "cpus": request.cpus,
            "control": request.control_fd is not None,
        }
        fds = (request.stdout_fd, request.stderr_fd)
        answer = await self._ask(message, fds if request.control_fd is None else (*fds, request.control_fd))
        if answer["op"] == "refused":
            raise _refusal(request, answer["stage"], answer["error"])
        process = answer["process"]
        assert isinstance(process, KeeperProcess)
        return process

    async def signal(self, process: KeeperProcess, signum: int, *, alone: bool = False) -> None:
        """Send a signal to the process's group, or to it alone; nothing happens if it has ended."""
        await self._send({"op": "signal", "pid": process.pid, "signum": signum, "alone": alone})

    async def stop_all(self, grace_s: float) -> tuple[LeftBehind, ...]:
        """SIGTERM, after `grace_s` SIGKILL, for every descendant; returns those that could not be ended.

        SIGTERM goes to the workers alone; what they leave behind gets it when they have gone. A second call
        while one is under way can only shorten the grace.
        """
        answer = await self._ask({"op": "stop", "grace_s": grace_s})
        return tuple(LeftBehind(pid, name, state) for pid, name, state in answer["left"])

    async def close(self) -> None:
        """End the keeper and, at once, all that is still below it."""
        self._attach()
        self._closing = True
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_WR)
        await self._end_of_file.wait()
        assert self._ended is not None
        await self._ended

    def _attach(self) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._channel.fileno(), self._on_readable)

    async def _ask(self, message: Message, fds: tuple[int, ...] = ()) -> Message:
        self._attach()
        request_id = self._next_id
        self._next_id += 1
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._answers[request_id] = answer
        await self._send({**message, "id": request_id}, fds)
        return await answer

    async def _send(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        if self._ended is not None:
            raise self._lost_error()
        self._attach()
        loop = asyncio.get_running_loop()
        data = encode(message)
        async with self._send_lock:
            try:
                sent = await self._send_first_bytes(data, fds)
                await loop.sock_sendall(self._channel, data[sent:])
            except (BrokenPipeError, ConnectionResetError):
                raise self._lost_error() from None

    async def _send_first_bytes(self, data: bytes, fds: tuple[int, ...]) -> int:
        while True:
            try:
                return socket.send_fds(self._channel, [data], fds)
            except BlockingIOError:
                # The keeper is busy: asyncio has no awaitable "writable" for a bare socket.
                await asyncio.sleep(0.005)

    def _on_readable(self) -> None:
        try:
            data = self._channel.recv(65536)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        if not data:
            assert self._loop is not None
            self._loop.remove_reader(self._channel.fileno())
            self._ended = self._loop.create_task(self._clean_up())
            self._end_of_file.set()
            return
        for message in self._decoder.feed(data):
            self._on_message(message)

    def _on_message(self, message: Message) -> None:
        if message["op"] == "exits":
            for pid, exit_code, signum in message["exits"]:
                process = self._processes.pop(pid)
                if not process.exited.done():
                    process.exited.set_result(ExitNotice(exit_code, signum, message["time_s"]))
            return
        if message["op"] == "spawned":
            assert self._loop is not None
            # Known before anything else is read: its exit notice may be the next message.
            process = KeeperProcess(message["pid"], self._loop.create_future())
            self._processes[process.pid] = process
            message["process"] = process
        answer = self._answers.pop(message["id"])
        if not answer.done():
            answer.set_result(message)

    async def _clean_up(self) -> None:
        """The keeper has ended: see to it that nothing of it is left, then fail whoever waits for it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signals.SIGKILL)
        # What was below a dead process is handed up before the process can be reaped: no race here.
        # It does not block: the process has closed its end, and was killed if that was not its last act.
        _, status = os.waitpid(self.pid, 0)  # noqa: ASYNC222
        self._channel.close()
        give_up_at_s = time.monotonic() + KILL_BOUND_S
        # Not our children until a moment ago: there is nothing to subscribe to but looking again.
        while status != 0 and time.monotonic() < give_up_at_s and self._kill_orphans():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for answer in self._answers.values():
            _fail(answer, self._lost_error())
        for process in self._processes.values():
            _fail(process.exited, self._lost_error())
        self._answers.clear()
        self._processes.clear()

    def _kill_orphans(self) -> bool:
        """Kill and reap all below us but our own children; true if there was any."""
        orphans = linux.descendants(os.getpid(), linux.process_table(), self._spared)
        for info in orphans:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(info.pid, signals.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(info.pid, os.WNOHANG)
        return bool(orphans)

    def _lost_error(self) -> JobFailedError:
        if self._closing:
            return JobFailedError("the workers were stopped because the agent is leaving")
        return JobFailedError(
            f"the process keeper (baguarun-keeper, pid {self.pid}) was killed, and all workers of this node "
            "with it; if nobody did that by hand, look for the out-of-memory killer in `dmesg`"
        )


def _open_standard_fds() -> None:
    """Started with stdin, stdout or stderr closed, our sockets and pipes would get their numbers."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _fail(future: asyncio.Future[Any], error: JobFailedError) -> None:
    if not future.done():
        future.set_exception(error)
        # Marks it as seen: nobody need be waiting for it.
        future.exception()


def _refusal(request: SpawnRequest, stage: str, error: str) -> UsageError | SetupError:
    if stage == "cwd":
        return UsageError(f"cannot start the worker in folder {request.cwd!r}: {error}")
    if stage == "cpus":
        return SetupError(f"cannot bind the worker to CPUs {list(request.cpus)}: {error}")
    if stage == "exec":
        advice = {
            "No such file or directory": "no such file, or the interpreter in its first line is missing; "
            "a program is searched for in PATH, a script is not",
            "Permission denied": "not executable: `chmod +x` it, or run it without --no-python",
            "Exec format error": "a script must begin with a line like `#!/bin/sh`",
        }.get(error, "see `man execve`")
        return UsageError(f"cannot execute {request.argv[0]!r}: {error} ({advice})")
    return SetupError(f"cannot start a process for {request.argv[0]!r}: {error} (see `ulimit -a`)")
