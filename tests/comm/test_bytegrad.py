from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from baguarun.comm.algorithms import QAdamOptimizer
from baguarun.comm.ddp import DistributedDataParallel
from baguarun.comm.extension import load_extension
from tests.comm.models import assert_averaged, assert_same_on_all_ranks, batch, gathered_gradients, loss, mlp
from tests.comm.ranks import run_ranks

CHUNK_ALIGN = 16


def reference_exchange(flats: list[torch.Tensor], wire_name: str = "MINMAX8") -> torch.Tensor:
    """Scatter, reduce, gather of what all ranks have, written out with the codec's own functions."""
    codec = load_extension()
    wire, world_size, numel = getattr(codec.Wire, wire_name), len(flats), flats[0].numel()
    share = -(-numel // world_size)
    stride = -(-share // CHUNK_ALIGN) * CHUNK_ALIGN
    parts = []
    for start in range(0, numel, stride):
        pieces = [flat[start : start + stride] for flat in flats]
        chunks = [codec.encode(piece, wire) for piece in pieces]
        reduced = codec.reduce_encode(chunks, wire, 1.0 / world_size, pieces[0].numel())
        parts.append(codec.decode(reduced, wire, pieces[0].numel(), flats[0].dtype))
    return torch.cat(parts)


def matches_reference_bit_for_bit() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = DistributedDataParallel(mlp(dtype, width=61), algorithm="bytegrad", bucket_cap_mb=0.01)
        parameters = list(model.module.parameters())
        for _ in range(3):
            x = batch(model.module)
            locals_ = gathered_gradients(model.module, lambda local, x=x: loss(local(x)).backward())
            model.zero_grad()
            loss(model(x)).backward()
            names = [name for name, _ in model.module.named_parameters()]
            plan = model._session._engine.plan()
            assert len(plan) > 1
            for bucket in plan:
                flats = [
                    torch.cat([locals_[names[i]][rank].reshape(-1) for i in bucket])
                    for rank in range(dist.get_world_size())
                ]
                found = torch.cat([parameters[i].grad.reshape(-1) for i in bucket])
                assert torch.equal(found, reference_exchange(flats))
        assert_same_on_all_ranks([p.grad for p in parameters])


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_bucket_equals_the_written_out_exchange_bit_for_bit(world_size: int) -> None:
    run_ranks(matches_reference_bit_for_bit, world_size)


class Weighted(nn.Module):
    """Its gradient is its input."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(numel))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weights * x).sum()


PIECE_BYTES = 16 << 20


def cut_reference(flats: list[torch.Tensor]) -> torch.Tensor:
    """The exchange of a bucket so large that it goes in pieces, of whole blocks for every rank."""
    numel, unit = flats[0].numel(), 2048 * len(flats)
    share = -(-(numel // (flats[0].nbytes // PIECE_BYTES)) // unit) * unit
    assert share < numel
    return torch.cat(
        [reference_exchange([flat[at : at + share] for flat in flats]) for at in range(0, numel, share)]
    )


def large_parameters_match_the_reference_bit_for_bit() -> None:
    world_size, numel = dist.get_world_size(), 9_000_001
    inputs = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(world_size)]
    own = inputs[dist.get_rank()]
    model = DistributedDataParallel(Weighted(numel), algorithm="bytegrad")
    model(own).backward()
    (weights,) = model.parameters()
    assert weights.grad is not None
    assert torch.equal(weights.grad, cut_reference(inputs))

    net = Weighted(numel)
    optimizer = QAdamOptimizer(net.parameters(), lr=1e-3, warmup_steps=1)
    model = DistributedDataParallel(net, optimizers=[optimizer], algorithm="qadam")
    for _ in range(2):
        optimizer.zero_grad()
        if not optimizer.in_warmup:
            average = optimizer.state[net.weights]["exp_avg"].clone()
        model(own).backward()
        optimizer.step()
    beta = optimizer.param_groups[0]["betas"][0]
    expected = cut_reference([average.lerp(each, 1 - beta) for each in inputs])
    assert net.weights.grad is not None
    assert torch.equal(net.weights.grad, expected)
    assert torch.equal(optimizer.state[net.weights]["exp_avg"], expected)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_large_bucket_goes_in_pieces(world_size: int) -> None:
    run_ranks(large_parameters_match_the_reference_bit_for_bit, world_size)


def trains() -> None:
    model = DistributedDataParallel(mlp(), algorithm="bytegrad")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, target = torch.randn(64, 37), torch.randn(64, 40)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        value = (model(x) - target).square().mean()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert losses[-1] < losses[0]
    assert_same_on_all_ranks(list(model.parameters()))
    sent = model.stats().bytes_sent / model.stats().steps
    full = sum(p.numel() * 4 for p in model.parameters()) * 2 * 3 // 4
    assert sent < full / 3.8


def test_replicas_stay_bit_identical_while_a_quarter_of_the_bytes_travels() -> None:
    run_ranks(trains, 4)


def overflow_reaches_all_ranks() -> None:
    model = DistributedDataParallel(nn.Linear(100, 100, bias=False), algorithm="bytegrad")
    for bad in (float("nan"), float("inf")):
        model.zero_grad()
        x = torch.ones(1, 100)
        if dist.get_rank() == 1:
            x[0, 7] = bad
        model(x).sum().backward()
        assert not torch.isfinite(model.module.weight.grad).all()
        # The next step must not inherit it.
        model.zero_grad()
        x = torch.ones(1, 100)
        reference = gathered_gradients(model.module, lambda local, x=x: local(x).sum().backward())
        model(x).sum().backward()
        assert_averaged(model.module, reference, 0.02, one_scale=True)


def test_nan_and_inf_on_one_rank_are_seen_by_all_and_are_gone_in_the_next_step() -> None:
    run_ranks(overflow_reaches_all_ranks, 3)
