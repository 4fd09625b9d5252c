"""One rank: a process that joins groups, runs collectives until they fail and says how, as it is told."""

from __future__ import annotations

import ctypes
import gc
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

import baguarun.comm.backend  # noqa: F401  (makes baguanet known)
from tests.faults.plan import OPERATION_TIMEOUT_S, Round

JOIN_TIMEOUT = timedelta(seconds=30)
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank lives."""

    rank: int
    size: int
    namespace: Path | None
    """The network of its host; None for the machine's own."""
    store: Path


@dataclass(frozen=True)
class Join:
    """Form the group of round `number`."""

    number: int


@dataclass(frozen=True)
class Run:
    """Run the round's collective until it fails."""

    round: Round


@dataclass(frozen=True)
class Leave:
    """Drop the group."""


Command = Join | Run | Leave


@dataclass(frozen=True)
class Done:
    """A command was obeyed; for `Run`: its first collective is done."""


@dataclass(frozen=True)
class Failed:
    """An error of the backend; both times are readings of the machine's monotonic clock."""

    began_s: float
    """When the call began that failed."""
    at_s: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What a process holds while it has no group."""

    descriptors: int
    threads: int
    mappings: int
    """Of shared memory."""


Answer = Done | Failed | Resources


def main(link: Connection, place: Place) -> None:
    """Obeys commands until the other end of `link` is closed."""
    if place.namespace is not None:
        _enter(place.namespace)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if place.namespace is None else "eth0"
    torch.set_num_threads(1)
    # torch 2.13 has new names for two collectives, which 2.11 does not know.
    warnings.simplefilter("ignore", FutureWarning)
    while True:
        try:
            command: Command = link.recv()
        except EOFError:
            os._exit(0)
        link.send(_obey(command, place, link))


def _obey(command: Command, place: Place, link: Connection) -> Answer:
    if isinstance(command, Join):
        began_s = time.monotonic()
        try:
            _join(command.number, place)
        except dist.DistBackendError as error:
            return Failed(began_s, time.monotonic(), str(error))
        return Done()
    if isinstance(command, Run):
        return _run(command.round, place, link)
    dist.destroy_process_group()
    gc.collect()
    return _resources()


def _join(number: int, place: Place) -> None:
    store = dist.PrefixStore(f"round {number}", dist.FileStore(str(place.store), place.size))
    dist.init_process_group(
        "baguanet", store=store, rank=place.rank, world_size=place.size, timeout=JOIN_TIMEOUT
    )
    total = torch.full((1000,), float(place.rank))
    dist.all_reduce(total)
    assert total.eq(sum(range(place.size))).all(), total
    group = dist.group.WORLD
    assert group is not None
    group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=OPERATION_TIMEOUT_S))


def _run(round_: Round, place: Place, link: Connection) -> Failed:
    again = _collective(round_, place)
    began_s = time.monotonic()
    try:
        again()
        link.send(Done())
        while True:
            began_s = time.monotonic()
            again()
    except dist.DistBackendError as error:
        return Failed(began_s, time.monotonic(), str(error))


def _collective(round_: Round, place: Place) -> Callable[[], None]:
    """Runs the round's collective once and checks what came out."""
    rank, size, count, root = place.rank, place.size, round_.count, round_.root
    mine, whole = torch.empty(count), torch.empty(count * size)
    total = float(sum(range(size)))

    def all_reduce() -> None:
        dist.all_reduce(mine.fill_(rank))
        assert mine[-1] == total

    def several_all_reduces() -> None:
        works = [dist.all_reduce(part.fill_(rank), async_op=True) for part in whole.chunk(size)]
        for work in works:
            assert work is not None and work.wait()
        assert whole[-1] == total

    def reduce() -> None:
        dist.reduce(mine.fill_(rank), dst=root)
        assert rank != root or mine[-1] == total

    def reduce_scatter() -> None:
        dist.reduce_scatter_tensor(mine, whole.fill_(rank))
        assert mine[-1] == total

    def all_gather() -> None:
        dist.all_gather_into_tensor(whole, mine.fill_(rank))
        assert whole[::count].tolist() == list(range(size))

    def broadcast() -> None:
        dist.broadcast(mine.fill_(rank), src=root)
        assert mine[-1] == root

    def all_to_all() -> None:
        received = torch.empty_like(whole)
        dist.all_to_all_single(received, whole.fill_(rank))
        assert received[::count].tolist() == list(range(size))

    def gather() -> None:
        dist.gather(mine.fill_(rank), list(whole.chunk(size)) if rank == root else None, dst=root)
        assert rank != root or whole[::count].tolist() == list(range(size))

    def scatter() -> None:
        dist.scatter(mine.fill_(-1), list(whole.fill_(root).chunk(size)) if rank == root else None, src=root)
        assert mine[-1] == root

    return {
        "all_reduce": all_reduce,
        "async all_reduce": several_all_reduces,
        "reduce": reduce,
        "reduce_scatter": reduce_scatter,
        "all_gather": all_gather,
        "broadcast": broadcast,
        "all_to_all": all_to_all,
        "gather": gather,
        "scatter": scatter,
        "barrier": dist.barrier,
    }[round_.collective]


def _resources() -> Resources:
    maps = Path("/proc/self/maps").read_text().splitlines()
    return Resources(
        descriptors=len(os.listdir("/proc/self/fd")),
        threads=len(os.listdir("/proc/self/task")),
        mappings=sum("memfd:" in line or "/dev/shm" in line for line in maps),
    )


def _enter(namespace: Path) -> None:
    """Moves this process, which has one thread yet, to another network."""
    with namespace.open() as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
