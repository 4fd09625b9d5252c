"""Codecs with a memory, and coded averages of weights, where exchanges go by rail."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from baguarun.comm.algorithms import Algorithm, ByteGrad, DiLoCo, QAdam, QAdamOptimizer, Sparse
from baguarun.comm.ddp import DistributedDataParallel
from tests.comm.models import assert_same_on_all_ranks, batch, expected_average, gathered_gradients, loss, mlp
from tests.comm.nodes import live_on_nodes
from tests.comm.ranks import run_ranks

PLACES = [(2, 2), (3, 1), (1, 2, 2)]
ROUNDS = 60


def sends_all_in_the_long_run(sizes: Sequence[int], algorithm: Algorithm) -> None:
    live_on_nodes(sizes)
    model = DistributedDataParallel(mlp(torch.float32, width=61), algorithm=algorithm, bucket_cap_mb=0.01)
    x = batch(model.module)
    locals_ = gathered_gradients(model.module, lambda local: loss(local(x)).backward())
    model.zero_grad()
    sent = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for _ in range(ROUNDS):
        loss(model(x)).backward()
        assert_same_on_all_ranks([parameter.grad for parameter in model.parameters()])
        for total, parameter in zip(sent, model.parameters(), strict=True):
            total += parameter.grad / ROUNDS
            parameter.grad = None
    for total, gradients in zip(sent, locals_.values(), strict=True):
        average = expected_average(gradients)
        assert average is not None
        assert (total - average).norm() < 0.15 * average.norm()


@pytest.mark.parametrize("sizes", PLACES, ids=str)
@pytest.mark.parametrize(
    "algorithm",
    [
        Sparse(warmup_steps=0, density=0.1, hierarchical=True),
        ByteGrad(error_feedback=True, hierarchical=True),
    ],
)
def test_in_the_long_run_nothing_is_lost(sizes: Sequence[int], algorithm: Algorithm) -> None:
    run_ranks(sends_all_in_the_long_run, sum(sizes), sizes, algorithm)


def trains(sizes: Sequence[int]) -> tuple[float, float]:
    """The loss at first and at last."""
    live_on_nodes(sizes)
    torch.manual_seed(0)
    module = mlp(torch.float32, width=61)
    optimizer = QAdamOptimizer(module.parameters(), lr=0.01, warmup_steps=5)
    model = DistributedDataParallel(
        module, optimizers=[optimizer], algorithm=QAdam(bits=1, hierarchical=True)
    )
    x = batch(module)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        losses.append(loss(model(x)))
        losses[-1].backward()
        optimizer.step()
    assert_same_on_all_ranks([parameter.detach() for parameter in module.parameters()])
    return losses[0].item(), losses[-1].item()


@pytest.mark.parametrize("sizes", PLACES, ids=str)
def test_qadam_learns_by_rail(sizes: Sequence[int]) -> None:
    for first, last in run_ranks(trains, sum(sizes), sizes):
        assert last < 0.05 * first


def goes_outer_steps(sizes: Sequence[int]) -> float:
    """How far weights with 8 bits and by rail end from those in full precision, as a share of their way."""
    live_on_nodes(sizes)
    ends = []
    for settings in (DiLoCo(local_steps=2, wire="int8", hierarchical=True), DiLoCo(local_steps=2)):
        torch.manual_seed(0)
        module = mlp(torch.float32, width=61)
        start = torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        model = DistributedDataParallel(module, optimizers=[optimizer], algorithm=settings)
        x = batch(module)
        for _ in range(4):
            optimizer.zero_grad()
            loss(model(x)).backward()
            optimizer.step()
        assert_same_on_all_ranks([parameter.detach() for parameter in module.parameters()])
        ends.append(torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()]))
    coded, full = ends
    return ((coded - full).norm() / (full - start).norm()).item()


@pytest.mark.parametrize("sizes", PLACES, ids=str)
def test_outer_steps_of_8_bits_go_by_rail(sizes: Sequence[int]) -> None:
    assert all(0 < share < 0.03 for share in run_ranks(goes_outer_steps, sum(sizes), sizes))
