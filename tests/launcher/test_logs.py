from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import pty
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from baguarun.errors import SetupError, UsageError
from baguarun.launcher.log_pump import Console, LogPump
from baguarun.launcher.logs import STDERR, STDOUT, Logs, LogSettings, WorkerLog, file_name


class Reader:
    """Reads a console pipe in the background, from `go` on."""

    def __init__(self, go: bool = True) -> None:
        self._read_fd, self.write_fd = os.pipe()
        self._data = bytearray()
        self._go = threading.Event()
        if go:
            self._go.set()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        self._go.wait()
        while chunk := os.read(self._read_fd, 65536):
            self._data += chunk
        os.close(self._read_fd)

    def go(self) -> None:
        self._go.set()

    @property
    def so_far(self) -> bytes:
        return bytes(self._data)

    def all(self) -> bytes:
        """Everything until the write end is closed, which this does."""
        os.close(self.write_fd)
        self._thread.join()
        return bytes(self._data)


@contextlib.contextmanager
def consoles(go: bool = True) -> Iterator[tuple[Reader, Reader]]:
    out, err = Reader(go), Reader(go)
    try:
        yield out, err
    finally:
        out.go()
        err.go()
        for reader in (out, err):
            with contextlib.suppress(OSError):
                reader.all()


def show(
    settings: LogSettings, texts: dict[int, tuple[bytes, bytes]], generation: int = 1
) -> tuple[bytes, bytes]:
    """What the console has when each local rank wrote its (stdout, stderr); ranks are local ranks + 4."""
    with consoles() as (out, err):

        async def run() -> None:
            logs = make_logs(settings, out, err)
            opened = []
            for local_rank, streams in texts.items():
                log = logs.open_worker(generation=generation, rank=local_rank + 4, local_rank=local_rank)
                for fd, text in zip(log.write_fds, streams, strict=True):
                    os.write(fd, text)
                log.close_write_ends()
                opened.append(log)
            await logs.finish(opened)
            await logs.close()

        asyncio.run(run())
        return out.all(), err.all()


def make_logs(settings: LogSettings, out: Reader, err: Reader) -> Logs:
    return Logs(settings, job_id="job", node="n", stdout_fd=out.write_fd, stderr_fd=err.write_fd)


def write_from_thread(log: WorkerLog, stream: int, chunks: list[bytes]) -> threading.Thread:
    fd = os.dup(log.write_fds[stream])

    def write() -> None:
        with os.fdopen(fd, "wb", buffering=0) as file:
            for chunk in chunks:
                file.write(chunk)

    thread = threading.Thread(target=write)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        ({}, "out0 err0 out1 err1"),
        ({"redirects": "3"}, ""),
        ({"redirects": "1"}, "err0 err1"),
        ({"redirects": "2"}, "out0 out1"),
        ({"redirects": "0:3,1:1"}, "err1"),
        ({"redirects": "1:3"}, "out0 err0"),
        ({"redirects": "3", "tee": "2"}, "err0 err1"),
        ({"redirects": "3", "tee": "1:1"}, "out1"),
        ({"tee": "3"}, "out0 err0 out1 err1"),
        ({"local_ranks_filter": "1"}, "out1 err1"),
        ({"local_ranks_filter": "0, 1", "redirects": "2"}, "out0 out1"),
    ],
)
def test_flags_say_what_the_console_shows(flags, shown):
    settings = LogSettings.from_flags(**flags)
    streams = [
        f"{name}{local_rank}"
        for local_rank in (0, 1)
        for name, stream in (("out", STDOUT), ("err", STDERR))
        if settings.on_console(local_rank, stream)
    ]
    assert " ".join(streams) == shown
    assert settings.log_dir == ("baguarun_logs" if {"redirects", "tee"} & flags.keys() else None)


@pytest.mark.parametrize(
    "text", ["4", "", "x", "0:4", "0:3,0:1", "0:3,1", "-1:3", "1:1:1", "0:", ":3", "²:1"]
)
def test_streams_that_make_no_sense_are_refused_by_name(text):
    with pytest.raises(UsageError, match=r"--tee .*want 0"):
        LogSettings.from_flags(tee=text)


@pytest.mark.parametrize("text", ["x", "-1", "0;1", "0,,1"])
def test_a_filter_that_makes_no_sense_is_refused_by_name(text):
    with pytest.raises(UsageError, match="--local-ranks-filter"):
        LogSettings.from_flags(local_ranks_filter=text)


