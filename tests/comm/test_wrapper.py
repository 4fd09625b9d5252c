"""What torch's DDP does, ours does: accumulation, unusual graphs, buffers, names."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from baguarun.comm.ddp import DistributedDataParallel
from baguarun.comm.weighting import MicroBatch
from baguarun.errors import UsageError
from tests.comm.models import (
    assert_averaged,
    assert_same_on_all_ranks,
    batch,
    gathered_gradients,
    loss,
    mlp,
)
from tests.comm.ranks import run_ranks

Check = Callable[[], None]
RTOL = {"gradient_allreduce": 1e-5, "bytegrad": 0.02}


def check_step(
    model: DistributedDataParallel, backward: Callable[[nn.Module], None], rtol: float = 1e-5
) -> None:
    """One step's gradients are the average of what plain torch computes."""
    reference = gathered_gradients(model.module, backward)
    model.zero_grad()
    backward(model)
    assert_averaged(model.module, reference, rtol, one_scale=rtol > 0.01)


def accumulates_under_no_sync() -> None:
    for algorithm in RTOL:
        model = DistributedDataParallel(mlp(), algorithm=algorithm, bucket_cap_mb=0.005)
        for step in range(3):
            inputs = [batch(model.module) for _ in range(3)]

            def all_of_it(local: nn.Module, inputs: list[torch.Tensor] = inputs) -> None:
                for x in inputs:
                    loss(local(x)).backward()

            reference = gathered_gradients(model.module, all_of_it)
            model.zero_grad(set_to_none=step != 1)
            with model.no_sync():
                for x in inputs[:-1]:
                    loss(model(x)).backward()
            assert model.stats().steps == step
            loss(model(inputs[-1])).backward()
            assert_averaged(model.module, reference, RTOL[algorithm], one_scale=True)


def averages_each_backward_before_a_step() -> None:
    model = DistributedDataParallel(mlp())
    first, second = batch(model.module), batch(model.module)
    summed = gathered_gradients(
        model.module, lambda local: (loss(local(first)) + loss(local(second))).backward()
    )
    loss(model(first)).backward()
    loss(model(second)).backward()
    assert_averaged(model.module, summed)
    model.zero_grad()
    one, two = model(first), model(second)
    (loss(one) + loss(two)).backward()
    assert_averaged(model.module, summed)
    model.zero_grad()
    one, two = model(first), model(second)
    loss(one).backward()
    loss(two).backward()
    assert_averaged(model.module, summed)


def keeps_gradients_in_place() -> None:
    model = DistributedDataParallel(mlp())
    for step in range(4):
        model.zero_grad(set_to_none=False)
        check_in_place(model, step)


def check_in_place(model: DistributedDataParallel, step: int) -> None:
    x = batch(model.module)
    reference = gathered_gradients(model.module, lambda local: loss(local(x)).backward())
    before = [p.grad.data_ptr() if p.grad is not None else 0 for p in model.parameters()]
    loss(model(x)).backward()
    assert_averaged(model.module, reference)
    if step >= 2:
        # The order of buckets was settled after the first step: from then on gradients stay where they are.
        assert before == [p.grad.data_ptr() for p in model.parameters()]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.table(x)))


def trains_tied_weights() -> None:
    model = DistributedDataParallel(Tied())
    for _ in range(3):
        x = torch.randint(0, 11, (4, 3))
        check_step(model, lambda local, x=x: loss(local(x)).backward())


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.second, self.last = mlp(), nn.Linear(40, 40), nn.Linear(40, 3)
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.first, x, use_reentrant=self.use_reentrant)
        x = checkpoint(self.second, x, use_reentrant=self.use_reentrant)
        return self.last(x)


def recomputes_in_checkpoints() -> None:
    for use_reentrant in (False, True):
        torch.manual_seed(0)
        model = DistributedDataParallel(Checkpointed(use_reentrant), bucket_cap_mb=0.005)
        for _ in range(3):
            x = torch.randn(4, 37, requires_grad=True)
            check_step(model, lambda local, x=x: loss(local(x)).backward())


def runs_compiled_modules() -> None:
    inner = DistributedDataParallel(torch.compile(mlp(), backend="aot_eager"))
    outer_module = DistributedDataParallel(mlp())
    outer = torch.compile(outer_module, backend="aot_eager")
    for _ in range(3):
        x = batch(outer_module.module)
        reference = gathered_gradients(outer_module.module, lambda local, x=x: loss(local(x)).backward())
        for model in (inner, outer):
            model.zero_grad()
            loss(model(x)).backward()
        assert_averaged(outer_module.module, reference)
        for mine, other in zip(inner.parameters(), outer_module.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad)
    assert outer_module.stats().steps == 3


def keeps_channels_last() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).to(
        memory_format=torch.channels_last
    )
    model = DistributedDataParallel(net)
    for _ in range(3):
        x = torch.randn(2, 3, 9, 9).to(memory_format=torch.channels_last)
        check_step(model, lambda local, x=x: loss(local(x)).backward())
        assert net[2].weight.grad.is_contiguous(memory_format=torch.channels_last)


