"""FSDP2, distributed checkpoints and what else torch spreads over two ranks."""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tests.torch_suite.suite import Suite, place

SUITE = Suite(world_size=2)


def layers() -> nn.Sequential:
    torch.manual_seed(3)
    # Odd sizes: shards of unequal length.
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5), nn.Tanh(), nn.Linear(5, 3))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(6, 7, generator=torch.Generator().manual_seed(100 * step + rank))


def whole(model: nn.Module) -> list[torch.Tensor]:
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in model.parameters()]


def sharded(model: nn.Sequential, **options: Any) -> nn.Sequential:
    mesh = options.pop("mesh", None) or init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, ranks: range) -> None:
    """Steps on the mean of what `ranks` see."""
    for step in steps:
        optimizer.zero_grad()
        for rank in ranks:
            (model(batch(rank, step)).square().mean() / len(ranks)).backward()
        optimizer.step()


def trained_alone(steps: range = range(4)) -> nn.Sequential:
    model = layers()
    train(model, torch.optim.AdamW(model.parameters(), lr=0.01), steps, range(dist.get_world_size()))
    return model


def assert_like_alone(model: nn.Module, tolerance: float = 1e-5) -> None:
    for found, want in zip(whole(model), trained_alone().parameters(), strict=True):
        torch.testing.assert_close(found, want, rtol=tolerance, atol=tolerance)


@SUITE.behaviour
def a_sharded_model_learns_as_a_whole_one() -> None:
    rank, _ = place()
    for options in (
        {},
        {"reshard_after_forward": False},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    ):
        model = sharded(layers(), **options)
        train(model, torch.optim.AdamW(model.parameters(), lr=0.01), range(4), range(rank, rank + 1))
        assert_like_alone(model)


@SUITE.behaviour
def a_model_sharded_and_replicated_learns_as_a_whole_one() -> None:
    rank, _ = place()
    for shape in ((2, 1), (1, 2)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard"))
        model = sharded(layers(), mesh=mesh)
        train(model, torch.optim.AdamW(model.parameters(), lr=0.01), range(4), range(rank, rank + 1))
        assert_like_alone(model)


@SUITE.behaviour
def computing_in_bf16_keeps_fp32_masters() -> None:
    rank, _ = place()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(layers(), mp_policy=policy)
    train(model, torch.optim.AdamW(model.parameters(), lr=0.01), range(4), range(rank, rank + 1))
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())
    assert_like_alone(model, tolerance=5e-2)


@SUITE.behaviour
def gradients_may_be_gathered_up_before_they_are_scattered() -> None:
    rank, _ = place()
    model, alone = sharded(layers()), layers()
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)  # type: ignore[operator]
        model(batch(rank, step)).square().mean().backward()
        for of in range(2):
            (alone(batch(of, step)).square().mean() / 2).backward()
    for found, want in zip(model.parameters(), alone.parameters(), strict=True):
        assert isinstance(found.grad, DTensor)
        torch.testing.assert_close(found.grad.full_tensor(), want.grad)


@SUITE.behaviour
def a_norm_over_all_shards_clips_gradients() -> None:
    rank, _ = place()
    model, alone = sharded(layers()), layers()
    (100 * model(batch(rank, 0)).square().mean()).backward()
    for of in range(2):
        (50 * alone(batch(of, 0)).square().mean()).backward()
    found = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    want = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
    assert isinstance(found, DTensor)
    torch.testing.assert_close(found.full_tensor(), want)


@SUITE.behaviour
def a_distributed_checkpoint_goes_on_where_it_was_saved() -> None:
    rank, _ = place()
    folder: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    model = sharded(layers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, range(2), range(rank, rank + 1))
    saved, of_optimizer = get_state_dict(model, optimizer)
    checkpoint.save({"model": saved, "optimizer": of_optimizer}, checkpoint_id=folder[0])
    torch.manual_seed(1 + rank)
    model = sharded(nn.Sequential(*(layer for layer in layers())))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    saved, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": saved, "optimizer": of_optimizer}
    checkpoint.load(state, checkpoint_id=folder[0])
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    train(model, optimizer, range(2, 4), range(rank, rank + 1))
    assert_like_alone(model)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])


@SUITE.behaviour
def a_checkpoint_is_written_in_the_background() -> None:
    rank, _ = place()
    folder: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    model = sharded(layers())
    # Its thread gathers and broadcasts in a group of its own, beside the training.
    group = dist.new_group()
    saving: Any = checkpoint.async_save(
        {"model": get_model_state_dict(model)}, checkpoint_id=folder[0], process_group=group
    )
    train(model, torch.optim.AdamW(model.parameters(), lr=0.01), range(4), range(rank, rank + 1))
    saving.result()
    assert_like_alone(model)
    state = {"model": get_model_state_dict(model)}
    checkpoint.load(state, checkpoint_id=folder[0])
    for found, want in zip(whole(model), layers().parameters(), strict=True):
        assert torch.equal(found, want)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])


@SUITE.behaviour
def stages_of_a_pipeline_pass_activations_and_gradients() -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    rank, size = place()
    data, target = batch(0, 0), torch.zeros(6, 5)
    for kind in (ScheduleGPipe, Schedule1F1B):
        whole_model = layers()[:3]
        loss = nn.MSELoss()
        loss(whole_model(data), target).backward()
        parts = [layers()[:2], layers()[2:3]]
        stage = PipelineStage(parts[rank], rank, size, torch.device("cpu"))
        schedule: Any = kind(stage, n_microbatches=3, loss_fn=loss)
        if rank == 0:
            schedule.step(data)
        else:
            schedule.step(target=target)
        mine = [*parts[rank].parameters()]
        wanted = [*whole_model.parameters()][2 * rank : 2 * rank + 2]
        for found, want in zip(mine, wanted, strict=True):
            torch.testing.assert_close(found.grad, want.grad)


@SUITE.each()
def test_two_ranks(name: str, backend: str) -> None:
    SUITE.check(backend, name)
