"""Lets jobs take turns on one machine: who holds the baton measures, and the others wait.

What is compared by jobs that run one after the other is compared between two hours of the machine.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


class Baton:
    """One job's place in a ring of named pipes. Threads and processes: one of each job."""

    def __init__(self, own: Path, following: Path) -> None:
        # Open for both, a pipe neither waits for who is at its other end nor ends without him.
        self._own = os.open(own, os.O_RDWR | os.O_CLOEXEC)
        self._following = os.open(following, os.O_RDWR | os.O_CLOEXEC)

    def take(self) -> None:
        """Wait until it is this job's turn."""
        os.read(self._own, 1)

    def hand_on(self) -> None:
        """It is the next job's turn: that of the same job if there are no others."""
        os.write(self._following, b".")

    def close(self) -> None:
        os.close(self._own)
        os.close(self._following)


@contextlib.contextmanager
def ring(jobs: int) -> Iterator[list[tuple[Path, Path]]]:
    """What the batons of `jobs` jobs are made of; the first may begin."""
    with tempfile.TemporaryDirectory() as folder:
        pipes = [Path(folder) / str(number) for number in range(jobs)]
        for pipe in pipes:
            os.mkfifo(pipe)
        places = list(zip(pipes, [*pipes[1:], pipes[0]], strict=True))
        # Before it is handed on for the first time, only this process has it open.
        last = Baton(*places[-1])
        try:
            last.hand_on()
            yield places
        finally:
            last.close()
