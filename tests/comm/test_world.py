"""The default group made anew in the same processes: whole, smaller, and in spite of the dead."""

from __future__ import annotations

import os
import signal
import socket
import statistics
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from baguarun.comm.control import ControlChannel
from baguarun.comm.world import enter_world
from baguarun.contract import ControlMessage, Topic
from baguarun.errors import CommunicationError
from tests.comm.ranks import run_ranks, run_ranks_to_the_end
from tests.comm.worlds import listen, num_open_files, threads, wait_for_no_more_than, world_of


def agree_on_port(listener: socket.socket) -> int:
    """What the agents would do."""
    ports: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(ports, listener.getsockname()[1])
    return ports[0]


def left() -> tuple[int, int]:
    return len(threads()), num_open_files()


def wait_for_all(folder: Path, rank: int, size: int) -> None:
    """By other means than the group's."""
    folder.mkdir(exist_ok=True)
    (folder / str(rank)).touch()
    give_up_s = time.monotonic() + 60.0
    while len(list(folder.iterdir())) < size:
        assert time.monotonic() < give_up_s
        time.sleep(0.001)


def fifty_worlds(folder: str) -> tuple[list[float], str]:
    rank, size = dist.get_rank(), dist.get_world_size()
    before: tuple[int, int] | None = None
    took_s = []
    for generation in range(2, 52):
        listener = listen()
        world = world_of(generation, size, agree_on_port(listener))
        dist.new_group([0, 1])
        dist.irecv(torch.zeros(10), (rank + 1) % size)
        dist.barrier()
        # Who leaves ends the barrier of one that is still in it, and awaits that message.
        wait_for_all(Path(folder) / str(generation), rank, size)
        start = time.perf_counter()
        enter_world(world, rank=rank, listener=listener, channel=None)
        took_s.append(time.perf_counter() - start)
        ranks = torch.tensor(float(rank))
        dist.all_reduce(ranks)
        assert ranks == sum(range(size)) and os.environ["BAGUARUN_GENERATION"] == str(generation)
        before = before or left()
        wait_for_no_more_than(before, left)
    return took_s, dist.get_backend()


def test_fifty_worlds_in_one_process_leave_no_thread_and_no_descriptor(tmp_path: Path) -> None:
    outcomes = run_ranks(fifty_worlds, 4, str(tmp_path))
    assert [backend for _, backend in outcomes] == ["baguanet"] * 4
    median_ms = statistics.median(took_s for times, _ in outcomes for took_s in times) * 1e3
    print(f"\nenter_world, 4 ranks on loopback: median {median_ms:.1f} ms")


def survive(folder: str, victim: int, backend: str) -> float:
    rank, size = dist.get_rank(), dist.get_world_size()
    listener = listen()
    (Path(folder) / str(rank)).write_text(str(listener.getsockname()[1]))
    dist.barrier()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistBackendError if backend == "baguanet" else RuntimeError):
        for _ in range(100):
            dist.all_reduce(torch.ones(10))
    survivors = [other for other in range(size) if other != victim]
    port = int((Path(folder) / str(survivors[0])).read_text())
    place = survivors.index(rank)
    enter_world(world_of(2, len(survivors), port), rank=place, listener=listener, channel=None)
    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    return total.item()


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("backend", ["baguanet", "gloo"])
def test_survivors_go_on_without_a_dead_rank(tmp_path: Path, victim: int, backend: str) -> None:
    outcomes = run_ranks_to_the_end(survive, 3, str(tmp_path), victim, backend, backend=backend)
    assert outcomes[victim].died
    left = [outcome for rank, outcome in enumerate(outcomes) if rank != victim]
    assert [outcome.value for outcome in left] == [3.0 - victim] * 2, left[0].traceback


def wait_for_one_who_is_dead(phase: str) -> str:
    ours, theirs = socket.socketpair()
    channel = ControlChannel(theirs.detach())
    listener, silent = listen(), listen()
    rank, size = dist.get_rank(), dist.get_world_size()
    # Nobody answers at the silent port, as on a host that is cut off. Or the store is there, one rank is not.
    port = silent.getsockname()[1] if phase == "store" else agree_on_port(listener)
    if phase == "ranks":
        size += 1
    else:
        rank += 1
        size += 1
    abort = ControlMessage(Topic.ABORT, {"generation": 3, "reason": "one more is lost"})
    ours.sendall(ControlMessage(Topic.PING, {}).encode())
    ours.recv(1)
    waiting = threading.Timer(0.1, lambda: ours.sendall(abort.encode()))
    waiting.start()
    try:
        enter_world(
            world_of(2, size, port),
            rank=rank,
            listener=listener,
            channel=channel,
            timeout=timedelta(seconds=60),
        )
    except CommunicationError as error:
        message = channel.next(30)
        assert message == abort
        # Left in a World of one.
        channel.arm(3)
        enter_world(world_of(3, 1, 0), rank=0, listener=None, channel=channel)
        assert dist.get_world_size() == 1
        dist.barrier()
        channel.close()
        return str(error)
    return "entered"


@pytest.mark.parametrize("phase", ["store", "ranks"])
def test_an_abort_ends_the_wait_for_a_world_that_does_not_come_together(phase: str) -> None:
    ranks = 1 if phase == "store" else 2
    for said in run_ranks(wait_for_one_who_is_dead, ranks, phase):
        assert "one more is lost" in said and "generation 2" in said


def there_and_back(folder: str) -> None:
    rank = dist.get_rank()
    enter_world(world_of(2, 1, 0), rank=0, listener=None, channel=None)
    assert dist.get_world_size() == 1 and os.environ["WORLD_SIZE"] == "1"
    listener = listen()
    if rank == 0:
        (Path(folder) / "part").write_text(str(listener.getsockname()[1]))
        (Path(folder) / "part").rename(Path(folder) / "port")
    while not (Path(folder) / "port").exists():
        time.sleep(0.001)
    port = int((Path(folder) / "port").read_text())
    enter_world(world_of(3, 2, port), rank=rank, listener=listener, channel=None)
    dist.barrier()


def test_worlds_of_one_become_one_of_many(tmp_path: Path) -> None:
    run_ranks(there_and_back, 2, str(tmp_path))
