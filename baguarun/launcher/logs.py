"""Where the workers' output goes: console with `[node:rank]` in front, per-rank files, or both.

With a log folder every stream is in a file, byte for byte. `--redirects` takes streams off the console,
`--tee` keeps them there all the same. Files lie in `<log_dir>/<job_id>/generation-<g>/rank-<r>/`, those of
newcomers in `.../local-rank-<l>-on-<node>/`, and are appended to, so that a second run under the same id
destroys nothing.
"""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from baguarun.errors import SetupError, UsageError
from baguarun.launcher.lines import ConsoleLines
from baguarun.launcher.log_pump import Console, LogFile, LogPump, PumpedStream

STDOUT = 1
STDERR = 2
EVERY_OTHER_RANK = -1
DEFAULT_LOG_DIR = "baguarun_logs"

_COLORS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
_UNSAFE_IN_NAME = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """What the flags `--log-dir --redirects --tee --local-ranks-filter` ask for; use `from_flags`."""

    log_dir: str | None = None
    """Folder of the per-rank files, None for console only."""
    redirects: Mapping[int, int] = field(default_factory=dict)
    """Streams (1 stdout, 2 stderr, 3 both) kept off the console, by local rank; key -1: all other ranks."""
    tee: Mapping[int, int] = field(default_factory=dict)
    """Streams shown on the console all the same, by local rank; key -1 is every other rank."""
    local_ranks_filter: frozenset[int] | None = None
    """Local ranks shown on the console, None for all; files are not filtered."""
    prefix: bool = True
    """Put `[node:rank]` in front of each console line."""
    color: bool | None = None
    """Colour the prefix; None: only on a terminal."""

    def __post_init__(self) -> None:
        if self.redirects and self.log_dir is None:
            raise UsageError("--redirects takes output off the console: name a --log-dir for it")

    @classmethod
    def from_flags(
        cls,
        *,
        log_dir: str | None = None,
        redirects: str = "0",
        tee: str = "0",
        local_ranks_filter: str = "",
        prefix: bool = True,
        color: bool | None = None,
    ) -> LogSettings:
        """Parse torchrun's spellings; raises UsageError. `-r`/`-t` without a folder use ./baguarun_logs."""
        redirect_map = _parse_streams("--redirects", redirects)
        tee_map = _parse_streams("--tee", tee)
        if log_dir is None and (redirect_map or tee_map):
            log_dir = DEFAULT_LOG_DIR
        return cls(
            log_dir=log_dir,
            redirects=redirect_map,
            tee=tee_map,
            local_ranks_filter=_parse_ranks(local_ranks_filter),
            prefix=prefix,
            color=color,
        )

    def on_console(self, local_rank: int, stream: int) -> bool:
        """Whether a worker's STDOUT or STDERR is shown."""
        if self.local_ranks_filter is not None and local_rank not in self.local_ranks_filter:
            return False
        redirected = self.redirects.get(local_rank, self.redirects.get(EVERY_OTHER_RANK, 0)) & stream
        teed = self.tee.get(local_rank, self.tee.get(EVERY_OTHER_RANK, 0)) & stream
        return bool(teed) or not redirected


def _parse_streams(flag: str, text: str) -> dict[int, int]:
    """torchrun's `Std`: one of 0, 1, 2, 3 for all local ranks, or a map like `0:3,1:1`; others are 0."""
    chosen: dict[int, int] = {}
    for part in text.split(","):
        rank, colon, streams = part.strip().rpartition(":")
        wanted = streams in ("0", "1", "2", "3") and (rank.isdecimal() if colon else "," not in text)
        if not wanted or (colon and int(rank) in chosen):
            raise UsageError(
                f"{flag} {text}: want 0 (none), 1 (stdout), 2 (stderr) or 3 (both), for all local ranks "
                "or one by one as in 0:3,1:1"
            )
        chosen[int(rank) if colon else EVERY_OTHER_RANK] = int(streams)
    return {rank: streams for rank, streams in chosen.items() if streams}


def _parse_ranks(text: str) -> frozenset[int] | None:
    if not text.strip():
        return None
    try:
        ranks = frozenset(int(part) for part in text.split(","))
    except ValueError:
        ranks = frozenset((-1,))
    if min(ranks) < 0:
        raise UsageError(f"--local-ranks-filter {text}: want local ranks as in 0,1")
    return ranks


class WorkerLog:
    """The two pipes that one worker writes to, and what becomes of them."""

    def __init__(
        self, directory: Path | None, streams: tuple[PumpedStream, PumpedStream], fds: tuple[int, int]
    ) -> None:
        self._directory = directory
        self.streams = streams
        self.write_fds = fds
        """Write ends for the worker's stdout and stderr; `close_write_ends` when it has them."""

    @property
    def path(self) -> str:
        """Folder of the files, empty if there is none."""
        return str(self._directory) if self._directory else ""

    def tail(self) -> tuple[str, str]:
        """The last part of stdout and of stderr as text, undecodable bytes replaced."""
        stdout, stderr = (stream.tail.decode(errors="replace") for stream in self.streams)
        return stdout, stderr

    def close_write_ends(self) -> None:
        """From now on, end of file means that the last process holding the stream has gone."""
        for fd in self.write_fds:
            os.close(fd)
        self.write_fds = (-1, -1)


