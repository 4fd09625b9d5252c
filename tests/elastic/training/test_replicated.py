"""Which models and optimizers can be resized in place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard, distribute_tensor

import baguarun
import baguarun.torch_api
from baguarun.elastic.training import replicated
from baguarun.errors import UsageError
from tests.comm.ranks import run_ranks

CPU = torch.device("cpu")


def capture_a_model_of_bagua() -> None:
    model = nn.Linear(2, 2)
    replicated.require_replicas({"net": model})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.with_bagua([optimizer], "gradient_allreduce")  # type: ignore[operator]
    with pytest.raises(UsageError, match=r"^State: 'net' is data-parallel by with_bagua\(\)"):
        replicated.require_replicas({"net": model})


def test_a_model_of_with_bagua_is_refused_and_says_what_is_wanted() -> None:
    run_ranks(capture_a_model_of_bagua, 1)


def wrap_with_torch() -> nn.Module:
    return nn.parallel.DistributedDataParallel(nn.Linear(2, 2))


def wrap_a_part_with_torch() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), wrap_with_torch())


@pytest.mark.parametrize(
    ("make", "found"), [(wrap_with_torch, "is a torch.nn"), (wrap_a_part_with_torch, "has '1', a torch.nn")]
)
def test_a_model_of_torch_ddp_is_refused_and_says_what_is_wanted(
    make: Callable[[], nn.Module], found: str
) -> None:
    for said in run_ranks(refusal_of, 2, make):
        assert said.startswith(f"State: 'net' {found}.parallel.DistributedDataParallel, whose process group")
        assert "want State(model=baguarun.DistributedDataParallel(module, ...))" in said


def shard_a_weight() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model[1].weight = nn.Parameter(distribute_tensor(model[1].weight.detach(), mesh, [Shard(0)]))
    return model


def shard_all_weights() -> nn.Module:
    return fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def wrap_a_part() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), FullyShardedDataParallel(nn.Linear(2, 2), device_id=CPU))


def wrap_all() -> nn.Module:
    return FullyShardedDataParallel(nn.Linear(2, 2), device_id=CPU)


def refusal_of(make: Callable[[], nn.Module]) -> str:
    with pytest.raises(UsageError) as refusal:
        replicated.require_replicas({"epoch": 0, "whole": nn.Linear(2, 2), "net": make()})
    return str(refusal.value)


@pytest.mark.parametrize(
    ("make", "spread"),
    [
        (shard_a_weight, "'1.weight'"),
        (shard_all_weights, "'weight'"),
        (wrap_a_part, "'1'"),
        (wrap_all, "its parameters"),
    ],
)
def test_a_model_that_is_spread_over_workers_is_refused_by_name(
    make: Callable[[], nn.Module], spread: str
) -> None:
    for said in run_ranks(refusal_of, 2, make):
        assert said.startswith(f"State: 'net' has {spread} spread over workers (DTensor, FSDP)")
        assert said.endswith("Want `--elastic restart` with checkpoints")


def spread_an_optimizer() -> str:
    model = nn.Linear(2, 2)
    spread = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
    with pytest.raises(UsageError) as refusal:
        replicated.require_replicas({"net": model, "optimizer": spread})
    return str(refusal.value)


def test_an_optimizer_that_is_spread_over_workers_is_refused_by_name() -> None:
    for said in run_ranks(spread_an_optimizer, 2):
        assert said.startswith(
            "State: 'optimizer' has its state spread over workers (ZeroRedundancyOptimizer)"
        )


def wrap(algorithm: str) -> baguarun.DistributedDataParallel:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return baguarun.DistributedDataParallel(model, optimizers=[optimizer], algorithm=algorithm)


def mix_algorithms() -> str:
    body, head, other = wrap("bytegrad"), wrap("gradient_allreduce"), wrap("local_sgd")
    replicated.require_one_kind({"body": body, "head": head, "step": 0})
    replicated.require_one_kind({"body": other, "head": wrap("diloco")})
    with pytest.raises(UsageError) as refusal:
        replicated.require_one_kind({"other": other, "body": body, "head": head})
    return str(refusal.value)


def test_models_with_equal_and_with_differing_replicas_in_one_state_are_refused_by_name() -> None:
    [said] = run_ranks(mix_algorithms, 1)
    assert said.startswith(
        "State: 'body' (bytegrad) keeps its replicas equal, 'other' (local_sgd) lets them differ"
    )


def leave_an_optimizer_out() -> str:
    model = nn.Linear(2, 2)
    body, head = torch.optim.Adam([model.weight]), torch.optim.SGD([model.bias])
    net = baguarun.DistributedDataParallel(model, optimizers=[body, head])
    replicated.require_optimizers({"net": net, "body": body, "head": head})
    # Equal is not the same one.
    other = torch.optim.SGD([model.bias])
    with pytest.raises(UsageError) as refusal:
        replicated.require_optimizers({"net": net, "body": body, "head": other})
    return str(refusal.value)


def test_an_optimizer_of_a_wrapped_model_that_state_does_not_hold_is_refused() -> None:
    [said] = run_ranks(leave_an_optimizer_out, 1)
    assert "'net' was wrapped with optimizers=[...] of which State does not hold the SGD" in said
    assert "want State(net=..., optimizer=optimizer)" in said