def test_lines_carry_node_and_rank_and_keep_to_their_stream():
    out, err = show(LogSettings.from_flags(), {0: (b"a\nb\n", b"oh\n"), 1: (b"c", b"")})
    assert sorted(out.splitlines()) == [b"[n:4] a", b"[n:4] b", b"[n:5] c"]
    assert err == b"[n:4] oh\n"


def test_the_prefix_can_be_switched_off_and_coloured():
    assert show(LogSettings.from_flags(prefix=False), {0: (b"a\n", b"")}) == (b"a\n", b"")
    assert show(LogSettings.from_flags(color=True), {0: (b"a\n", b"")})[0].startswith(b"\x1b[")


def test_colour_is_for_terminals():
    ours, theirs = pty.openpty()

    async def run() -> None:
        logs = Logs(LogSettings.from_flags(), job_id="job", node="n", stdout_fd=theirs, stderr_fd=theirs)
        log = logs.open_worker(generation=1, rank=0, local_rank=0)
        os.write(log.write_fds[0], b"hello\n")
        log.close_write_ends()
        await logs.finish([log])
        await logs.close()

    asyncio.run(run())
    assert os.read(ours, 1000) == b"\x1b[36m[n:0]\x1b[0m hello\r\n"
    os.close(ours)
    os.close(theirs)


def test_files_hold_every_byte_also_of_what_the_console_does_not_show(tmp_path):
    raw = b"\r 10%\r100%\n\xff\x00 no newline at the end"
    settings = LogSettings.from_flags(log_dir=str(tmp_path), redirects="3", local_ranks_filter="0")
    assert show(settings, {0: (raw, b"e\n"), 1: (b"one\n", b"")}, generation=7) == (b"", b"")
    folder = tmp_path / "job" / "generation-7"
    assert (folder / "rank-4" / "stdout.log").read_bytes() == raw
    assert (folder / "rank-4" / "stderr.log").read_bytes() == b"e\n"
    assert (folder / "rank-5" / "stdout.log").read_bytes() == b"one\n"


def test_a_second_run_under_the_same_id_adds_to_the_files(tmp_path):
    settings = LogSettings.from_flags(log_dir=str(tmp_path))
    for text in (b"first\n", b"second\n"):
        show(settings, {0: (text, b"")})
    assert (tmp_path / "job/generation-1/rank-4/stdout.log").read_bytes() == b"first\nsecond\n"


def test_newcomers_of_nodes_that_share_a_disk_have_files_of_their_own(tmp_path):
    settings = LogSettings.from_flags(log_dir=str(tmp_path), redirects="3")

    async def run(node: str) -> None:
        logs = Logs(settings, job_id="job", node=node)
        log = logs.open_worker(generation=2, rank=0, local_rank=1, is_newcomer=True)
        os.write(log.write_fds[0], node.encode())
        log.close_write_ends()
        await logs.finish([log])
        await logs.close()

    for node in ("a", "b/c"):
        asyncio.run(run(node))
    files = {path.parent.name: path.read_text() for path in tmp_path.glob("job/generation-2/*/stdout.log")}
    assert files == {"local-rank-1-on-a": "a", "local-rank-1-on-b%2Fc": "b/c"}


@pytest.mark.parametrize(
    ("text", "name"),
    [("a-b_c.1", "a-b_c.1"), ("../up", "..%2Fup"), ("..", "%2E%2E"), ("", ""), ("a b\nü", "a%20b%0A%C3%BC")],
)
def test_a_job_id_is_always_one_file_name(text, name):
    assert file_name(text) == name


def test_a_log_folder_that_cannot_be_written_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"--log-dir .*file: cannot write there: Not a directory"):
        Logs(LogSettings.from_flags(log_dir=str(tmp_path / "file")), job_id="job", node="n")


