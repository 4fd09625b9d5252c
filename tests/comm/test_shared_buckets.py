"""Gradients of ranks on one host lie in memory that they share, and are reduced there."""

from __future__ import annotations

import gc
import os
import resource
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from baguarun.comm import groups
from baguarun.comm.backend import BaguanetOptions
from baguarun.comm.ddp import DistributedDataParallel
from tests.comm.models import assert_averaged, assert_same_on_all_ranks, batch, gathered_gradients, loss, mlp
from tests.comm.ranks import run_ranks

CPU = torch.device("cpu")
MIB = 2**20


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether the tensor lies in a segment of a group."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            return "memfd:baguarun" in line
    raise AssertionError("the tensor lies nowhere")


def gradients(model: nn.Module) -> list[torch.Tensor]:
    found = [parameter.grad for parameter in model.parameters()]
    return [gradient for gradient in found if gradient is not None]


def step(model: nn.Module, x: torch.Tensor) -> None:
    model.zero_grad()
    loss(model(x)).backward()


def shared_memory_mib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssShmem:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("the kernel does not say how much shared memory is in use")


def in_shared_memory_or_not() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for share_memory in (True, False):
            model = DistributedDataParallel(mlp(dtype), share_memory=share_memory)
            for _ in range(3):
                step(model, batch(model.module))
                # float64 has no codec: it is reduced as any tensor of the user's.
                wanted = share_memory and dtype is not torch.float64
                assert [is_shared(gradient) for gradient in gradients(model)] == [wanted] * 6


@pytest.mark.parametrize("backend", ["baguanet", "gloo"])
def test_gradients_lie_in_shared_memory_whatever_the_backend_of_the_job(backend: str) -> None:
    run_ranks(in_shared_memory_or_not, 2, backend=backend)


def same_bits() -> None:
    for width, cap_mb in ((37, 0.005), (301, None), (301, 0.1)):
        shared = DistributedDataParallel(mlp(width=width), bucket_cap_mb=cap_mb)
        copied = DistributedDataParallel(mlp(width=width), bucket_cap_mb=cap_mb, share_memory=False)
        for _ in range(3):
            x = batch(shared.module)
            step(shared, x)
            step(copied, x)
            for mine, other in zip(gradients(shared), gradients(copied), strict=True):
                assert torch.equal(mine, other)
            assert_same_on_all_ranks(gradients(shared))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_sharing_memory_changes_no_bit_of_the_average(world_size: int) -> None:
    run_ranks(same_bits, world_size)


