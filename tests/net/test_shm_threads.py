"""Ranks as threads: under the sanitizers, and in turns that processes take only now and then."""

from __future__ import annotations

import subprocess

import pytest

from tests.net.shm_peer import ROOT, SOURCES, build

ADDRESS = ("-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
THREAD = ("-O1", "-g1", "-fsanitize=thread")


@pytest.mark.slow
@pytest.mark.parametrize("flags", [ADDRESS, THREAD], ids=["address", "thread"])
def test_the_sanitizers_find_nothing(flags: tuple[str, ...]) -> None:
    program = build("shm_threads", flags, [ROOT / "tests" / "net" / "shm_threads.cc", *SOURCES])
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("scenario", ["slow", "refused", "mark"])
def test_the_scenario_holds(scenario: str) -> None:
    program = build("shm_scenarios", ("-O2",), [ROOT / "tests" / "net" / "shm_scenarios.cc", *SOURCES])
    done = subprocess.run([str(program), scenario], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
