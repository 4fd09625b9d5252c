"""A rank without a sample in a step: it adds nothing, learns nothing, and ends where the others do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn

from baguarun.comm.algorithms import LocalSGD
from baguarun.comm.ddp import DistributedDataParallel
from baguarun.comm.weighting import MicroBatch
from tests.comm.models import assert_averaged, assert_same_on_all_ranks, gathered_gradients, loss, mlp
from tests.comm.ranks import run_ranks
from tests.comm.test_unused import Branches, Reused

Check = Callable[[], None]


def check_step(
    model: DistributedDataParallel, idle: Sequence[int], backward: Callable[[nn.Module], None]
) -> None:
    """Gradients are those of plain torch on ranks that are not `idle`, and None where nobody has one."""
    takes_part = dist.get_rank() not in idle
    reference = gathered_gradients(model.module, lambda local: backward(local) if takes_part else None)
    model.zero_grad()
    if takes_part:
        with model.micro_batch(MicroBatch()):
            backward(model)
    else:
        model.take_part()
    assert_averaged(model.module, reference)


def idle_with_a_static_graph() -> None:
    for idle_in_steps in ([[], [0], [1], []], [[0], [], [1], [0]], [[1], [1], [], []], [[1], [0], [], [1]]):
        model = DistributedDataParallel(Reused(), static_graph=True, bucket_cap_mb=0.0001)
        for idle in idle_in_steps:
            x = torch.randn(2, 6, requires_grad=True)
            check_step(model, idle, lambda local, x=x: loss(local(x)).backward())
            assert model.module.spare.weight.grad is None
        assert model.stats().steps == len(idle_in_steps)


def idle_with_a_static_graph_of_its_own() -> None:
    """What one rank alone uses is used everywhere once it has been seen there, also while that rank idles."""
    rank = dist.get_rank()
    model = DistributedDataParallel(Branches(), static_graph=True, bucket_cap_mb=0.0001)
    for idle in ([1], [0], [], [1], []):
        x = torch.randn(3, 6)
        model.zero_grad()
        if rank in idle:
            model.take_part()
        else:
            loss(model(x, [rank])["out"]).backward()
        found = [parameter.grad for parameter in model.parameters()]
        everyone: list[list[bool]] = [[], []]
        dist.all_gather_object(everyone, [gradient is None for gradient in found])
        assert everyone[0] == everyone[1]
        assert_same_on_all_ranks([gradient for gradient in found if gradient is not None])
    assert model.module.branch[0].weight.grad is not None
    assert model.module.branch[1].weight.grad is not None
    assert model.module.branch[2].weight.grad is None


def idle_with_unused_parameters() -> None:
    model = DistributedDataParallel(Branches(), find_unused_parameters=True, bucket_cap_mb=0.0001)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    untouched = model.module.branch[3].weight.detach().clone()
    for idle in ([1], [0], [], [0]):
        x = torch.randn(3, 6)
        check_step(model, idle, lambda local, x=x: loss(local(x, [0, 2])["out"]).backward())
        optimizer.step()
    assert torch.equal(model.module.branch[3].weight, untouched)
    assert_same_on_all_ranks(list(model.parameters()))


def idle_in_some_steps() -> None:
    for algorithm in ("gradient_allreduce", LocalSGD(warmup_steps=3, local_steps=2)):
        net = mlp()
        net.register_buffer("rank", torch.tensor(float(dist.get_rank())))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        model = DistributedDataParallel(net, algorithm=algorithm, optimizers=[optimizer], bucket_cap_mb=0.005)
        for idle in ([1], [], [0]):
            x = torch.randn(5, 37)
            check_step(model, idle, lambda local, x=x: loss(local(x)).backward())
            optimizer.step()
        assert_same_on_all_ranks([*net.parameters(), *net.buffers()])


def idle_where_gradients_add_up() -> None:
    model = DistributedDataParallel(mlp())
    first, second = torch.randn(5, 37), torch.randn(5, 37)
    rank = dist.get_rank()

    def both(local: nn.Module) -> None:
        loss(local(first)).backward()
        if rank == 0:
            loss(local(second)).backward()

    reference = gathered_gradients(model.module, both)
    model.zero_grad(set_to_none=False)
    loss(model(first)).backward()
    if rank == 0:
        loss(model(second)).backward()
    else:
        model.take_part()
    assert_averaged(model.module, reference)


@pytest.mark.parametrize(
    "check",
    [
        idle_with_a_static_graph,
        idle_with_a_static_graph_of_its_own,
        idle_with_unused_parameters,
        idle_in_some_steps,
        idle_where_gradients_add_up,
    ],
    ids=lambda check: check.__name__,
)
def test_idle_ranks(check: Check) -> None:
    run_ranks(check, 2)
