"""One all-reduce of a few tensors through the codecs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from baguarun.comm.algorithms.base import Wire
from baguarun.comm.algorithms.coded import CodedReduction
from baguarun.errors import UsageError
from tests.comm.models import assert_same_on_all_ranks
from tests.comm.ranks import run_ranks

# More than one piece of 4 MiB, one that ends inside of a block, and a single number.
SIZES = (2**20 + 2048 + 77, 5000, 1)


def average_together(dtype: torch.dtype) -> list[float]:
    """Errors of two reductions under way at once, and the bytes of one per number."""
    group = dist.group.WORLD
    assert group is not None
    world_size = dist.get_world_size()
    reductions, averages = [], []
    for number in (1, 2):
        tensors = [torch.randn(size).to(dtype) for size in SIZES]
        everyone: list[list[torch.Tensor]] = [[] for _ in range(world_size)]
        dist.all_gather_object(everyone, tensors)
        averages.append([torch.stack(ranks).double().mean(0) for ranks in zip(*everyone, strict=True)])
        reductions.append(CodedReduction(tensors, group, Wire.MINMAX8, number))
    errors = []
    for reduction, expected in reversed(list(zip(reductions, averages, strict=True))):
        found = reduction.wait()
        assert_same_on_all_ranks(found)
        errors += [
            (mine.double() - average).abs().max().item()
            for mine, average in zip(found, expected, strict=True)
        ]
    return [*errors, reductions[0].bytes_sent / sum(SIZES)]


@pytest.mark.parametrize(
    ("world_size", "backend", "dtype"),
    [(2, "gloo", torch.float32), (3, "baguanet", torch.bfloat16), (4, "baguanet", torch.float32)],
)
def test_the_average_is_within_a_step_of_the_grid_and_equal_on_all_ranks(
    world_size: int, backend: str, dtype: torch.dtype
) -> None:
    for *errors, bytes_per_number in run_ranks(average_together, world_size, dtype, backend=backend):
        # Numbers reach from -6 to 6; each coding is off by half a step at most, and bf16 by a little more.
        step = 12 / 254
        assert max(errors) < step + (0.02 if dtype is torch.bfloat16 else 0)
        assert max(errors) > step / 100
        assert 1 <= bytes_per_number / (2 * (world_size - 1) / world_size) < 1.01


def reduce_what_cannot_be_coded() -> list[str]:
    group = dist.group.WORLD
    assert group is not None
    texts = []
    for tensors in ([torch.ones(4, dtype=torch.float64)], [torch.ones(4, 4).t()[:2]], [torch.ones(0)]):
        with pytest.raises(UsageError) as caught:
            CodedReduction(tensors, group, Wire.MINMAX8, 1)
        texts.append(str(caught.value))
    return texts


def test_what_cannot_be_coded_is_refused() -> None:
    for float64, strided, empty in run_ranks(reduce_what_cannot_be_coded, 2):
        assert "have no codec" in float64
        assert "want contiguous ones" in strided
        assert "want at least one number" in empty
