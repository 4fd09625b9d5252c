"""Lanes: parts of what is large take turns on groups of the same ranks, and come together again."""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from baguarun.comm import groups
from baguarun.comm.algorithms import Algorithm, Decentralized
from baguarun.comm.algorithms.pending import PendingReduction
from baguarun.comm.ddp import DistributedDataParallel
from baguarun.comm.lanes import join_lanes
from tests.comm.nodes import live_on_nodes
from tests.comm.ranks import run_ranks

_PIECE_BYTES = 1 << 20
"""The least that is a part by itself, where there are several."""


def averaged(
    dtype: torch.dtype, sizes: tuple[int, ...], are_copied: bool = False
) -> tuple[list[list[int]], list[int]]:
    """What each lane was given, by numbers, and how many works are waited for."""
    world = dist.group.WORLD
    assert world is not None
    rank, world_size = world.rank(), world.size()
    lanes = join_lanes(world, torch.device("cpu"))
    assert lanes[0] is world
    assert all(dist.get_process_group_ranks(lane) == list(range(world_size)) for lane in lanes)
    given: list[list[int]] = [[] for _ in lanes]
    torchs = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *rest: Any, group: dist.ProcessGroup, **named: Any) -> Any:
        given[lanes.index(group)].append(tensor.numel())
        return torchs(tensor, *rest, group=group, **named)

    dist.all_reduce = all_reduce
    tensors = [(torch.arange(size) % 64 + rank).to(dtype) for size in sizes]
    sources = [tensor.clone() for tensor in tensors] if are_copied else None
    if are_copied:
        tensors = [torch.full_like(tensor, -1) for tensor in tensors]
    kept = None if sources is None else [source.clone() for source in sources]
    pending = PendingReduction(tensors, lanes, sources=sources)
    works = [len(pending._works)]
    for size, average in zip(sizes, pending.wait(), strict=True):
        wanted = torch.arange(size) % 64 + (world_size - 1) / 2
        torch.testing.assert_close(average.double(), wanted.double(), rtol=0, atol=0)
    assert kept is None or all(map(torch.equal, kept, sources or []))
    return given, works


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("world_size", [2, 3])
def test_on_gloo_the_parts_of_a_large_tensor_take_turns_on_four_lanes(
    world_size: int, dtype: torch.dtype
) -> None:
    size = 8 * _PIECE_BYTES // dtype.itemsize + 5
    for given, works in run_ranks(averaged, world_size, dtype, (size,), backend="gloo"):
        assert works == [8]
        assert [len(parts) for parts in given] == [2, 2, 2, 2]
        assert sum(map(sum, given)) == size


def test_what_is_small_is_one_part() -> None:
    for given, _ in run_ranks(averaged, 2, torch.float32, (1000, 1, 0), backend="gloo"):
        assert given == [[1000], [1], [0], []]


def test_baguanet_has_streams_of_its_own_and_one_lane() -> None:
    for given, works in run_ranks(averaged, 2, torch.float32, (2 * _PIECE_BYTES,), backend="baguanet"):
        assert (given, works) == ([[2 * _PIECE_BYTES]], [1])


def test_averages_of_other_tensors_leave_those_as_they_are() -> None:
    sizes = (2 * _PIECE_BYTES, _PIECE_BYTES // 4, 100)
    for _, works in run_ranks(averaged, 2, torch.float32, sizes, True, backend="gloo"):
        assert works == [10]


def sums_between_nodes(algorithm: Algorithm) -> list[int]:
    """How many all-reduces each group of a rail was given in one step, by itself."""
    live_on_nodes((2, 2))
    counted: Counter[str] = Counter()
    torchs: Callable[..., Any] = dist.ProcessGroup.allreduce

    def allreduce(group: dist.ProcessGroup, *rest: Any) -> Any:
        counted[group.group_name] += group.size() == 2
        return torchs(group, *rest)

    net = torch.nn.Linear(1 << 11, 1 << 10, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = DistributedDataParallel(net, optimizers=[optimizer], algorithm=algorithm)
    dist.ProcessGroup.allreduce = allreduce
    model(torch.ones(1, 1 << 11)).sum().backward()
    optimizer.step()
    return sorted((+counted).values())


def test_so_do_pieces_of_weights_between_nodes() -> None:
    assert run_ranks(sums_between_nodes, 4, Decentralized(), backend="gloo") == [[2, 2, 2, 2]] * 4


def connections_that_carried_much(algorithm: str) -> int:
    """How many of this process have sent a mebibyte after a step."""
    # Else gradients go through shared memory, not through Gloo.
    groups.on_one_host = lambda group: False
    net = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(8)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = DistributedDataParallel(net, optimizers=[optimizer], algorithm=algorithm, init_sync=False)
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    listed = subprocess.run(["ss", "-tinpHO"], capture_output=True, text=True, check=True).stdout
    mine = [line for line in listed.splitlines() if f"pid={os.getpid()}," in line]
    sent = [int(found[1]) for line in mine if (found := re.search(r"bytes_sent:(\d+)", line))]
    return sum(size >= _PIECE_BYTES for size in sent)


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad", "decentralized"])
def test_on_gloo_what_is_sent_goes_over_a_connection_per_lane(algorithm: str) -> None:
    assert run_ranks(connections_that_carried_much, 2, algorithm, backend="gloo") == [4, 4]
