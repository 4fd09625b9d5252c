"""Bagua's QAdam, by Bagua's names and arguments."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

import baguarun.torch_api  # noqa: F401  (adds with_bagua)
from baguarun.comm.algorithms import QAdam
from baguarun.errors import UsageError
from baguarun.torch_api.algorithms import Algorithm, q_adam
from tests.comm.models import assert_same_on_all_ranks, batch, loss, mlp
from tests.comm.ranks import run_ranks


def test_arguments_have_baguas_names_order_and_defaults() -> None:
    algorithm = inspect.signature(q_adam.QAdamAlgorithm).parameters
    assert list(algorithm)[:2] == ["q_adam_optimizer", "hierarchical"]
    optimizer = inspect.signature(q_adam.QAdamOptimizer).parameters
    defaults = {name: parameter.default for name, parameter in optimizer.items()}
    del defaults["params"]
    assert list(defaults.items())[:5] == [
        ("lr", 1e-3),
        ("warmup_steps", 100),
        ("betas", (0.9, 0.999)),
        ("eps", 1e-8),
        ("weight_decay", 0.0),
    ]


def last_weights(**options: bool | None) -> torch.Tensor:
    module = mlp()
    optimizer = q_adam.QAdamOptimizer(module.parameters(), warmup_steps=2, **options)
    for step in range(4):
        optimizer.zero_grad()
        loss(module(torch.full((1, 37), step + 1.0))).backward()
        optimizer.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])


@pytest.mark.parametrize(
    "options", [{"foreach": True}, {"foreach": False}, {"fused": False}, {"fused": None}]
)
def test_torchs_options_that_change_no_result_are_taken(options: dict[str, bool | None]) -> None:
    assert torch.equal(last_weights(**options), last_weights())


def test_torchs_fused_kernel_is_refused_with_the_reason() -> None:
    with pytest.raises(UsageError, match=r"fused=True: .* averaged already, .*; want fused=None"):
        q_adam.QAdamOptimizer(nn.Linear(2, 2).parameters(), fused=True)


@pytest.mark.parametrize(
    "options",
    [
        {"lr": -1.0},
        {"eps": -1e-8},
        {"betas": (1.0, 0.999)},
        {"betas": (0.9, -0.1)},
        {"warmup_steps": 0},
        {"weight_decay": -0.1},
    ],
)
@pytest.mark.parametrize("error", [ValueError, UsageError])
def test_a_setting_out_of_its_range_is_a_value_error_too(
    options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error, match=f"QAdamOptimizer: {next(iter(options))}="):
        q_adam.QAdamOptimizer(nn.Linear(2, 2).parameters(), **options)


def train(names_optimizer: bool) -> tuple[int, int]:
    module = mlp()
    optimizer = q_adam.QAdamOptimizer(module.parameters(), lr=0.001, warmup_steps=2)
    algorithm = Algorithm.init("qadam", q_adam_optimizer=optimizer)
    optimizers = [optimizer] if names_optimizer else []
    model = module.with_bagua(optimizers, algorithm)  # type: ignore[operator]
    sent = []
    for _ in range(4):
        optimizer.zero_grad()
        loss(model(batch(model))).backward()
        optimizer.step()
        sent.append(model.stats().bytes_sent)
    assert_same_on_all_ranks(list(module.parameters()))
    return sent[1] - sent[0], sent[3] - sent[2]


@pytest.mark.parametrize("names_optimizer", [True, False])
def test_momentum_travels_with_8_bits_after_the_warm_up(names_optimizer: bool) -> None:
    for full, compressed in run_ranks(train, 2, names_optimizer):
        assert 3.8 < full / compressed < 4


def another_optimizer() -> None:
    module = nn.Linear(2, 2)
    optimizer, other = (q_adam.QAdamOptimizer(module.parameters()) for _ in range(2))
    with pytest.raises(UsageError, match=r"want with_bagua\(\[optimizer\], QAdamAlgorithm\(optimizer\)\)"):
        module.with_bagua([other], q_adam.QAdamAlgorithm(optimizer))  # type: ignore[operator]


def test_the_algorithms_optimizer_must_be_the_models() -> None:
    run_ranks(another_optimizer, 1)


def test_another_kind_of_optimizer_is_refused() -> None:
    adam = torch.optim.Adam(nn.Linear(2, 2).parameters())
    with pytest.raises(UsageError, match="found Adam; want a QAdamOptimizer"):
        q_adam.QAdamAlgorithm(adam)  # type: ignore[arg-type]


def test_it_is_a_qadam() -> None:
    optimizer = q_adam.QAdamOptimizer(nn.Linear(2, 2).parameters())
    assert isinstance(q_adam.QAdamAlgorithm(optimizer), QAdam)
