"""The codecs as hooks of torch's own DistributedDataParallel."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from baguarun.comm import hooks
from baguarun.errors import UsageError
from tests.comm.models import assert_same_on_all_ranks
from tests.comm.ranks import run_ranks

HOOKS = ("bytegrad", "onebit", "topk")


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(24, 150), nn.Tanh(), nn.Linear(150, 24))


def trains(name: str) -> None:
    model = DistributedDataParallel(network(), bucket_cap_mb=0.01)
    state = hooks.CodecState(keep=256)
    model.register_comm_hook(state, getattr(hooks, name))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    data = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(150):
        x = torch.randn(32, 24, generator=data)
        loss = (model(x) - x.roll(1, dims=1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        assert_same_on_all_ranks([p.grad for p in model.parameters()])
        optimizer.step()
        losses.append(loss.item())
    assert_same_on_all_ranks(list(model.parameters()))
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    assert bool(state.residuals) == (name != "bytegrad")


@pytest.mark.parametrize("name", HOOKS)
def test_replicas_stay_bit_equal_and_the_loss_falls(name: str) -> None:
    run_ranks(trains, 2, name, backend="gloo")


def gives_the_average(world_size: int) -> None:
    """With few numbers kept, the average comes over several steps of the same gradient."""
    model = DistributedDataParallel(nn.Linear(1, 5000, bias=False))
    model.register_comm_hook(hooks.CodecState(keep=256), hooks.topk)
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(world_size, 5000, 1, generator=generator)
    total = torch.zeros(5000, 1)
    steps = 40
    for _ in range(steps):
        model.zero_grad()
        (model(torch.ones(1, 1)) * gradients[rank].T).sum().backward()
        total += model.module.weight.grad
    error = (total / steps - gradients.mean(dim=0)).norm() / gradients.mean(dim=0).norm()
    assert error < 0.4


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_top_k_leaves_out_comes_later(world_size: int) -> None:
    run_ranks(gives_the_average, world_size, world_size)


def refuses_float64() -> None:
    model = DistributedDataParallel(nn.Linear(2, 2).double())
    model.register_comm_hook(hooks.CodecState(), hooks.bytegrad)
    with pytest.raises(UsageError, match=r"torch\.float64 on cpu; want float32"):
        model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()


def test_gradients_without_a_codec_are_refused_by_name() -> None:
    run_ranks(refuses_float64, 1, backend="gloo")


@pytest.mark.parametrize("keep", [0, 257])
def test_a_share_out_of_range_is_refused(keep: int) -> None:
    with pytest.raises(UsageError, match=f"keep={keep}; want 1 <= keep <= 256"):
        hooks.CodecState(keep=keep)
