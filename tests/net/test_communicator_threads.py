"""Ranks as threads under the sanitizers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.net import native
from tests.net.communicator_peer import SOURCES

SOURCE = Path(__file__).parent / "communicator_threads.cc"


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [native.ADDRESS_SANITIZER, native.THREAD_SANITIZER], ids=["address", "thread"]
)
def test_the_sanitizers_find_nothing(flags: tuple[str, ...]) -> None:
    program = native.program(SOURCE, flags, parts=SOURCES)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-4000:]
