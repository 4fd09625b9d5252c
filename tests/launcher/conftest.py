"""Running the body of a test as an agent would run: in a process of its own that may fork keepers."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from baguarun.launcher.linux import set_parent_death_signal

_MARK = "BAGUARUN_TEST_MARK"


class Processes:
    """Finds all processes that were started with this object's environment, wherever they have gone."""

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        self.env = {**os.environ, _MARK: self._mark}

    def alive(self) -> list[int]:
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                marked = f"{_MARK}={self._mark}".encode() in (folder / "environ").read_bytes()
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if marked and state not in "ZX":
                found.append(int(folder.name))
        return found

    def wait_until(self, count: int) -> list[int]:
        """The processes, once there are `count` of them."""
        deadline = time.monotonic() + 30
        while len(alive := self.alive()) != count:
            if time.monotonic() > deadline:
                raise AssertionError(f"{len(alive)} processes alive, expected {count}: {alive}")
            time.sleep(0.02)
        return alive


@pytest.fixture
def processes() -> Iterator[Processes]:
    found = Processes()
    yield found
    for pid in found.alive():
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def as_agent() -> Callable[[Callable[[], Awaitable[Any]]], Any]:
    """Run an async function in a forked process and return its result; a failed assertion fails the test."""

    def run(scenario: Callable[[], Awaitable[Any]]) -> Any:
        read_fd, write_fd = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                # A test that runs into its time limit leaves nothing behind.
                set_parent_death_signal(signal.SIGKILL)
                # What earlier tests left to the collector stays with them: ending a channel of grpc waits for
                # a thread that was not forked.
                gc.freeze()
                os.close(read_fd)
                try:
                    outcome = (asyncio.run(scenario()), "")  # type: ignore[arg-type]
                except BaseException:
                    outcome = (None, traceback.format_exc())
                with os.fdopen(write_fd, "wb") as file:
                    pickle.dump(outcome, file)
            finally:
                os._exit(0)
        os.close(write_fd)
        with os.fdopen(read_fd, "rb") as file:
            data = file.read()
        os.waitpid(pid, 0)
        assert data, "the agent process was killed"
        result, failure = pickle.loads(data)
        if failure:
            pytest.fail(failure, pytrace=False)
        return result

    return run
