"""Runs a function on several ranks: processes on this machine, joined by baguanet unless asked otherwise.

Processes are forked from a server that has imported torch once, so a World of four starts at once.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch.distributed as dist

DEADLINE_S = 120
"""After this a World that has not finished is killed and the test fails."""

GROUP_TIMEOUT = timedelta(seconds=60)

LEAVING = timedelta(seconds=20)
"""A rank that has died keeps those that wait for it for this long."""

BACKEND = "baguanet"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one rank ended: a value, an exception, or neither for a rank that died."""

    value: Any = None
    error: BaseException | None = None
    traceback: str = ""
    died: bool = False
    exit_code: int | None = None
    """Negative for a signal."""

    def __str__(self) -> str:
        if self.died and self.exit_code is not None and self.exit_code < 0:
            return f"killed by {signal.Signals(-self.exit_code).name}"
        return f"died with exit code {self.exit_code}" if self.died else self.traceback


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: timedelta = GROUP_TIMEOUT,
    backend: str = BACKEND,
) -> list[Any]:
    """What `function(*args)` returns on each rank, in a process group; fails the test if any rank failed."""
    outcomes = run_ranks_to_the_end(
        function, world_size, *args, timeout=timeout, backend=backend, together=True
    )
    # Of all that failed: the one that others failed because of may be any of them.
    failures = [
        f"rank {rank} of {world_size}: {outcome}"
        for rank, outcome in enumerate(outcomes)
        if outcome.error is not None or outcome.died
    ]
    if failures:
        pytest.fail("\n".join(failures), pytrace=False)
    return [outcome.value for outcome in outcomes]


def run_ranks_to_the_end(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: timedelta = GROUP_TIMEOUT,
    backend: str = BACKEND,
    together: bool = False,
) -> list[Outcome]:
    """How each rank ended; ranks may raise or die. `together`: none ends before all are done."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.comm.preload"])
    outcomes = [Outcome(died=True)] * world_size
    with TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_work,
                args=(theirs, (rank, world_size, backend), folder, timeout, together, function, args),
                daemon=True,
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            _collect(pipes, outcomes)
        finally:
            for process in processes:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()
                    process.join()
    return [
        replace(outcome, exit_code=process.exitcode)
        for outcome, process in zip(outcomes, processes, strict=True)
    ]


def leave_together(store: dist.Store, rank: int, world_size: int) -> None:
    """Waits until all ranks have come here: Gloo fails what is on its way to, or from, one that has ended."""
    store.set(f"{rank} is done", "")
    # Of a FileStore: it has waited for too long.
    with contextlib.suppress(RuntimeError):
        store.wait([f"{peer} is done" for peer in range(world_size)], LEAVING)


def _collect(pipes: list[Connection], outcomes: list[Outcome]) -> None:
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    deadline = time.monotonic() + DEADLINE_S
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            pytest.fail(f"ranks {sorted(waiting.values())} are still running after {DEADLINE_S} s")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                outcomes[rank] = pipe.recv()
            except EOFError:
                outcomes[rank] = Outcome(died=True)


def _picklable(error: BaseException) -> BaseException:
    try:
        pickle.dumps(error)
    except Exception:
        return AssertionError(f"{type(error).__name__}: {error}")
    return error


def _work(
    pipe: Connection,
    place: tuple[int, int, str],
    folder: str,
    timeout: timedelta,
    together: bool,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    import baguarun.comm.backend  # noqa: F401  (makes baguanet known)

    # Of one that crashes, where each of its threads was.
    faulthandler.enable()
    rank, world_size, backend = place
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    os.environ.update(LOCAL_WORLD_SIZE=str(world_size), GLOO_SOCKET_IFNAME="lo")
    if backend == "gloo":
        # One that is in a group may leave it while others still connect, and Gloo fails them for it.
        os.environ.update(TORCH_DIST_INIT_BARRIER="1")
    torch.set_num_threads(1)
    torch.manual_seed(1234 + rank)
    store = dist.FileStore(str(Path(folder) / "store"), world_size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        outcome = Outcome(value=function(*args))
    except BaseException as error:
        outcome = Outcome(error=_picklable(error), traceback=traceback.format_exc())
    if together and backend == "gloo":
        leave_together(store, rank, world_size)
    pipe.send(outcome)
    pipe.close()
    # Ranks that failed on purpose leave groups that cannot be torn down in good order.
    os._exit(0)