class Logs:
    """All console and file output of one agent, over all generations. Threads: one of its own writes."""

    def __init__(
        self, settings: LogSettings, *, job_id: str, node: str, stdout_fd: int = 1, stderr_fd: int = 2
    ) -> None:
        """Raises UsageError if the log folder cannot be written."""
        self._settings = settings
        self._node = node
        self._job_dir = _make_job_dir(settings.log_dir, job_id) if settings.log_dir is not None else None
        self._stdout = Console(stdout_fd, "stdout")
        self._stderr = Console(stderr_fd, "stderr")
        self._pump = LogPump(self._stderr)

    def open_worker(
        self, *, generation: int, rank: int, local_rank: int, is_newcomer: bool = False
    ) -> WorkerLog:
        """Make a worker's pipes and files; reading starts at once.

        A newcomer has no rank yet: it is named by its local rank, and by the generation that runs.
        """
        name = f"local rank {local_rank}" if is_newcomer else f"rank {rank}"
        label = f"new {local_rank}" if is_newcomer else str(rank)
        directory = None
        if self._job_dir is not None:
            # Other nodes may write to the same disk, and have newcomers of that local rank, too.
            folder = f"local-rank-{local_rank}-on-{file_name(self._node)}" if is_newcomer else f"rank-{rank}"
            directory = self._job_dir / f"generation-{generation}" / folder
        pipes = _make_pipes()
        streams: list[PumpedStream] = []
        for stream, console, (read_fd, _) in zip(
            (STDOUT, STDERR), (self._stdout, self._stderr), pipes, strict=True
        ):
            kind = "stdout" if stream == STDOUT else "stderr"
            pumped = PumpedStream(
                read_fd=read_fd,
                name=f"{kind} of {name}",
                file=LogFile(directory / f"{kind}.log") if directory else None,
                console=console,
                shown=self._settings.on_console(local_rank, stream),
                lines=ConsoleLines(self._prefix(label, rank, console)),
            )
            streams.append(pumped)
            self._pump.add(pumped)
        return WorkerLog(directory, (streams[0], streams[1]), (pipes[0][1], pipes[1][1]))

    def _prefix(self, label: str, rank: int, console: Console) -> bytes:
        if not self._settings.prefix:
            return b""
        text = f"[{self._node}:{label}]"
        color = console.is_terminal if self._settings.color is None else self._settings.color
        if color:
            text = f"\x1b[{_COLORS[rank % len(_COLORS)]}m{text}\x1b[0m"
        return f"{text} ".encode()

    def say(self, text: str) -> None:
        """Print lines of the agent's own on stderr, never inside a worker's line; does not block."""
        self._pump.say(text)

    async def catch_up(self, logs: Sequence[WorkerLog], limit_s: float = 1.0) -> None:
        """Return when the tails hold all that has been written by now, or `limit_s` has passed."""
        streams = [stream for log in logs for stream in log.streams]
        await asyncio.wait({asyncio.wrap_future(self._pump.catch_up(streams))}, timeout=limit_s)

    async def finish(self, logs: Sequence[WorkerLog], idle_s: float = 2.0, limit_s: float = 20.0) -> None:
        """Return when the workers' streams have been read to their end and written.

        A stream that someone else holds open is given up after `idle_s` without a byte, or after `limit_s`
        in all. One that only waits for a blocked console is not: it is written when the console moves again.
        """
        streams = [stream for log in logs for stream in log.streams]
        give_up_at_s = asyncio.get_running_loop().time() + limit_s
        pending = {asyncio.wrap_future(stream.ended) for stream in streams}
        while pending:
            before = self._pump.bytes_read
            done, pending = await asyncio.wait(pending, timeout=idle_s)
            for stream_ended in done:
                stream_ended.result()
            late = asyncio.get_running_loop().time() >= give_up_at_s
            if not late and self._pump.bytes_read != before:
                continue
            if self._pump.blocked:
                return
            self._pump.give_up([stream for stream in streams if not stream.ended.done()])

    async def close(self) -> None:
        """Return when everything has been written; waits as long as the console blocks."""
        await asyncio.shield(asyncio.wrap_future(self._pump.close()))


def _make_pipes() -> tuple[tuple[int, int], tuple[int, int]]:
    """For stdout and stderr: both, or none that would wait for its end."""
    first = _make_pipe()
    try:
        return first, _make_pipe()
    except SetupError:
        for fd in first:
            os.close(fd)
        raise


def _make_pipe() -> tuple[int, int]:
    try:
        return os.pipe2(os.O_CLOEXEC)
    except OSError as error:
        raise SetupError(f"no pipe for a worker's output: {error.strerror} (see `ulimit -n`)") from error


def _make_job_dir(log_dir: str, job_id: str) -> Path:
    """`<log_dir>/<job_id>` as an absolute path, proven writable."""
    path = Path(log_dir).absolute() / file_name(job_id)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as probe:
            probe.write(b"x")
    except OSError as error:
        raise UsageError(f"--log-dir {log_dir}: cannot write there: {error.strerror} ({path})") from error
    return path


def file_name(text: str) -> str:
    """`text` as the name of one file: what is unsafe is written as %XX, as in a URL."""
    quoted = _UNSAFE_IN_NAME.sub(lambda match: "".join(f"%{byte:02X}" for byte in match[0].encode()), text)
    return quoted.replace(".", "%2E") if quoted in ("", ".", "..") else quoted
