"""Bagua's `contrib`, and modules that are there to say what to use instead."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

import baguarun.torch_api as bagua
from baguarun.errors import UsageError
from baguarun.torch_api.contrib import fuse_optimizer
from baguarun.torch_api.contrib.fuse.optimizer import is_fused_optimizer
from baguarun.torch_api.contrib.sync_batchnorm import SyncBatchNorm
from tests.comm.models import assert_same_on_all_ranks, batch, loss, mlp
from tests.comm.ranks import run_ranks


@pytest.mark.parametrize(
    ("module", "name", "instead"),
    [
        ("bucket", "BaguaBucket", "docs/writing_an_algorithm.md"),
        ("tensor", "BaguaTensor", "docs/writing_an_algorithm.md"),
        ("contrib", "CachedDataset", "files"),
        ("contrib", "CacheLoader", "files"),
        ("contrib", "LoadBalancingDistributedSampler", "baguarun.elastic.ElasticSampler"),
        ("contrib", "LoadBalancingDistributedBatchSampler", "torch.utils.data.DistributedSampler"),
    ],
)
def test_what_is_left_out_says_what_to_use_where_it_is_imported(module: str, name: str, instead: str) -> None:
    for error in (ImportError, UsageError):
        with pytest.raises(error, match=rf"^baguarun\.torch_api\.{module} has no {name}: .*{instead}"):
            exec(f"from baguarun.torch_api.{module} import {name}")
    found = importlib.import_module(f"baguarun.torch_api.{module}")
    assert not hasattr(found, "anything_else")


def test_pages_and_names_that_messages_point_to_exist() -> None:
    assert (Path(__file__).resolve().parents[2] / "docs" / "writing_an_algorithm.md").exists()
    assert importlib.import_module("baguarun.elastic").ElasticSampler
    assert torch.utils.data.DistributedSampler


def test_a_fused_optimizer_is_the_same_one_and_steps_alike() -> None:
    plain, fused = mlp(), mlp()
    fused.load_state_dict(plain.state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (plain, fused)]
    assert not is_fused_optimizer(optimizers[1])
    assert fuse_optimizer(optimizers[1], do_flatten=True) is optimizers[1]
    assert is_fused_optimizer(fuse_optimizer(optimizers[1])) and not is_fused_optimizer(optimizers[0])
    # A scheduler replaces step, and warns if it is not what is called.
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers[1], 1, gamma=1.0)
    data = batch(plain)
    loss(plain(data)).backward()
    optimizers[0].step()

    def closure() -> torch.Tensor:
        found = loss(fused(data))
        found.backward()
        return found

    assert optimizers[1].fuse_step(closure) > 0
    scheduler.step()
    for one, other in zip(plain.parameters(), fused.parameters(), strict=True):
        assert torch.equal(one, other)
    assert set(optimizers[1].state_dict()) == {"state", "param_groups"}


def steps_by_fuse_step() -> None:
    model = mlp()
    optimizer = fuse_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    algorithm = bagua.algorithms.Algorithm.init("decentralized", hierarchical=False)
    model = model.with_bagua([optimizer], algorithm)  # type: ignore[operator]
    for _ in range(3):
        optimizer.zero_grad()
        loss(model(batch(model))).backward()
        optimizer.fuse_step()
    # Their last steps were their own; a step is to average, then to go.
    optimizer.zero_grad()
    (0 * loss(model(batch(model)))).backward()
    optimizer.fuse_step()
    assert_same_on_all_ranks(list(model.parameters()))
    assert model.stats().weight_rounds == 4


def test_an_algorithm_around_steps_sees_those_of_a_fused_optimizer() -> None:
    run_ranks(steps_by_fuse_step, 2)


def test_sync_batch_norm_is_torch_s() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    assert isinstance(SyncBatchNorm.convert_sync_batchnorm(model)[1], torch.nn.SyncBatchNorm)
