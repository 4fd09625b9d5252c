"""What scripts do to gradients between and beside rounds: they stay averages, or somebody is told."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from baguarun.comm.algorithms import QAdam, QAdamOptimizer
from baguarun.comm.ddp import DistributedDataParallel
from tests.comm.models import assert_averaged, batch, gathered_gradients, loss, mlp
from tests.comm.ranks import run_ranks

Check = Callable[[], None]


def check_steps(model: DistributedDataParallel, inputs: list[torch.Tensor], *, set_to_none: bool) -> None:
    for x in inputs:
        reference = gathered_gradients(model.module, lambda local, x=x: loss(local(x)).backward())
        model.zero_grad(set_to_none=set_to_none)
        loss(model(x)).backward()
        assert_averaged(model.module, reference)


def averages_after_data_of_gradients_was_assigned() -> None:
    for set_to_none in (False, True):
        model = DistributedDataParallel(mlp(), bucket_cap_mb=0.005)
        inputs = [batch(model.module) for _ in range(6)]
        check_steps(model, inputs[:2], set_to_none=set_to_none)
        for parameter in model.parameters():
            parameter.grad.data = parameter.grad.data.clone()
        check_steps(model, inputs[2:], set_to_none=set_to_none)


def averages_after_the_memory_format_has_changed() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    model = DistributedDataParallel(net)
    torch.manual_seed(dist.get_rank())
    inputs = [torch.randn(2, 3, 9, 9) for _ in range(6)]
    check_steps(model, inputs[:2], set_to_none=False)
    net.to(memory_format=torch.channels_last)
    check_steps(model, inputs[2:], set_to_none=False)


def knows_momentum_only_where_it_has_put_it() -> None:
    net = nn.Linear(4, 3)
    optimizer = QAdamOptimizer(net.parameters(), lr=0.01, warmup_steps=1)
    model = DistributedDataParallel(net, algorithm=QAdam(), optimizers=[optimizer])
    engine = model._session._engine
    for _ in range(3):
        optimizer.zero_grad()
        loss(model(torch.randn(5, 4))).backward()
        optimizer.step()
    assert engine.momentum_is_known_finite()
    net.weight.grad.data = torch.full((3, 4), torch.nan)
    assert not engine.momentum_is_known_finite()


def keeps_gradients_where_they_are() -> None:
    """Without copies, and without new tensors, step by step."""
    for set_to_none in (False, True):
        model = DistributedDataParallel(mlp())
        seen = []
        for _ in range(5):
            model.zero_grad(set_to_none=set_to_none)
            loss(model(batch(model.module))).backward()
            seen.append([(id(p.grad), p.grad.data_ptr()) for p in model.parameters()])
        assert seen[2] == seen[3] == seen[4]


class Complex(nn.Module):
    """Its gradients are what the lazy bits of conjugation leave to be negated."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor(-0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.complex(self.a, self.b).conj() * x)


def negates_what_is_to_be_negated() -> None:
    model = DistributedDataParallel(Complex())
    for _ in range(3):
        x = torch.randn((), dtype=torch.complex64)
        reference = gathered_gradients(model.module, lambda local, x=x: local(x).sum().backward())
        model.zero_grad()
        model(x).sum().backward()
        assert_averaged(model.module, reference)


@pytest.mark.parametrize(
    "check",
    [
        averages_after_data_of_gradients_was_assigned,
        averages_after_the_memory_format_has_changed,
        knows_momentum_only_where_it_has_put_it,
        keeps_gradients_where_they_are,
        negates_what_is_to_be_negated,
    ],
    ids=lambda check: check.__name__,
)
def test_gradients(check: Check) -> None:
    run_ranks(check, 2)
