"""Ranks as processes of this host, for benchmarks that compare two transports inside one process."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What all ranks are told."""

    size: int
    rounds: int
    folder: Path
    """Empty, and gone when all ranks are done."""


def values_of_first_rank(
    run: Callable[[Plan, int, Connection], None], size: int, rounds: int
) -> dict[str, list[float]]:
    """What rank 0 sends over its link, of `size` processes of `run(plan, rank, link)`.

    Raises `EOFError` when rank 0 ends without.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan(size=size, rounds=rounds, folder=Path(folder))
        links = [context.Pipe() for _ in range(size)]
        processes = [context.Process(target=run, args=(plan, rank, links[rank][1])) for rank in range(size)]
        for process in processes:
            process.start()
        for _, theirs in links:
            theirs.close()
        try:
            values: dict[str, list[float]] = links[0][0].recv()
            for process in processes:
                process.join()
        finally:
            for process in processes:
                process.kill()
    return values