def test_a_hundred_thousand_lines_of_four_workers_arrive_complete_and_unmixed(tmp_path):
    per_worker = 25_000
    settings = LogSettings.from_flags(log_dir=str(tmp_path))
    with consoles() as (out, err):

        async def run() -> None:
            logs = make_logs(settings, out, err)
            opened = [logs.open_worker(generation=1, rank=r, local_rank=r) for r in range(4)]
            for rank, log in enumerate(opened):
                text = b"".join(b"%d line %d %s\n" % (rank, i, b"x" * (i % 90)) for i in range(per_worker))
                # Cut where no line ends.
                write_from_thread(log, 0, [text[at : at + 4093] for at in range(0, len(text), 4093)])
                log.close_write_ends()
            await logs.finish(opened)
            await logs.close()

        asyncio.run(run())
        shown, _ = out.all(), err.all()
    lines = shown.splitlines()
    assert len(lines) == 4 * per_worker
    for rank in range(4):
        mine = [line for line in lines if line.startswith(b"[n:%d] %d line " % (rank, rank))]
        assert [int(line.split()[3]) for line in mine] == list(range(per_worker))
        kept = (tmp_path / f"job/generation-1/rank-{rank}/stdout.log").read_bytes()
        assert kept == b"".join(line.partition(b" ")[2] + b"\n" for line in mine)


def test_the_pump_may_be_gone_before_who_closes_it_has_woken_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pump = LogPump(Console(os.open(os.devnull, os.O_WRONLY), "stderr"))
    pump.say("so that it runs")
    write = os.write

    def write_late(fd: int, data: bytes) -> int:
        if fd == pump._wake_write_fd:
            # As if another command had woken it, and then it is carried out at once.
            write(fd, data)
            time.sleep(0.2)
        return write(fd, data)

    monkeypatch.setattr(os, "write", write_late)
    pump.close().result(timeout=10)


def test_a_blocked_console_loses_no_line_and_does_not_block_the_agent():
    text = b"".join(b"line %d\n" % i for i in range(50_000))
    with consoles(go=False) as (out, err):

        async def run() -> None:
            logs = make_logs(LogSettings.from_flags(prefix=False), out, err)
            log = logs.open_worker(generation=1, rank=0, local_rank=0)
            write_from_thread(log, 0, [text])
            log.close_write_ends()
            # The console takes nothing: this returns all the same, and the agent's loop goes on.
            await logs.finish([log], idle_s=0.2)
            assert not log.streams[0].ended.done()
            logs.say("the agent can still speak")
            out.go()
            err.go()
            await logs.close()

        asyncio.run(run())
        assert out.all() == text
        assert err.all() == b"the agent can still speak\n"


def test_a_console_whose_reader_has_gone_is_reported_once_and_files_go_on(tmp_path):
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    with consoles() as (_, err):

        async def run() -> None:
            settings = LogSettings.from_flags(log_dir=str(tmp_path))
            logs = Logs(settings, job_id="job", node="n", stdout_fd=write_fd, stderr_fd=err.write_fd)
            log = logs.open_worker(generation=1, rank=0, local_rank=0)
            for _ in range(3):
                os.write(log.write_fds[0], b"hello\n")
                await logs.catch_up([log])
            log.close_write_ends()
            await logs.finish([log])
            await logs.close()

        asyncio.run(run())
        assert err.all() == b"[baguarun] nobody reads stdout any more (Broken pipe): no more lines there\n"
    assert (tmp_path / "job/generation-1/rank-0/stdout.log").read_bytes() == b"hello\n" * 3
    os.close(write_fd)


def test_a_stream_that_a_foreign_process_holds_open_is_given_up_with_a_word():
    with consoles() as (out, err):

        async def run() -> None:
            logs = make_logs(LogSettings.from_flags(), out, err)
            log = logs.open_worker(generation=1, rank=3, local_rank=0)
            held = os.dup(log.write_fds[0])
            os.write(held, b"last words")
            log.close_write_ends()
            await logs.finish([log], idle_s=0.2)
            await logs.close()
            os.close(held)

        asyncio.run(run())
        assert out.all() == b"[n:3] last words\n"
        assert b"stdout of rank 3 is still held open by another process" in err.all()


def test_a_worker_without_its_second_pipe_leaves_no_stream_that_never_ends(monkeypatch: pytest.MonkeyPatch):
    make, made = os.pipe2, []

    def make_one(flags: int) -> tuple[int, int]:
        if made:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        made.append(make(flags))
        return made[0]

    with consoles() as (out, err):

        async def run() -> None:
            logs = make_logs(LogSettings.from_flags(), out, err)
            with monkeypatch.context() as patch:
                patch.setattr(os, "pipe2", make_one)
                with pytest.raises(SetupError, match=r"Too many open files \(see `ulimit -n`\)"):
                    logs.open_worker(generation=1, rank=0, local_rank=0)
            assert not any(os.path.exists(f"/proc/self/fd/{fd}") for fd in made[0])
            logs.say("so that it runs")
            await asyncio.wait_for(logs.close(), 10)

        asyncio.run(run())


