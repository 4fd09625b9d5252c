"""Ranks as threads under the sanitizers."""

from __future__ import annotations

import subprocess

import pytest

from tests.net.communicator_peer import SOURCES
from tests.net.shm_peer import ROOT, build
from tests.net.test_shm_threads import ADDRESS, THREAD


@pytest.mark.slow
@pytest.mark.parametrize("flags", [ADDRESS, THREAD], ids=["address", "thread"])
def test_the_sanitizers_find_nothing(flags: tuple[str, ...]) -> None:
    driver = ROOT / "tests" / "net" / "communicator_threads.cc"
    program = build("communicator_threads", flags, [driver, *SOURCES])
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-4000:]
