"""What runs inside the keeper: one thread, one poll loop, no asyncio.

Stopping goes in three steps. Workers get SIGTERM, but not their children: a worker that saves a checkpoint
on SIGTERM still needs its loader processes. A process whose parent has gone becomes the keeper's own child
and gets its SIGTERM then. When the grace is over, everything below the keeper gets SIGKILL until nothing is
left; what cannot be killed is named and left behind.
"""

from __future__ import annotations

import array
import contextlib
import errno
import gc
import json
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NoReturn

from baguarun.launcher import linux
from baguarun.launcher.keeper_wire import Decoder, Message, encode

ORPHAN_GRACE_S = 2.0
"""Once all workers are gone: time for processes that left the worker's group (daemons of its libraries)."""

KILL_BOUND_S = 5.0
"""Time between SIGKILL and giving a process up as stuck in the kernel."""

CONTROL_FD = 100
"""Number of the control channel in a worker: above what the keeper and shells use themselves."""

_WAIT_TICK_S = 0.25
"""How often a stop looks for new orphans; the end of a worker is noticed at once."""

_KILL_TICK_S = 0.02
_NEVER_STARTED = 127


@dataclass
class _Starting:
    """A fork whose exec has not succeeded yet; the pipe closes when it does."""

    request_id: int
    pid: int


@dataclass
class _Stop:
    """A stop under way. `told` are the processes that had their SIGTERM."""

    kill_at_s: float
    request_ids: list[int] = field(default_factory=list)
    told: set[int] = field(default_factory=set)
    workers_gone_at_s: float | None = None