def test_what_the_agent_says_stands_on_lines_of_its_own():
    with consoles() as (out, err):

        async def run() -> None:
            logs = make_logs(LogSettings.from_flags(), out, err)
            log = logs.open_worker(generation=1, rank=0, local_rank=0)
            os.write(log.write_fds[1], b"half a ")
            await logs.catch_up([log])
            logs.say("one\ntwo\n")
            os.write(log.write_fds[1], b"line\n")
            log.close_write_ends()
            await logs.finish([log])
            logs.say("three")
            await logs.close()
            with pytest.raises(RuntimeError, match="closed"):
                logs.say("too late")

        asyncio.run(run())
        assert err.all() == b"one\ntwo\n[n:0] half a line\nthree\n"


def test_a_progress_bar_that_never_rests_is_shown_now_and_then():
    with consoles() as (out, err):

        async def run() -> None:
            logs = make_logs(LogSettings.from_flags(), out, err)
            log = logs.open_worker(generation=1, rank=0, local_rank=0)
            give_up_s = time.monotonic() + 30
            while not out.so_far and time.monotonic() < give_up_s:
                os.write(log.write_fds[0], b"\r 50%")
                await asyncio.sleep(0.01)
            assert out.so_far.startswith(b"[n:0]  50%\n")
            log.close_write_ends()
            await logs.finish([log])
            await logs.close()

        asyncio.run(run())


def test_catching_up_never_waits_for_output_that_was_read_already():
    with consoles() as (out, err):

        async def run() -> None:
            logs = make_logs(LogSettings.from_flags(), out, err)
            log = logs.open_worker(generation=1, rank=0, local_rank=0)
            for _ in range(2000):
                os.write(log.write_fds[0], b"x")
                await logs.catch_up([log], limit_s=60)
            log.close_write_ends()
            await logs.finish([log])
            await logs.close()

        asyncio.run(run())
        assert out.all() == b"[n:0] " + b"x" * 2000 + b"\n"


def test_the_tail_is_the_end_of_the_output():
    with consoles() as (out, err):

        async def run() -> tuple[str, str]:
            logs = make_logs(LogSettings.from_flags(), out, err)
            log = logs.open_worker(generation=1, rank=0, local_rank=0)
            write_from_thread(log, 1, [b"x" * 200_000, b"\xffend"]).join()
            await logs.catch_up([log])
            tail = log.tail()
            log.close_write_ends()
            await logs.finish([log])
            await logs.close()
            return tail

        stdout, stderr = asyncio.run(run())
    assert stdout == ""
    assert stderr.endswith("x\ufffdend")
    assert len(stderr) <= 64 * 1024


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "baguarun-c", disk], check=True)
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.root
def test_a_full_disk_costs_one_warning_and_the_output_goes_to_the_console(small_disk):
    filler = small_disk / "filler"
    line = b"y" * 99 + b"\n"
    with consoles() as (out, err):

        async def run() -> None:
            logs = make_logs(LogSettings.from_flags(log_dir=str(small_disk), redirects="1"), out, err)
            log = logs.open_worker(generation=1, rank=0, local_rank=0)
            os.write(log.write_fds[0], b"before\n")
            await logs.catch_up([log])
            with contextlib.suppress(OSError):
                filler.write_bytes(b"x" * 100_000)
            for _ in range(100):
                os.write(log.write_fds[0], line)
                await logs.catch_up([log])
            filler.unlink()
            os.write(log.write_fds[0], b"after\n")
            log.close_write_ends()
            await logs.finish([log])
            await logs.close()

        asyncio.run(run())
        shown, said = out.all(), err.all()
    assert said.count(b"[baguarun]") == 1
    assert b"No space left on device" in said
    # The first page of the file had room left; what did not fit is on the console, though it was redirected.
    assert 0 < shown.count(line[:-1]) <= 100
    kept = (small_disk / "job/generation-1/rank-0/stdout.log").read_bytes()
    assert kept.startswith(b"before\n")
    assert b"bytes are missing here: No space left on device\nafter\n" in kept
    fitted, _, note = kept.partition(b"\n[baguarun] ")
    assert len(fitted) + int(note.split()[0]) == len(b"before\n") + 100 * len(line)
