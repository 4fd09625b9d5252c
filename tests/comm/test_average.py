"""Averages over baguanet, to another place or in place; test_backend_hosts.py has some of several hosts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from baguarun.comm.algorithms.pending import PendingAverages
from baguarun.comm.algorithms.stepper import StepContext, Stepper
from baguarun.comm.backend import backend_on_cpu
from baguarun.comm.extension import load_extension
from baguarun.comm.weights import FlatWeights
from baguarun.errors import CommunicationError
from tests.comm.ranks import run_ranks


def start(source: torch.Tensor, into: torch.Tensor) -> Any:
    return load_extension().Average(backend_on_cpu(dist.group.WORLD), source, into)


def numbers(size: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    return (torch.arange(size) % 64 + rank).to(dtype)


def averaged_in_pieces(dtype: torch.dtype, sizes: tuple[int, ...], are_copied: bool) -> list[int]:
    """The size of each piece that came."""
    rank, world_size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert group is not None
    sources = [numbers(size, dtype, rank) for size in sizes]
    tensors = [torch.full_like(source, -1) for source in sources] if are_copied else sources
    pending = PendingAverages(tensors, sources, backend_on_cpu(group))
    pieces = [piece.clone() for piece in pending.arrivals()]
    assert pending.is_done() and pending.wait() == tensors
    wanted = [torch.arange(size) % 64 + (world_size - 1) / 2 for size in sizes]
    for tensor, want in zip(tensors, wanted, strict=True):
        torch.testing.assert_close(tensor.double(), want.double(), rtol=0, atol=0)
    assert torch.equal(torch.cat(pieces), torch.cat(tensors))
    if are_copied:
        assert all(torch.equal(source, numbers(source.numel(), dtype, rank)) for source in sources)
    return [piece.numel() for piece in pieces]


@pytest.mark.parametrize("are_copied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_tensors_become_averages_piece_by_piece(
    world_size: int, dtype: torch.dtype, are_copied: bool
) -> None:
    size = (2 << 20) // dtype.itemsize
    found = run_ranks(averaged_in_pieces, world_size, dtype, (size, 1000, 1, 0), are_copied)
    assert found == [[size // 2, size // 2, 1000, 1, 0]] * world_size


def refused() -> list[str]:
    ones = torch.ones(4, 4)
    said = []
    for source, into in (
        (ones, torch.ones(15)),
        (ones, torch.ones(4, 4, dtype=torch.float64)),
        (ones.T, ones),
        (ones, ones[:, :2].expand(2, 4, 2)[0].T),
        (ones.int(), ones.int()),
        (ones.to_sparse(), ones),
    ):
        with pytest.raises(ValueError) as found:
            start(source, into)
        said.append(str(found.value))
    average = start(ones, torch.empty(4, 4))
    for count in (-1, 17):
        with pytest.raises(ValueError, match=f"count={count}; want 0 <= count <= 16"):
            average.wait(count)
    average.wait(16)
    average.wait(0)
    return said


def test_what_cannot_be_averaged_is_refused_before_anybody_is_told() -> None:
    unlike, other_type, turned, gaps, integers, sparse = run_ranks(refused, 1)[0]
    assert "15 Float" in unlike and "16 Float" in unlike and "Double" in other_type
    assert "contiguous" in turned and "found tensors of 8 Float and 16" in gaps
    assert "AVG" in integers and "Sparse" in sparse


def one_has_another_size() -> None:
    group = dist.group.WORLD
    assert group is not None
    tensor = torch.ones(100 + dist.get_rank())
    pending = PendingAverages([tensor], [tensor], backend_on_cpu(group))
    with pytest.raises(
        CommunicationError, match=r"exchange of the model's weights failed: .*all_reduce \(collective \d+\)"
    ):
        pending.wait()
    # It has ended.
    assert pending.is_done()


def test_ranks_that_average_other_sizes_are_told() -> None:
    run_ranks(one_has_another_size, 2)


def complex_numbers_and_tensors_with_gaps() -> None:
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    ones = torch.ones(3, 4)
    weights = FlatWeights([("weight", nn.Parameter(ones.clone()))])
    stepper = Stepper(StepContext(weights=weights, lanes=(group,)))
    gaps, turned = (rank * ones).T, torch.zeros(4, 3)
    found = stepper.average([turned], [gaps])
    assert torch.equal(found.wait()[0], 0.5 * ones.T)
    source = torch.full((1 << 18,), complex(rank, 1))
    (found,) = stepper.average([torch.empty_like(source)], [source]).wait()
    assert bool((found == complex(0.5, 1)).all())


def test_what_a_stepper_averages_may_have_gaps_and_be_complex() -> None:
    run_ranks(complex_numbers_and_tensors_with_gaps, 2)


def drops_one_that_is_under_way() -> None:
    for _ in range(3):
        start(torch.ones(1 << 20), torch.empty(1 << 20))
    dist.barrier()


def test_who_forgets_an_average_can_go_on() -> None:
    run_ranks(drops_one_that_is_under_way, 2)
