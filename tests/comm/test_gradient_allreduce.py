from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from baguarun.comm.algorithms import GradientAllReduce
from baguarun.comm.ddp import DistributedDataParallel
from tests.comm.models import assert_averaged, assert_same_on_all_ranks, batch, gathered_gradients, loss, mlp
from tests.comm.ranks import run_ranks

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def averages_of_every_dtype() -> None:
    for dtype, rtol in TOLERANCE.items():
        for cap in (None, 0.005):
            model = DistributedDataParallel(mlp(dtype), bucket_cap_mb=cap)
            for _ in range(3):
                x = batch(model.module)
                reference = gathered_gradients(model.module, lambda local, x=x: loss(local(x)).backward())
                model.zero_grad()
                loss(model(x)).backward()
                assert_averaged(model.module, reference, rtol)
                assert_same_on_all_ranks([p.grad for p in model.parameters()])


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_gradients_are_averaged_in_every_dtype_and_with_any_number_of_buckets(world_size: int) -> None:
    run_ranks(averages_of_every_dtype, world_size)


def trains_like_torch_ddp() -> None:
    ours = DistributedDataParallel(mlp())
    theirs = nn.parallel.DistributedDataParallel(mlp(), gradient_as_bucket_view=True)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (ours, theirs)]
    for _ in range(10):
        x = batch(ours.module)
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            loss(model(x)).backward()
            optimizer.step()
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(mine, other)


def test_two_ranks_train_bit_for_bit_like_torch_ddp() -> None:
    run_ranks(trains_like_torch_ddp, 2)


def sixteen_bit_wires() -> None:
    for wire, rtol in (("fp16", 1e-3), ("bf16", 8e-3)):
        model = DistributedDataParallel(mlp(), algorithm=GradientAllReduce(wire=wire))
        x = batch(model.module)
        reference = gathered_gradients(model.module, lambda local, x=x: loss(local(x)).backward())
        full = sum(p.numel() * 4 for p in model.parameters()) * 2 * 3 // 4
        for _ in range(2):
            model.zero_grad()
            loss(model(x)).backward()
            assert_averaged(model.module, reference, rtol)
            assert_same_on_all_ranks([p.grad for p in model.parameters()])
        sent = model.stats().bytes_sent / model.stats().steps
        assert sent == pytest.approx(full / 2, rel=0.05)


def test_sixteen_bit_wires_send_half_the_bytes_and_round_once_each_way() -> None:
    run_ranks(sixteen_bit_wires, 4)


def sums_and_tiny_models() -> None:
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False), algorithm=GradientAllReduce(average=False))
    rank = dist.get_rank()
    for _ in range(3):
        model.zero_grad()
        model(torch.full((1, 1), float(rank + 1))).sum().backward()
        assert model.module.weight.grad.item() == 1 + 2 + 3 + 4


def test_a_model_of_one_number_is_summed_although_three_of_four_ranks_own_no_chunk() -> None:
    run_ranks(sums_and_tiny_models, 4)


def mixed_dtypes() -> None:
    model = nn.ModuleDict({"a": mlp(torch.float32), "b": mlp(torch.float64), "c": mlp(torch.bfloat16)})
    wrapped = DistributedDataParallel(_Each(model), algorithm="gradient_allreduce")
    for _ in range(2):
        x = torch.randn(4, 37, dtype=torch.float64)
        reference = gathered_gradients(wrapped.module, lambda local, x=x: local(x).backward())
        wrapped.zero_grad()
        wrapped(x).backward()
        assert_averaged(wrapped.module, reference, 1e-2)


class _Each(nn.Module):
    def __init__(self, parts: nn.ModuleDict) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(loss(part(x.to(next(part.parameters()).dtype))) for part in self.parts.values())


def test_one_model_may_mix_dtypes() -> None:
    run_ranks(mixed_dtypes, 2)


def world_of_one() -> None:
    model = DistributedDataParallel(mlp(), algorithm="bytegrad")
    plain = copy.deepcopy(model.module)
    x = batch(plain)
    loss(model(x)).backward()
    loss(plain(x)).backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)
    assert model.stats().bytes_sent == 0


def test_a_world_of_one_leaves_gradients_untouched_and_sends_nothing() -> None:
    run_ranks(world_of_one, 1)
