"""What may happen to momentum between its way into `grad` and the optimizer's step."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from baguarun.comm.algorithms import QAdam, QAdamOptimizer
from baguarun.comm.ddp import DistributedDataParallel
from baguarun.errors import UsageError
from tests.comm.models import batch, loss, mlp
from tests.comm.ranks import run_ranks


def backward_that_raises_is_done_again() -> None:
    """After the warm-up, with gradients of some buckets mixed already."""

    def train(fails_at: int) -> list[torch.Tensor]:
        module = mlp(width=61)
        optimizer = QAdamOptimizer(module.parameters(), lr=0.01, warmup_steps=2)
        model = DistributedDataParallel(module, optimizers=[optimizer], algorithm=QAdam(), bucket_cap_mb=0.01)
        torch.manual_seed(dist.get_rank())
        for step in range(5):
            x = batch(module)
            if step == fails_at:
                optimizer.zero_grad()
                output = model(x)
                handle = module[0].weight.register_hook(_refuse)
                with pytest.raises(RuntimeError, match="on purpose"):
                    loss(output).backward()
                handle.remove()
            optimizer.zero_grad()
            loss(model(x)).backward()
            optimizer.step()
        return [parameter.detach().clone() for parameter in module.parameters()]

    for with_failure, without in zip(train(3), train(-1), strict=True):
        assert torch.equal(with_failure, without)


def _refuse(gradient: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("on purpose")


def test_a_backward_that_raised_can_be_done_again_after_the_warm_up() -> None:
    run_ranks(backward_that_raises_is_done_again, 2)


def finite_until_somebody_writes(write: str) -> None:
    module = mlp()
    optimizer = QAdamOptimizer(module.parameters(), lr=0.01, warmup_steps=1)
    model = DistributedDataParallel(module, optimizers=[optimizer], algorithm=QAdam())
    parameters = list(module.parameters())
    for step in range(3):
        optimizer.zero_grad()
        loss(model(batch(module))).backward()
        if step < 2:
            optimizer.step()
    assert optimizer._stages is not None
    stages = optimizer._stages()
    assert stages is not None and stages.are_known_finite(parameters)
    assert not stages.are_known_finite([*parameters, nn.Parameter(torch.ones(1))])
    gradient = parameters[0].grad
    assert gradient is not None
    if write == "past the counter":
        gradient.numpy()[0] = torch.nan
        with pytest.raises(UsageError, match="a gradient that was finite when it came is not any more"):
            optimizer.step()
        return
    if write == "in place":
        gradient[0] = torch.nan
    else:
        parameters[0].grad = torch.full_like(gradient, torch.nan)
    assert not stages.are_known_finite(parameters)
    before = [parameter.detach().clone() for parameter in parameters]
    with pytest.warns(UserWarning, match="is not finite; step 3 is left out"):
        optimizer.step()
    assert all(torch.equal(own, old) for own, old in zip(parameters, before, strict=True))


@pytest.mark.parametrize("write", ["in place", "another tensor", "past the counter"])
def test_what_the_user_writes_to_momentum_is_looked_at_again(write: str) -> None:
    run_ranks(finite_until_somebody_writes, 2, write)


def seen_in_any_piece() -> None:
    """Of a bucket that is large enough to be exchanged in two."""
    module = nn.Linear(3000, 3000, bias=False)
    optimizer = QAdamOptimizer(module.parameters(), lr=0.01, warmup_steps=1)
    model = DistributedDataParallel(module, optimizers=[optimizer], algorithm=QAdam(), bucket_cap_mb=64)
    for place in (None, None, 0, -1):

        def spoil(gradient: torch.Tensor, place: int | None = place) -> torch.Tensor:
            if place is not None and dist.get_rank() == 0:
                gradient.view(-1)[place] = math.inf
            return gradient

        handle = module.weight.register_hook(spoil)
        optimizer.zero_grad()
        model(torch.ones(2, 3000)).square().mean().backward()
        handle.remove()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        left_out = ["is not finite" in str(each.message) for each in caught]
        assert any(left_out) == (place is not None)
    assert module.weight.isfinite().all()


def test_a_number_that_is_not_finite_is_seen_in_any_piece_of_a_bucket() -> None:
    run_ranks(seen_in_any_piece, 2)


def number_of_looks(bits: int, dtype: torch.dtype, looks: bool) -> None:
    module = mlp().to(dtype)
    optimizer = QAdamOptimizer(module.parameters(), lr=0.01, warmup_steps=1)
    model = DistributedDataParallel(module, optimizers=[optimizer], algorithm=QAdam(bits=bits))
    for step in range(3):
        optimizer.zero_grad()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            loss(model(batch(module))).backward()
        optimizer.step()
        names = {event.key for event in profiler.key_averages()}
        is_compressed = step > 0
        assert ("baguarun::decode" in names) == is_compressed
        assert ("baguarun::look for NaN" in names) == (is_compressed and looks)


@pytest.mark.parametrize("bits", [8, 1])
@pytest.mark.parametrize(("dtype", "looks"), [(torch.float32, False), (torch.bfloat16, True)])
def test_headers_spare_a_look_at_all_numbers(bits: int, dtype: torch.dtype, looks: bool) -> None:
    run_ranks(number_of_looks, 2, bits, dtype, looks)
