"""Bagua's decentralized and asynchronous algorithms, by Bagua's names and arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import baguarun.torch_api  # noqa: F401  (adds with_bagua)
from baguarun.errors import UsageError
from baguarun.torch_api.algorithms import async_model_average, decentralized
from baguarun.torch_api.data_parallel import DistributedDataParallel
from tests.comm.algorithms.simulation import (
    Net,
    assert_same_training,
    backward,
    make_optimizer,
    run_for_tensors,
    simulate,
    weights_of,
)
from tests.comm.ranks import run_ranks


def defaults(function: object) -> dict[str, object]:
    parameters = inspect.signature(function).parameters  # type: ignore[arg-type]
    return {name: parameter.default for name, parameter in parameters.items()}


def test_arguments_have_baguas_names_order_and_defaults() -> None:
    assert list(defaults(decentralized.DecentralizedAlgorithm).items()) == [
        ("hierarchical", True),
        ("peer_selection_mode", "all"),
        ("communication_interval", 1),
    ]
    assert list(defaults(async_model_average.AsyncModelAverageAlgorithm).items()) == [
        ("peer_selection_mode", "all"),
        ("sync_interval_ms", 500),
        ("warmup_steps", 0),
    ]


def test_async_with_chosen_peers_is_refused() -> None:
    with pytest.raises(UsageError, match="peer_selection_mode='shift_one'; want 'all'"):
        async_model_average.AsyncModelAverageAlgorithm("shift_one")


@pytest.mark.parametrize("call", ["abort", "resume"])
def test_abort_and_resume_of_another_model_are_refused(call: str) -> None:
    with pytest.raises(UsageError, match=r"found Linear; want what with_bagua\(\) or Distributed"):
        getattr(async_model_average.AsyncModelAverageAlgorithm(), call)(nn.Linear(2, 2))


def train_decentralized() -> torch.Tensor:
    net = Net()
    optimizer = make_optimizer(net)
    algorithm = decentralized.DecentralizedAlgorithm(peer_selection_mode="all")
    model = net.with_bagua([optimizer], algorithm)  # type: ignore[operator]
    rows = []
    for step in range(4):
        optimizer.zero_grad()
        backward(model, torch.distributed.get_rank(), step, 0)
        optimizer.step()
        rows.append(weights_of(net))
    return torch.stack(rows)


def test_with_bagua_takes_the_decentralized_algorithm() -> None:
    found = run_for_tensors(train_decentralized, 2)
    expected = simulate(2, 4, before_step=lambda _, weights: weights.mean(0, keepdim=True).expand_as(weights))
    assert_same_training(found, expected)


MakeModel = Callable[[nn.Module, torch.optim.Optimizer, async_model_average.AsyncModelAverageAlgorithm], Any]


def with_bagua(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    algorithm: async_model_average.AsyncModelAverageAlgorithm,
) -> Any:
    return net.with_bagua([optimizer], algorithm)  # type: ignore[operator]


def wrapped(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    algorithm: async_model_average.AsyncModelAverageAlgorithm,
) -> Any:
    return DistributedDataParallel(net, optimizers=[optimizer], algorithm=algorithm)


def train_with_abort_and_resume(make_model: MakeModel, times: int) -> tuple[list[int], list[float]]:
    """Rounds started after each step, and the loss of the same sample on both sides of a pause."""
    net = Net()
    optimizer = make_optimizer(net)
    model = make_model(net, optimizer, async_model_average.AsyncModelAverageAlgorithm(sync_interval_ms=0))
    algorithm = model.bagua_algorithm
    rounds, evaluated = [], []
    for step in range(9):
        if step == 3:
            for _ in range(times):
                algorithm.abort(model)
            model.eval()
            with torch.no_grad():
                evaluated = [model(torch.ones(1, 7, dtype=torch.float64)).sum().item() for _ in range(2)]
            model.train()
        if step == 6:
            for _ in range(times):
                algorithm.resume(model)
        optimizer.zero_grad()
        backward(model, torch.distributed.get_rank(), step, 0)
        optimizer.step()
        rounds.append(model.stats().weight_rounds)
    for _ in range(times):
        algorithm.abort(model)
    return rounds, evaluated


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("make_model", [with_bagua, wrapped])
def test_no_round_starts_between_abort_and_resume(make_model: MakeModel, times: int) -> None:
    for rounds, evaluated in run_for_tensors(train_with_abort_and_resume, 2, make_model, times):
        assert rounds[0] == 1
        assert rounds[2] == rounds[5]
        assert rounds[6] == rounds[5] + 1
        assert evaluated[0] == evaluated[1]


def train_with_resume_only(resumes: bool) -> list[int]:
    """Bagua's programs resume before each epoch, the first one included."""
    net = Net()
    optimizer = make_optimizer(net)
    algorithm = async_model_average.AsyncModelAverageAlgorithm(sync_interval_ms=10_000_000)
    model = wrapped(net, optimizer, algorithm)
    rounds = []
    for step in range(6):
        if resumes:
            algorithm.resume(model)
        optimizer.zero_grad()
        backward(model, torch.distributed.get_rank(), step, 0)
        optimizer.step()
        rounds.append(model.stats().weight_rounds)
    return rounds


@pytest.mark.parametrize("resumes", [False, True])
def test_resume_without_abort_changes_nothing(resumes: bool) -> None:
    for rounds in run_for_tensors(train_with_resume_only, 2, resumes):
        assert rounds == [1] * 6


def abort_alone() -> None:
    for make_model in (with_bagua, wrapped):
        net = Net()
        model = make_model(net, make_optimizer(net), async_model_average.AsyncModelAverageAlgorithm())
        for call in (model.bagua_algorithm.abort, model.bagua_algorithm.resume):
            call(model)


def test_in_a_world_of_one_abort_and_resume_do_nothing() -> None:
    run_ranks(abort_alone, 1)
