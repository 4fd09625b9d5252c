"""The one thread that carries the workers' output from their pipes to files and console.

A blocked console (a terminal held with ^S, a pager) blocks this thread and nothing else of the agent: the
pipes fill up, the workers wait, and not a line is lost.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from baguarun.launcher.lines import ConsoleLines

_READ_BYTES = 256 * 1024
_TAIL_BYTES = 64 * 1024
_TICK_S = 0.25
_CATCH_UP_READS = 32
"""Bound against a process that writes faster than we read; one read empties a pipe of the usual size."""


class Console:
    """One of the agent's own output streams. Threads: written by the pump alone."""

    def __init__(self, fd: int, name: str) -> None:
        self._fd = fd
        self.name = name
        self.is_terminal = os.isatty(fd)
        self.lost: OSError | None = None
        """Why nobody reads it any more."""

    def write(self, data: bytes) -> None:
        """Write all of it, however long that blocks; once the reader has gone, nothing."""
        view = memoryview(data)
        while view and self.lost is None:
            try:
                view = view[os.write(self._fd, view) :]
            except BlockingIOError:
                # Someone made the terminal non-blocking; it is not ours to change back.
                select.select([], [self._fd], [])
            except OSError as error:
                self.lost = error


class LogFile:
    """One per-rank file. A full disk costs the bytes that do not fit, never the run. Threads: the pump's."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.missing_bytes = 0
        """Bytes that could not be written since the last one that could."""
        self.error: OSError | None = None
        self._fd = -1
        self._open()

    def _open(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            self.error = error

    def write(self, data: bytes) -> bool:
        """Whether all of it was written; after a gap the file says how many bytes are missing."""
        rest = memoryview(data)
        if self._fd < 0:
            self._open()
        try:
            while rest and self._fd >= 0:
                if self.missing_bytes:
                    self._write_note(f"{self.missing_bytes} bytes are missing here: {reason(self.error)}")
                    self.missing_bytes = 0
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            self.error = error
        self.missing_bytes += len(rest)
        return not rest

    def _write_note(self, text: str) -> None:
        note = memoryview(f"\n[baguarun] {text}\n".encode())
        while note:
            note = note[os.write(self._fd, note) :]

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@dataclass(eq=False, kw_only=True)
class PumpedStream:
    """One worker's stdout or stderr on its way. Threads: made by the agent, then the pump's."""

    read_fd: int
    name: str
    """What messages call it."""
    file: LogFile | None
    console: Console
    shown: bool
    """Whether its lines go to the console."""
    lines: ConsoleLines
    tail: bytes = b""
    """The last bytes, for a traceback; read by the agent."""
    ended: concurrent.futures.Future[None] = field(default_factory=concurrent.futures.Future)
    """Resolves when the stream has been read to its end and written."""


class LogPump:
    """Moves bytes until `close`. Threads: `add`, `say`, `give_up` and `close` from anywhere."""

    def __init__(self, messages: Console) -> None:
        """`messages` is the console for the agent's own lines."""
        self._messages = messages
        self._streams: dict[int, PumpedStream] = {}
        self._commands: collections.deque[Callable[[], None]] = collections.deque()
        self._poller = select.poll()
        self._wake_fd, self._wake_write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._poller.register(self._wake_fd, select.POLLIN)
        # Until a command has woken the thread, which may have carried it out, and be gone, before that.
        self._waking = threading.Lock()
        self._warned: set[object] = set()
        self._closing = False
        self._closed: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread: threading.Thread | None = None
        self.bytes_read = 0
        """Bytes taken from all pipes so far: shows whether anything still moves."""
        self.blocked = False
        """Whether the thread is inside a console write at the moment."""

    def add(self, stream: PumpedStream) -> None:
        """Start reading a stream; its descriptor is the pump's from now on."""

        # What poll announced may have been read by `catch_up` before its turn comes.
        os.set_blocking(stream.read_fd, False)

        def register() -> None:
            self._streams[stream.read_fd] = stream
            self._poller.register(stream.read_fd, select.POLLIN)

        self._command(register)

    def say(self, text: str) -> None:
        """Write lines of the agent's own."""
        self._command(lambda: self._show(self._messages, text.rstrip("\n").encode() + b"\n"))

    def give_up(self, streams: Sequence[PumpedStream]) -> None:
        """Stop reading streams that a foreign process holds open."""

        def end() -> None:
            for stream in streams:
                if not stream.ended.done():
                    self._give_up(stream)

        self._command(end)

    def catch_up(self, streams: Sequence[PumpedStream]) -> concurrent.futures.Future[None]:
        """Resolves when all that has been written into these streams by now has been read."""
        caught_up: concurrent.futures.Future[None] = concurrent.futures.Future()

        def read() -> None:
            for stream in streams:
                for _ in range(_CATCH_UP_READS):
                    if stream.ended.done() or not self._read(stream):
                        break
            caught_up.set_result(None)

        self._command(read)
        return caught_up

    def close(self) -> concurrent.futures.Future[None]:
        """Resolves when all streams have ended and everything is written."""

        def leave() -> None:
            with self._waking:
                self._closing = True

        self._command(leave)
        return self._closed

    def _command(self, command: Callable[[], None]) -> None:
        with self._waking:
            if self._closing:
                raise RuntimeError("the log pump is closed")
            if self._thread is None:
                # A daemon: an agent that has to leave does not wait for a terminal held with ^S.
                self._thread = threading.Thread(target=self._run, name="baguarun-logs", daemon=True)
                self._thread.start()
            self._commands.append(command)
            with contextlib.suppress(BlockingIOError):
                os.write(self._wake_write_fd, b"x")

    def _run(self) -> None:
        try:
            while not (self._closing and not self._streams and not self._commands):
                self._turn()
        except BaseException as error:
            # Whoever waits for a stream must hear of it.
            self._closing = True
            for ended in (*(stream.ended for stream in self._streams.values()), self._closed):
                ended.set_exception(error)
            raise
        with self._waking:
            os.close(self._wake_fd)
            os.close(self._wake_write_fd)
        self._closed.set_result(None)

    def _turn(self) -> None:
        waiting = any(stream.lines.waiting for stream in self._streams.values())
        ready = {fd for fd, _ in self._poller.poll(_TICK_S * 1000 if waiting else None)}
        if self._wake_fd in ready:
            os.read(self._wake_fd, 4096)
        while self._commands:
            self._commands.popleft()()
        for stream in tuple(self._streams.values()):
            # Before the read: a console that blocks while its lines are shown makes the rest no older.
            now_s = time.monotonic()
            if stream.read_fd in ready:
                self._read(stream)
            # A progress bar may have something to read at every turn.
            if stream.lines.waiting:
                self._show_line(stream, stream.lines.overdue(now_s))

    def _read(self, stream: PumpedStream) -> bool:
        """Carry what is there to where it belongs; false if there was nothing."""
        try:
            data = os.read(stream.read_fd, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._end(stream)
            return True
        self.bytes_read += len(data)
        stream.tail = (stream.tail + data)[-_TAIL_BYTES:]
        written = stream.file is None or stream.file.write(data)
        if not written:
            self._warn_about_file(stream)
        # What its file cannot take is shown, also if the user wanted it in the file only.
        if stream.shown or not written:
            self._show_line(stream, stream.lines.feed(data, time.monotonic()))
        return True

    def _end(self, stream: PumpedStream) -> None:
        self._show_line(stream, stream.lines.finish())
        self._poller.unregister(stream.read_fd)
        del self._streams[stream.read_fd]
        os.close(stream.read_fd)
        if stream.file is not None:
            if stream.file.missing_bytes:
                missing = f"{stream.file.missing_bytes} bytes are missing at the end of {stream.file.path}"
                self._own_line(f"{missing}: {reason(stream.file.error)}")
            stream.file.close()
        stream.ended.set_result(None)

    def _give_up(self, stream: PumpedStream) -> None:
        self._own_line(
            f"the {stream.name} is still held open by another process; what that writes from now on is lost"
        )
        self._end(stream)

    def _show_line(self, stream: PumpedStream, data: bytes) -> None:
        if data:
            self._show(stream.console, data)

    def _show(self, console: Console, data: bytes) -> None:
        self.blocked = True
        console.write(data)
        self.blocked = False
        if console.lost is not None and console not in self._warned:
            self._warned.add(console)
            self._own_line(
                f"nobody reads {console.name} any more ({reason(console.lost)}): no more lines there"
            )

    def _warn_about_file(self, stream: PumpedStream) -> None:
        assert stream.file is not None
        cause = stream.file.error.errno if stream.file.error else None
        if cause not in self._warned:
            self._warned.add(cause)
            self._own_line(
                f"cannot write {stream.file.path}: {reason(stream.file.error)}; training goes on, "
                "and what the log files cannot take is shown here"
            )

    def _own_line(self, text: str) -> None:
        self._show(self._messages, f"[baguarun] {text}\n".encode())


def reason(error: OSError | None) -> str:
    """The system's words for an error."""
    return (error.strerror or str(error)) if error else "unknown reason"