class KeeperLoop:
    """The keeper's state and loop; `run` returns when the agent has gone and everything below is dead."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._decoder = Decoder()
        self._received_fds: deque[int] = deque()
        self._workers: set[int] = set()
        self._groups: set[int] = set()
        self._replaceable: set[int] = set()
        """Workers whose groups end with them; the others' end with the next stop."""
        self._starting: dict[int, _Starting] = {}
        self._stop: _Stop | None = None
        self._left_behind: set[int] = set()
        self._exits: list[tuple[int, int | None, int | None]] = []
        self._agent_gone = False
        self._poller = select.poll()
        self._poller.register(channel.fileno(), select.POLLIN)
        self._wake_fd, wake_write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._poller.register(self._wake_fd, select.POLLIN)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        signal.set_wakeup_fd(wake_write_fd, warn_on_full_buffer=False)

    def run(self) -> None:
        while not self._agent_gone:
            for fd, _ in self._poller.poll(self._timeout_ms()):
                if fd == self._wake_fd:
                    os.read(self._wake_fd, 4096)
                elif fd == self._channel.fileno():
                    self._receive()
                else:
                    self._finish_start(fd)
            self._reap()
            self._advance_stop()
        self._kill_everything()

    def _timeout_ms(self) -> float | None:
        if self._stop is None:
            return None
        grace_left_s = self._stop.kill_at_s - time.monotonic()
        return max(_KILL_TICK_S, min(_WAIT_TICK_S, grace_left_s)) * 1000

    def _receive(self) -> None:
        try:
            data, ancillary, flags, _ = self._channel.recvmsg(
                65536, socket.CMSG_SPACE(16 * array.array("i").itemsize), socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:
            data, ancillary, flags = b"", [], 0
        for level, kind, payload in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array.array("i")
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
                self._received_fds.extend(fds)
        if flags & socket.MSG_CTRUNC:
            raise RuntimeError("baguarun-keeper: out of file descriptors (raise `ulimit -n`)")
        if not data:
            self._agent_gone = True
            return
        for message in self._decoder.feed(data):
            self._handle(message)

    def _handle(self, message: Message) -> None:
        if message["op"] == "spawn":
            count = 3 if message["control"] else 2
            self._start(message, tuple(self._received_fds.popleft() for _ in range(count)))
        elif message["op"] == "signal":
            if message["pid"] in self._workers:
                with contextlib.suppress(ProcessLookupError):
                    send = os.kill if message["alone"] else os.killpg
                    send(message["pid"], message["signum"])
        elif message["op"] == "stop":
            kill_at_s = time.monotonic() + message["grace_s"]
            if self._stop is None:
                self._stop = _Stop(kill_at_s)
            self._stop.kill_at_s = min(self._stop.kill_at_s, kill_at_s)
            self._stop.request_ids.append(message["id"])
        else:
            raise AssertionError(f"unknown message {message['op']!r}")

    def _send(self, message: Message) -> None:
        try:
            self._channel.sendall(encode(message))
        except (BrokenPipeError, ConnectionResetError):
            self._agent_gone = True

    def _start(self, message: Message, worker_fds: tuple[int, ...]) -> None:
        keeper_pid = os.getpid()
        report_read_fd, report_write_fd = os.pipe2(os.O_CLOEXEC)
        try:
            pid = os.fork()
        except OSError as error:
            for fd in (*worker_fds, report_write_fd, report_read_fd):
                os.close(fd)
            reason = os.strerror(error.errno or 0)
            self._send({"op": "refused", "id": message["id"], "stage": "fork", "error": reason})
            return
        if pid == 0:
            _become_worker(message, keeper_pid, worker_fds, report_write_fd)
        for fd in (*worker_fds, report_write_fd):
            os.close(fd)
        self._workers.add(pid)
        if message["control"]:
            self._replaceable.add(pid)
        self._groups.add(pid)
        self._starting[report_read_fd] = _Starting(message["id"], pid)
        self._poller.register(report_read_fd, select.POLLIN)

    def _finish_start(self, report_fd: int) -> None:
        """Tell the agent how a start went; blocks only until the child has exec'ed or ended."""
        starting = self._starting.pop(report_fd)
        self._poller.unregister(report_fd)
        with os.fdopen(report_fd, "rb") as file:
            report = file.read()
        if report:
            self._workers.discard(starting.pid)
            self._send({"op": "refused", "id": starting.request_id, **json.loads(report)})
        else:
            self._send({"op": "spawned", "id": starting.request_id, "pid": starting.pid})

    def _reap(self) -> bool:
        """Collect the dead and tell the agent of its workers; true if a child is left."""
        alive = True
        while True:
            try:
                dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                alive = False
                break
            if dead is None:
                break
            pid = dead.si_pid
            self._kill_group_of(pid)
            _, status = os.waitpid(pid, 0)
            self._left_behind.discard(pid)
            # An exec that failed, or a worker quicker than our poll: its start is answered before its end.
            for fd in [fd for fd, starting in self._starting.items() if starting.pid == pid]:
                self._finish_start(fd)
            if pid in self._workers:
                self._workers.discard(pid)
                signaled = os.WIFSIGNALED(status)
                code = None if signaled else os.WEXITSTATUS(status)
                self._exits.append((pid, code, os.WTERMSIG(status) if signaled else None))
        if self._exits:
            self._send({"op": "exits", "time_s": time.time(), "exits": self._exits})
            self._exits = []
        return alive

    def _kill_group_of(self, pid: int) -> None:
        """Before a dead worker is reaped: until then nobody else can have got the group's number."""
        if pid in self._replaceable:
            self._replaceable.discard(pid)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)

    def _advance_stop(self) -> None:
        stop = self._stop
        if stop is None:
            return
        now_s = time.monotonic()
        below = self._remaining() if self._reap() else ()
        if not below:
            self._finish_stop(())
        elif now_s >= stop.kill_at_s + KILL_BOUND_S:
            self._finish_stop(below)
        elif now_s >= stop.kill_at_s:
            _kill(below, signal.SIGKILL)
        else:
            self._ask_politely(stop, below, now_s)

    def _ask_politely(self, stop: _Stop, below: Iterable[linux.ProcessInfo], now_s: float) -> None:
        own_pid = os.getpid()
        # Before its exec a child still ignores SIGTERM, as the keeper does: it is told at the next tick.
        passed_over = stop.told | {starting.pid for starting in self._starting.values()}
        fresh = [info for info in below if info.ppid == own_pid and info.pid not in passed_over]
        stop.told.update(info.pid for info in fresh)
        _kill(fresh, signal.SIGTERM)
        _kill(fresh, signal.SIGCONT)
        if self._workers:
            return
        if stop.workers_gone_at_s is None:
            stop.workers_gone_at_s = now_s
        elif now_s >= stop.workers_gone_at_s + ORPHAN_GRACE_S:
            _kill([info for info in below if info.group not in self._groups], signal.SIGKILL)

    def _remaining(self) -> tuple[linux.ProcessInfo, ...]:
        """What is there below the keeper, without what was given up before."""
        below = linux.descendants(os.getpid(), linux.process_table())
        return tuple(info for info in below if info.pid not in self._left_behind)

    def _finish_stop(self, left: tuple[linux.ProcessInfo, ...]) -> None:
        assert self._stop is not None
        for request_id in self._stop.request_ids:
            answer = [[info.pid, info.name, info.state] for info in left]
            self._send({"op": "stopped", "id": request_id, "left": answer})
        self._left_behind.update(info.pid for info in left)
        self._stop = None
        self._groups.clear()

    def _kill_everything(self) -> None:
        """The agent has gone: nothing below may live on. Bounded, for processes stuck in the kernel."""
        give_up_at_s = time.monotonic() + KILL_BOUND_S
        waiter = select.poll()
        waiter.register(self._wake_fd, select.POLLIN)
        while self._reap() and time.monotonic() < give_up_at_s:
            _kill(linux.descendants(os.getpid(), linux.process_table()), signal.SIGKILL)
            if waiter.poll(20):
                os.read(self._wake_fd, 4096)