def ignores_frozen_parameters() -> None:
    net = mlp()
    net[0].requires_grad_(False)
    model = DistributedDataParallel(net, bucket_cap_mb=0.005)
    for _ in range(2):
        x = batch(net)
        check_step(model, lambda local, x=x: loss(local(x)).backward())
    assert net[0].weight.grad is None


def broadcasts_buffers() -> None:
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 2)))
    for _ in range(3):
        loss(model(torch.randn(6, 5) + rank)).backward()
    mine = model.module[0].running_mean.clone()
    from_zero = mine.clone()
    dist.broadcast(from_zero, src=0)
    assert rank == 0 or not torch.equal(mine, from_zero)
    seen: list[torch.Tensor] = []
    model.module[0].register_forward_pre_hook(lambda module, _: seen.append(module.running_mean.clone()))
    model(torch.randn(6, 5))
    assert torch.equal(seen[0], from_zero)

    apart = DistributedDataParallel(
        nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 2)), broadcast_buffers=False
    )
    loss(apart(torch.randn(6, 5) + rank)).backward()
    loss(apart(torch.randn(6, 5) + rank)).backward()
    from_zero = apart.module[0].running_mean.clone()
    dist.broadcast(from_zero, src=0)
    assert rank == 0 or not torch.equal(apart.module[0].running_mean, from_zero)


class OwnMean(nn.Module):
    """Assigns its buffer anew in each forward, and keeps it for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 1)
        self.register_buffer("mean", torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.mean.clone()
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        out: torch.Tensor = self.linear(x * self.mean)
        return out


def broadcasts_buffers_that_are_assigned_anew() -> None:
    model = DistributedDataParallel(OwnMean())
    for _ in range(3):
        model(torch.randn(6, 5) + dist.get_rank()).sum().backward()
        assert_same_on_all_ranks([model.module.seen])


def evaluates_as_often_as_each_rank_likes() -> None:
    """Buffers go once for each step, before whichever forward comes first."""
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 2)))
    seen: list[torch.Tensor] = []
    model.module[0].register_forward_pre_hook(lambda module, _: seen.append(module.running_mean.clone()))
    firsts = []
    for times in ([3, 0], [0, 2], [2, 5], [1, 1]):
        model.train()
        loss(model(torch.randn(6, 5) + rank)).backward()
        firsts += seen[:1]
        seen.clear()
        model.eval()
        with torch.no_grad():
            for _ in range(times[rank]):
                model(torch.randn(6, 5))
    # As the step before left it on rank 0, whether an evaluation or the next step's forward was the first.
    assert len(firsts) == 4
    assert_same_on_all_ranks([*firsts, *seen[:1]])


def evaluates_between_uneven_steps() -> None:
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 2)))
    for step in range(4):
        model.train()
        parts = 1 + (rank + step) % 2
        for part in range(parts):
            with model.micro_batch(
                MicroBatch(weight_of_step=2 / 3, is_first=part == 0, is_last=part == parts - 1)
            ):
                loss(model(torch.randn(6, 5) + rank)).backward()
        model.eval()
        with torch.no_grad():
            for _ in range(2 * ((rank + step // 2) % 2)):
                model(torch.randn(6, 5))
    # Of the last step, before a forward that all have.
    with torch.no_grad():
        model(torch.randn(6, 5))
    assert_same_on_all_ranks(list(model.module.buffers()))


def two_forwards_of_a_model_with_buffers() -> None:
    """What the first one has kept for backward is not changed by the second one's broadcast."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    one, two = torch.randn(6, 8), torch.randn(6, 8)

    def both(local: nn.Module) -> None:
        (local(one).mean() - local(two).square().mean()).backward()

    check_step(model, both)


def starts_from_rank_zero() -> None:
    torch.manual_seed(dist.get_rank())
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    net.register_buffer("mask", torch.rand(4) > 0.5)
    net.register_buffer("phase", torch.randn(3, dtype=torch.complex64))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1 * (1 + dist.get_rank()))
    net(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    DistributedDataParallel(net, optimizers=[optimizer])
    assert_same_on_all_ranks([*net.parameters(), *net.buffers()])
    assert_same_on_all_ranks([state["exp_avg"] for state in optimizer.state.values()])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)

    apart = nn.Linear(2, 2)
    with torch.no_grad():
        apart.weight.fill_(dist.get_rank())
    DistributedDataParallel(apart, init_sync=False)
    assert apart.weight[0, 0].item() == dist.get_rank()


def names_match_torch() -> None:
    ours = DistributedDataParallel(mlp())
    theirs = nn.parallel.DistributedDataParallel(mlp())
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]


def runs_two_engines() -> None:
    one = DistributedDataParallel(mlp(), algorithm="gradient_allreduce")
    two = DistributedDataParallel(mlp(), algorithm="bytegrad")
    x = batch(one.module)
    for _ in range(3):
        reference = gathered_gradients(one.module, lambda local: loss(local(x)).backward())
        for model in (one, two):
            model.zero_grad()
        (loss(one(x)) + loss(two(x))).backward()
        assert_averaged(one.module, reference)
        assert_averaged(two.module, reference, 0.02, one_scale=True)


