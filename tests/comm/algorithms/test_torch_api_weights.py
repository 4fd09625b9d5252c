"""Bagua's decentralized and asynchronous algorithms, by Bagua's names and arguments."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

import baguarun.torch_api  # noqa: F401  (adds with_bagua)
from baguarun.errors import UsageError
from baguarun.torch_api.algorithms import async_model_average, decentralized
from tests.comm.algorithms.simulation import (
    Net,
    assert_same_training,
    backward,
    make_optimizer,
    run_for_tensors,
    simulate,
    weights_of,
)


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


def test_abort_of_another_model_is_refused() -> None:
    with pytest.raises(UsageError, match="with_bagua"):
        async_model_average.AsyncModelAverageAlgorithm().abort(nn.Linear(2, 2))


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


def train_with_abort_and_resume() -> list[int]:
    net = Net()
    optimizer = make_optimizer(net)
    algorithm = async_model_average.AsyncModelAverageAlgorithm(sync_interval_ms=0)
    model = net.with_bagua([optimizer], algorithm)  # type: ignore[operator]
    rounds = []
    for step in range(9):
        if step == 3:
            algorithm.abort(model)
        if step == 6:
            algorithm.resume(model)
        optimizer.zero_grad()
        backward(model, torch.distributed.get_rank(), step, 0)
        optimizer.step()
        rounds.append(model.stats().weight_rounds)
    algorithm.abort(model)
    return rounds


def test_no_round_starts_between_abort_and_resume() -> None:
    for rounds in run_for_tensors(train_with_abort_and_resume, 2):
        assert rounds[0] == 1
        assert rounds[2] == rounds[5]
        assert rounds[6] == rounds[5] + 1