def _kill(processes: Iterable[linux.ProcessInfo], signum: int) -> None:
    for info in processes:
        # A set-uid program may refuse our signal; it is reported as left behind in the end.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(info.pid, signum)


def _become_worker(
    message: Message, keeper_pid: int, worker_fds: tuple[int, ...], report_fd: int
) -> NoReturn:
    """In the forked child: turn into the worker, or report the step that failed and leave."""
    stage = "prepare"
    try:
        os.setsid()
        linux.set_parent_death_signal(signal.SIGKILL)
        if os.getppid() != keeper_pid:
            os._exit(_NEVER_STARTED)
        signal.set_wakeup_fd(-1)
        for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(worker_fds[0], 1)
        os.dup2(worker_fds[1], 2)
        if message["control"]:
            _move_to_control_fd(worker_fds[2], report_fd)
        stage = "cwd"
        if message["cwd"] is not None:
            os.chdir(message["cwd"])
        stage = "cpus"
        if message["cpus"]:
            os.sched_setaffinity(0, message["cpus"])
        stage = "exec"
        os.execvpe(message["argv"][0], message["argv"], message["env"])
    except OSError as error:
        os.write(report_fd, json.dumps({"stage": stage, "error": os.strerror(error.errno or 0)}).encode())
    except ValueError as error:
        os.write(report_fd, json.dumps({"stage": stage, "error": str(error)}).encode())
    finally:
        os._exit(_NEVER_STARTED)


def _move_to_control_fd(fd: int, report_fd: int) -> None:
    if CONTROL_FD in (fd, report_fd):
        # Descriptors that a program opens get the lowest free numbers: the keeper has a handful.
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
    os.dup2(fd, CONTROL_FD)


def run_keeper(channel: socket.socket) -> NoReturn:
    """Become the keeper in a freshly forked process, which has all signals blocked; never returns."""
    # Never free what the agent had open at the fork: its descriptors' numbers are about to be used again.
    gc.disable()
    try:
        os.setsid()
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(signum, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        linux.set_child_subreaper()
        linux.set_process_name("baguarun-keeper")
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.dup2(0, 1)
        _close_all_but({0, 1, 2, channel.fileno()})
        KeeperLoop(channel).run()
    except BaseException:  # noqa: BLE001 - nothing may unwind into the agent's code below this frame
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def _close_all_but(keep: set[int]) -> None:
    """Close what the agent had open, so that no pipe or socket of it lives on in the keeper."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd not in keep:
            with contextlib.suppress(OSError):
                os.close(fd)