class Shuffled(nn.Module):
    """Uses its layers in another order than it was given them: the first step makes a new plan."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.first, self.third = nn.Linear(53, 31), nn.Linear(37, 53), nn.Linear(31, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x).tanh()).tanh())


def accumulates_over_a_new_plan(aliased: bool) -> None:
    torch.manual_seed(7)
    model = DistributedDataParallel(Shuffled(), bucket_cap_mb=0.003)
    before = [list(bucket) for bucket in model._session._engine.plan()]
    torch.manual_seed(dist.get_rank())
    batches = [torch.randn(5, 37) for _ in range(3)]

    def backward_of_all(local: nn.Module) -> None:
        for x in batches:
            loss(local(x)).backward()

    reference = gathered_gradients(model.module, backward_of_all)
    for x in batches:
        loss(model(x)).backward()
        for parameter in model.parameters() if aliased else ():
            assert parameter.grad is not None
            parameter.grad = parameter.grad.detach()
    assert model._session._engine.plan() != before
    assert_averaged(model.module, reference)
    assert all(is_shared(gradient) for gradient in gradients(model))


@pytest.mark.parametrize("aliased", [False, True])
def test_gradients_that_are_accumulated_survive_the_new_plan_after_the_first_step(aliased: bool) -> None:
    run_ranks(accumulates_over_a_new_plan, 2, aliased)


def kept_after_the_end() -> None:
    model = DistributedDataParallel(mlp())
    step(model, batch(model.module))
    copies = [gradient.clone() for gradient in gradients(model)]
    dist.barrier()
    dist.destroy_process_group()
    kept = gradients(model)
    del model
    gc.collect()
    for gradient, copy in zip(kept, copies, strict=True):
        assert is_shared(gradient)
        assert torch.equal(gradient, copy)
        gradient.add_(1)
    del kept, gradient
    assert "memfd:baguarun" not in Path("/proc/self/maps").read_text()


def test_gradients_outlive_the_group_and_the_engine_and_the_segment_goes_with_them() -> None:
    run_ranks(kept_after_the_end, 2)


def wraps_again_and_again() -> list[float]:
    module = nn.Linear(1024, 4 * 1024)
    used = []
    for _ in range(6):
        model = DistributedDataParallel(module)
        step(model, torch.ones(2, 1024))
        assert all(is_shared(gradient) for gradient in gradients(model))
        del model
        module.zero_grad()
        gc.collect()
        dist.barrier()
        used.append(shared_memory_mib())
        dist.barrier()
    return used


def test_an_engine_that_goes_gives_its_memory_back() -> None:
    for used in run_ranks(wraps_again_and_again, 2):
        # Each group that is left keeps some MiB for its own use; 2 ranks have 16 MiB of gradients each.
        assert used[-1] - used[0] < 5 * 16, used


def two_at_once() -> None:
    models = [DistributedDataParallel(mlp(width=width)) for width in (37, 90)]
    for _ in range(3):
        inputs = [batch(model.module) for model in models]
        references = [
            gathered_gradients(model.module, lambda local, x=x: loss(local(x)).backward())
            for model, x in zip(models, inputs, strict=True)
        ]
        for model in models:
            model.zero_grad()
        total = sum(loss(model(x)) for model, x in zip(models, inputs, strict=True))
        assert isinstance(total, torch.Tensor)
        total.backward()
        for model, reference in zip(models, references, strict=True):
            assert_averaged(model.module, reference)
            assert all(is_shared(gradient) for gradient in gradients(model))


def test_two_engines_of_one_process_have_memory_of_their_own() -> None:
    run_ranks(two_at_once, 3)


def no_room_on_one_rank() -> None:
    make = groups._new_engine_group

    def make_with_less_room(*args: object) -> dist.ProcessGroup:
        group = make(*args)  # type: ignore[arg-type]
        group._get_backend(CPU).allocate_tensor(1024, dtype=torch.float32, device=CPU)
        return group

    if dist.get_rank() == 1:
        groups._new_engine_group = make_with_less_room
    model = DistributedDataParallel(mlp())
    for _ in range(3):
        x = batch(model.module)
        reference = gathered_gradients(model.module, lambda local, x=x: loss(local(x)).backward())
        step(model, x)
        assert_averaged(model.module, reference)
        assert not any(is_shared(gradient) for gradient in gradients(model))


def test_no_rank_shares_memory_where_one_has_no_room() -> None:
    run_ranks(no_room_on_one_rank, 3)


def no_segment_on_one_rank() -> str:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = DistributedDataParallel(mlp())
    assert dist.get_backend(model._session._group) == "gloo"
    for _ in range(2):
        x = batch(model.module)
        reference = gathered_gradients(model.module, lambda local, x=x: loss(local(x)).backward())
        step(model, x)
        assert_averaged(model.module, reference)
    return " ".join(str(warning.message) for warning in caught)


def test_gloo_serves_ranks_of_one_host_that_cannot_share_memory_and_says_why() -> None:
    for said in run_ranks(no_segment_on_one_rank, 2, backend="gloo"):
        assert "gradients go through Gloo although all ranks are on one host" in said
        assert "File too large" in said


def new_group(arena_bytes: int) -> dist.ProcessGroup:
    made: dist.ProcessGroup = dist.new_group(
        backend="baguanet", pg_options=BaguanetOptions(arena_bytes=arena_bytes)
    )
    return made


def tensors_of_the_backend() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = new_group(10_000)
    backend = group._get_backend(CPU)
    assert backend.supports_tensor_alloc(CPU)
    whole = backend.allocate_tensor(2000, dtype=torch.float32, device=CPU)
    assert is_shared(whole) and torch.equal(whole, torch.zeros(2000))
    for _ in range(3):
        whole.fill_(rank + 1.0)
        dist.all_reduce(whole, group=group)
        assert torch.equal(whole, torch.full((2000,), size * (size + 1) / 2))
    # Parts of it, and what else can be done with a tensor.
    part = whole[17:1017]
    part.fill_(rank)
    dist.all_reduce(part, op=dist.ReduceOp.MAX, group=group)
    assert torch.equal(part, torch.full((1000,), size - 1.0))
    dist.broadcast(whole, src=0, group=group)
    no_room = "16000 bytes of shared memory wanted, 4288 left of the group's arena of 12288"
    with pytest.raises(dist.DistBackendError, match=no_room):
        backend.allocate_tensor(4000, dtype=torch.float32, device=CPU)
    with pytest.raises(ValueError, match="want zero or more on the CPU"):
        backend.allocate_tensor(4, dtype=torch.float32, device=torch.device("meta"))
    assert not new_group(0)._get_backend(CPU).supports_tensor_alloc(CPU)


def test_tensors_in_the_arena_of_a_group_are_reduced_there() -> None:
    run_ranks(tensors_of_the_backend, 3)


def different_arenas() -> None:
    with pytest.raises(RuntimeError, match="arena bytes"):
        new_group(4096 * (1 + dist.get_rank()))


def test_arenas_that_differ_between_ranks_are_an_error() -> None:
    run_ranks(different_arenas, 2)


def dropped_in_a_forked_child() -> list[float]:
    group = new_group(MIB)
    tensor = group._get_backend(CPU).allocate_tensor(MIB // 4, dtype=torch.float32, device=CPU)
    tensor.fill_(3)
    child = os.fork()
    if child == 0:
        del tensor
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    return [tensor.min().item(), tensor.max().item()]


def test_a_forked_child_that_drops_a_tensor_leaves_it_to_its_parent() -> None:
    assert run_ranks(dropped_in_a_forked_child, 2) == [[3.0, 3.0]] * 2
