"""What `with_bagua` makes of a module: when it communicates, and when not."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import baguarun.torch_api as bagua
from baguarun.comm.algorithms import Algorithm
from baguarun.torch_api.algorithms import bytegrad, decentralized, gradient_allreduce
from tests.comm.algorithms.simulation import run_for_tensors
from tests.comm.models import assert_same_on_all_ranks, batch, loss
from tests.comm.ranks import run_ranks

SOON = timedelta(seconds=10)
"""A rank that waits for one that has nothing to say fails after this."""


def normed() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(batch(model))).backward()
        optimizer.step()


def evaluate_on_rank_0_alone(algorithm: Algorithm, steps: int, with_gradients: bool) -> float:
    net = normed()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model: Any = net.with_bagua([optimizer], algorithm)  # type: ignore[operator]
    train(model, optimizer, steps)
    if dist.get_rank() == 0:
        model.eval()
        with nullcontext() if with_gradients else torch.no_grad():
            model(batch(model))
        model.train()
    bagua.barrier()
    train(model, optimizer, 2)
    mean: float = net[1].running_mean.sum().item()  # type: ignore[union-attr, operator]
    return mean


ALGORITHMS = [
    gradient_allreduce.GradientAllReduceAlgorithm(),
    bytegrad.ByteGradAlgorithm(),
    decentralized.DecentralizedAlgorithm(hierarchical=False),
    decentralized.LowPrecisionDecentralizedAlgorithm(hierarchical=False),
]


@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: algorithm.name)
def test_one_rank_may_evaluate_alone(algorithm: Algorithm, steps: int, with_gradients: bool) -> None:
    zero, one = run_ranks(evaluate_on_rank_0_alone, 2, algorithm, steps, with_gradients, timeout=SOON)
    assert zero != one


def begin_with_different_buffers() -> list[float]:
    net = normed()
    norm: Any = net[1]
    norm.running_mean.fill_(dist.get_rank() + 1.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    net.with_bagua([optimizer], gradient_allreduce.GradientAllReduceAlgorithm())  # type: ignore[operator]
    return norm.running_mean.tolist()  # type: ignore[no-any-return]


def test_buffers_begin_as_rank_0s() -> None:
    assert run_ranks(begin_with_different_buffers, 2) == [[1.0] * 5] * 2


def train_in_evaluation_mode(algorithm: Algorithm) -> list[torch.Tensor]:
    """With the statistics of BatchNorm fixed, as in fine-tuning; in one mode and in the other."""
    found = []
    for is_training in (False, True):
        torch.manual_seed(dist.get_rank())
        net = normed()
        net.train(is_training)
        net[1].eval()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        model: Any = net.with_bagua([optimizer], algorithm)  # type: ignore[operator]
        train(model, optimizer, 3)
        if not algorithm.exchanges_weights:
            assert_same_on_all_ranks(list(net.parameters()))
        model.algorithm_state_dict()
        found.append(torch.cat([parameter.detach().flatten() for parameter in net.parameters()]))
    return found


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: algorithm.name)
def test_training_in_evaluation_mode_is_training(algorithm: Algorithm) -> None:
    # The order of buckets is not adopted in evaluation mode, and blocks of bytegrad span parameters.
    error = 2e-3 if algorithm.name == "bytegrad" else 0.0
    for evaluating, training in run_for_tensors(train_in_evaluation_mode, 2, algorithm):
        torch.testing.assert_close(evaluating, training, rtol=0.0, atol=error)


def warned_of_no_sync(algorithm: Algorithm, forward_inside: bool, backward_inside: bool) -> list[str]:
    """What two accumulations say, each of one backward as described and one as usual."""
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model: Any = net.with_bagua([optimizer], algorithm)  # type: ignore[operator]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with model.no_sync() if forward_inside else nullcontext():
                if forward_inside and backward_inside:
                    loss(model(batch(model))).backward()
                else:
                    output = model(batch(model))
            if not (forward_inside and backward_inside):
                with model.no_sync() if backward_inside else nullcontext():
                    loss(output).backward()
            loss(model(batch(model))).backward()
            optimizer.step()
    return [str(each.message) for each in caught if "no_sync" in str(each.message)]


@pytest.mark.parametrize(
    ("forward_inside", "backward_inside", "told"),
    [
        (True, True, None),
        (False, False, None),
        (False, True, "whose forward was outside: its gradients are those of a step"),
        (True, False, "whose forward was inside: its gradients stay local"),
    ],
)
@pytest.mark.parametrize("algorithm", ALGORITHMS[::2], ids=lambda algorithm: algorithm.name)
def test_a_backward_on_the_other_side_of_no_sync_than_its_forward_is_warned_of_once(
    algorithm: Algorithm, forward_inside: bool, backward_inside: bool, told: str | None
) -> None:
    for texts in run_ranks(warned_of_no_sync, 2, algorithm, forward_inside, backward_inside):
        assert len(texts) == (0 if told is None else 1)
        assert told is None or told in texts[0]
