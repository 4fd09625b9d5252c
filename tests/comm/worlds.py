"""Worlds that change while their processes go on: workers of a test as an agent would drive them."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence

from baguarun.contract import World


def listen() -> socket.socket:
    """What a worker listens on in case that it becomes rank 0."""
    return socket.create_server(("127.0.0.1", 0))


def world_of(generation: int, world_size: int, port: int) -> World:
    """All workers on one node."""
    return World(
        job_id="job",
        generation=generation,
        node_rank=0,
        num_nodes=1,
        first_rank=0,
        local_world_size=world_size,
        world_size=world_size,
        master_addr="127.0.0.1",
        master_port=port,
        restart_count=0,
        max_restarts=0,
        in_place=True,
    )


def threads() -> list[str]:
    found = []
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm") as file:
                found.append(file.read().strip())
        except FileNotFoundError:
            continue
    return sorted(found)


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def wait_for_no_more_than(before: Sequence[int], count: Callable[[], Sequence[int]]) -> None:
    """The first store goes with the first World, the threads of one World soon after it."""
    give_up_s = time.monotonic() + 10.0
    while any(now > then for now, then in zip(count(), before, strict=True)):
        assert time.monotonic() < give_up_s, (count(), before, threads())
        time.sleep(0.005)
