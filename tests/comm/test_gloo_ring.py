"""All-reduces by messages: sums of any size and type on any number of ranks, the same bits everywhere."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from baguarun.comm.gloo_ring import all_reduce_each
from tests.comm.ranks import run_ranks

SIZES = (0, 1, 2, 5, 1000, 300_001, *range(20, 40))


def values(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(31 * rank + size)).to(dtype)


def sums_are_right() -> None:
    group = dist.new_group(backend="gloo")
    rank, size = group.rank(), group.size()
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        tensors = [values(rank, count, dtype) for count in SIZES]
        # More than go side by side on two ranks, which see sums before all have begun.
        results = list(all_reduce_each(group, iter(tensors)))
        assert [result.data_ptr() for result in results] == [tensor.data_ptr() for tensor in tensors]
        for count, result in zip(SIZES, results, strict=True):
            expected = sum(values(each, count, dtype).double() for each in range(size))
            error = (result.double() - expected).abs().max().item() if count else 0.0
            assert error <= {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]
            everybodys = [torch.empty_like(result) for _ in range(size)]
            dist.all_gather(everybodys, result, group=group)
            assert all(torch.equal(one, result) for one in everybodys)
    assert list(all_reduce_each(group, iter(()))) == []


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_sums_are_right_and_the_same_everywhere(world_size: int) -> None:
    run_ranks(sums_are_right, world_size)
