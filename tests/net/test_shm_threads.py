"""Ranks as threads: under the sanitizers, and in turns that processes take only now and then."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.net import native
from tests.net.shm_peer import SOURCES

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [native.ADDRESS_SANITIZER, native.THREAD_SANITIZER], ids=["address", "thread"]
)
def test_the_sanitizers_find_nothing(flags: tuple[str, ...]) -> None:
    program = native.program(HERE / "shm_threads.cc", flags, parts=SOURCES)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("scenario", ["slow", "refused", "mark"])
def test_the_scenario_holds(scenario: str) -> None:
    program = native.program(HERE / "shm_scenarios.cc", parts=SOURCES)
    done = subprocess.run([str(program), scenario], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
