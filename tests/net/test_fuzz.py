"""All that strangers and broken peers can send, at random and guided by coverage, under sanitizers."""

from __future__ import annotations

import random
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from tests.net import native
from tests.net.wire import frame

SOURCE = Path(__file__).parent / "fuzz_wire.cpp"
LINK, LISTENER = b"\x03", b"\x04"


# libFuzzer ends at a peak of 2 GiB, in which Linux counts the memory of whoever called exec(): pytest, which
# may have more than that. So a shell is in between.
BY_A_SHELL = ("sh", "-c", '"$@"; exit $?', "sh")


def run(*words: str) -> None:
    command = [*BY_A_SHELL, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-4000:]


def fuzz_standalone(runs: int, seed: int) -> None:
    program = native.program(SOURCE, native.ADDRESS_SANITIZER, source_flags=["-DSTANDALONE"])
    run(str(program), str(runs), str(seed))


def test_mutated_messages_do_no_harm() -> None:
    fuzz_standalone(4000, 1)


@pytest.mark.slow
def test_many_more_mutated_messages_do_no_harm() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    fuzz_standalone(100_000, seed)


def greeting(who: int, stream: int) -> bytes:
    """A step of the listener's target: `who` says a good hello for that stream."""
    return struct.pack("<BBHHIB", who, 1, stream, 3, 8192, 0)


def write_corpus(folder: Path) -> None:
    streams = {
        "empty": b"",
        "one": frame(0, 0, 0, 0) + frame(1, 1, 0, 1) + b"x",
        "pieces": frame(0, 0, 0, 0) + frame(1, 1, 0, 1) + b"x" + frame(2, 50, 50, 100) + bytes(50),
        "long": frame(0, 0, 0, 0) + frame(1, 1, 0, 1) + b"x" + frame(2, 9, 0, 9) + bytes(9)
        + frame(3, 4096, 0, 5000) + bytes(4096) + frame(3, 904, 4096, 5000) + bytes(904),
    }  # fmt: skip
    folder.mkdir()
    for name, stream in streams.items():
        (folder / name).write_bytes(LINK + stream)
    (folder / "crowd").write_bytes(
        LISTENER + b"".join(map(greeting, range(3), (0, 1, 2))) + b"\x00\x03\x01\x02"
    )
    (folder / "noise").write_bytes(LISTENER + b"\x00\x00\x08BAGUANET" + b"\x01\x00\x03GET\x00\x02")
    for kind in range(3):
        (folder / f"hello{kind}").write_bytes(
            bytes([kind]) + b"BAGUANET" + struct.pack("<HHHH", 1, 0, 4, 0) + bytes(80)
        )


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("clang++") is None and not native.IN_CI, reason="needs clang++ (libFuzzer)")
def test_the_coverage_guided_fuzzer_finds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "clang++")
    flags = (*native.ADDRESS_SANITIZER, "-fsanitize=fuzzer-no-link")
    program = native.program(SOURCE, flags, link_flags=["-fsanitize=fuzzer"])
    write_corpus(tmp_path / "corpus")
    run(str(program), "-max_total_time=40", "-timeout=20", "-verbosity=0", f"-artifact_prefix={tmp_path}/",
        str(tmp_path / "corpus"))  # fmt: skip