class Boom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor, armed: bool) -> torch.Tensor:
        ctx.armed = armed  # type: ignore[attr-defined]
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.armed:  # type: ignore[attr-defined]
            raise ArithmeticError("boom")
        return gradient, None


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        # Buffers are sent before the forward that comes after: what was launched is over by then.
        self.register_buffer("steps", torch.zeros(()))
        self.armed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(Boom.apply(self.first(x), self.armed))


def survives_a_backward_that_raises() -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(Fragile(), bucket_cap_mb=0.0001)
    for step in range(6):
        x = torch.randn(3, 8)
        if step in (0, 3):
            model.module.armed = True
            with pytest.raises(ArithmeticError):
                loss(model(x)).backward()
            model.module.armed = False
        check_step(model, lambda local, x=x: loss(local(x)).backward())


def goes_on_after_an_error_behind_its_backward() -> None:
    """On one rank, which had sent all its gradients by then: for the other one the round has ended well."""
    net = mlp()
    # Sent before whatever forward comes next, but not while what the backward has launched is under way.
    net.register_buffer("anything", torch.zeros(3))
    model = DistributedDataParallel(net, bucket_cap_mb=0.0001)

    def refuse(_gradient: torch.Tensor) -> None:
        raise ArithmeticError("boom")

    # What comes before the model is done when all that is behind it is.
    x = batch(model.module).requires_grad_() * 1
    if dist.get_rank() == 0:
        x.register_hook(refuse)
        with pytest.raises(ArithmeticError):
            loss(model(x)).backward()
    else:
        loss(model(x)).backward()
    with torch.no_grad():
        model(x)
    # On rank 0 the buffers go with this one, on rank 1 they went with the evaluation, which waits for them.
    loss(model(x.detach())).backward()
    for _ in range(2):
        y = batch(model.module)
        check_step(model, lambda local, y=y: loss(local(y)).backward())


def adopts_the_order_of_gradients() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for index in (2, 0, 3, 1):
                x = self.layers[index](x)
            return x

    model = DistributedDataParallel(Backwards(), bucket_cap_mb=0.0001)
    engine = model._session._engine
    assert engine.plan() == [[3], [2], [1], [0]]
    for _ in range(3):
        x = torch.randn(2, 8)
        check_step(model, lambda local, x=x: loss(local(x)).backward())
    assert engine.plan() == [[1], [3], [0], [2]]


def optimizes_with_autocast_and_clipping() -> None:
    model = DistributedDataParallel(mlp(), algorithm="bytegrad")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = loss(model(batch(model.module)))
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert_same_on_all_ranks(list(model.parameters()))


def evaluates_without_gradients() -> None:
    model = DistributedDataParallel(mlp())
    x = batch(model.module)
    for _ in range(2):
        with torch.no_grad():
            model(x)
        model(x)  # A forward with gradients but no backward.
        check_step(model, lambda local: loss(local(x)).backward())
    assert model.stats().steps == 2


def takes_torchs_arguments_by_place() -> None:
    model = DistributedDataParallel(mlp(), None, None, 0, True, True, None, 25, False, False, True)
    assert not model._session.settings.static_graph
    apart = DistributedDataParallel(mlp(), forward_sync_buffers=False, device_mesh=None)
    assert not apart._session.settings.broadcast_buffers


def copies_stay_apart() -> None:
    model = DistributedDataParallel(mlp())
    with pytest.raises(UsageError, match=r"a copy of what it wraps \(`model.module`\)"):
        copy.deepcopy(model)
    twin = copy.deepcopy(model.module)
    loss(twin(batch(twin))).backward()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    "check",
    [
        accumulates_under_no_sync,
        averages_each_backward_before_a_step,
        keeps_gradients_in_place,
        trains_tied_weights,
        recomputes_in_checkpoints,
        keeps_channels_last,
        ignores_frozen_parameters,
        broadcasts_buffers,
        broadcasts_buffers_that_are_assigned_anew,
        evaluates_as_often_as_each_rank_likes,
        evaluates_between_uneven_steps,
        two_forwards_of_a_model_with_buffers,
        starts_from_rank_zero,
        names_match_torch,
        runs_two_engines,
        survives_a_backward_that_raises,
        goes_on_after_an_error_behind_its_backward,
        adopts_the_order_of_gradients,
        optimizes_with_autocast_and_clipping,
        evaluates_without_gradients,
        takes_torchs_arguments_by_place,
        copies_stay_apart,
    ],
    ids=lambda check: check.__name__,
)
def test_the_wrapper(check: Check) -> None:
    run_ranks(check, 2)


@pytest.mark.timeout(240)
def test_the_wrapper_runs_compiled_modules() -> None:
    run_ranks(runs_compiled_modules, 2)
