"""torch's DistributedDataParallel on two ranks, in the ways that torch's tests use it on the CPU."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.torch_suite.suite import Suite, ended, place

SUITE = Suite(world_size=2)


class Fork(nn.Module):
    """Two ways through; a caller may take one only."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 4)
        self.second = nn.Linear(8, 4)

    def forward(self, data: torch.Tensor, ways: tuple[int, ...] = (0, 1)) -> torch.Tensor:
        return sum(((self.first, self.second)[way](data) for way in ways), torch.zeros(()))


def layers() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def fork() -> Fork:
    torch.manual_seed(3)
    return Fork()


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def averaged(model: nn.Module, run: Callable[[nn.Module, int], torch.Tensor]) -> list[torch.Tensor | None]:
    """The gradients that the ranks' mean has, computed on one."""
    model = copy.deepcopy(model)
    size = dist.get_world_size()
    for rank in range(size):
        (run(model, rank) / size).backward()
    return [parameter.grad for parameter in model.parameters()]


def assert_gradients(model: nn.Module, wanted: list[torch.Tensor | None]) -> None:
    for parameter, want in zip(model.parameters(), wanted, strict=True):
        if want is None:
            assert parameter.grad is None or parameter.grad.eq(0).all()
        else:
            torch.testing.assert_close(parameter.grad, want)


def loss(model: nn.Module, rank: int) -> torch.Tensor:
    result: torch.Tensor = model(batch(rank)).square().mean()
    return result


@SUITE.behaviour
def gradients_are_the_mean_of_the_ranks_in_every_kind_of_bucket() -> None:
    rank, _ = place()
    for view, static, megabytes in itertools.product((False, True), (False, True), (0.0005, 25)):
        model = layers()
        wanted = averaged(model, loss)
        wrapped = DDP(model, gradient_as_bucket_view=view, static_graph=static, bucket_cap_mb=megabytes)
        for _ in range(3):
            wrapped.zero_grad()
            loss(wrapped, rank).backward()
            assert_gradients(model, wanted)


@SUITE.behaviour
def ranks_begin_with_the_parameters_and_buffers_of_the_first() -> None:
    rank, _ = place()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].running_mean.fill_(rank + 1)  # type: ignore[union-attr, operator]
    DDP(model)
    torch.manual_seed(0)
    assert torch.equal(model[0].weight, nn.Linear(3, 3).weight)
    assert model[1].running_mean.eq(1).all()  # type: ignore[union-attr, operator]


@SUITE.behaviour
def ranks_keep_their_own_parameters_if_that_is_asked_for() -> None:
    rank, _ = place()
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, rank)
    DDP(model, init_sync=False)
    assert model.weight.eq(rank).all()


@SUITE.behaviour
def buffers_follow_the_first_rank_unless_switched_off() -> None:
    rank, _ = place()
    for follows in (True, False):
        model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4, momentum=1.0))
        wrapped = DDP(model, broadcast_buffers=follows)
        for _ in range(2):
            wrapped(batch(rank))
        wrapped(batch(0))
        mine = model[1].running_mean.clone()  # type: ignore[union-attr, operator]
        model[1].running_mean.fill_(rank)  # type: ignore[union-attr, operator]
        wrapped.eval() if not follows else None
        wrapped(batch(0))
        if not follows:
            assert model[1].running_mean.eq(rank).all()  # type: ignore[union-attr, operator]
        else:
            torch.testing.assert_close(model[1].running_mean, mine)  # type: ignore[union-attr]


@SUITE.behaviour
def parameters_that_no_rank_uses_have_no_gradient() -> None:
    rank, _ = place()

    def first_only(model: nn.Module, of: int) -> torch.Tensor:
        result: torch.Tensor = model(batch(of), (0,)).square().mean()
        return result

    for view in (False, True):
        model = fork()
        wanted = averaged(model, first_only)
        wrapped = DDP(model, find_unused_parameters=True, gradient_as_bucket_view=view)
        for _ in range(2):
            wrapped.zero_grad()
            first_only(wrapped, rank).backward()
            assert_gradients(model, wanted)
        assert model.second.weight.grad is None


@SUITE.behaviour
def parameters_that_some_ranks_use_have_a_gradient_everywhere() -> None:
    rank, _ = place()

    def own_way(model: nn.Module, of: int) -> torch.Tensor:
        result: torch.Tensor = model(batch(of), (of,)).square().mean()
        return result

    model = fork()
    wanted = averaged(model, own_way)
    wrapped = DDP(model, find_unused_parameters=True)
    for _ in range(2):
        wrapped.zero_grad()
        own_way(wrapped, rank).backward()
        assert_gradients(model, wanted)


@SUITE.behaviour
def unused_parameters_without_the_search_are_an_error_of_the_next_step() -> None:
    rank, _ = place()
    wrapped = DDP(fork())
    wrapped(batch(rank), (0,)).sum().backward()
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        wrapped(batch(rank), (0,))


@SUITE.behaviour
def a_static_graph_knows_its_unused_parameters_from_the_first_step() -> None:
    rank, _ = place()
    model = fork()
    wrapped = DDP(model, static_graph=True)
    for _ in range(3):
        wrapped.zero_grad()
        wrapped(batch(rank), (1,)).square().mean().backward()
        assert model.second.weight.grad is not None


@SUITE.behaviour
def steps_that_do_not_synchronize_add_up_at_home() -> None:
    rank, size = place()
    for view in (False, True):
        model = layers()
        parts = [
            averaged(model, lambda each, of, step=step: each(batch(of, step)).square().mean())
            for step in range(3)
        ]
        wanted = [sum(part[index] for part in parts) for index in range(len(parts[0]))]  # type: ignore[misc]
        wrapped = DDP(model, gradient_as_bucket_view=view)
        for step in range(3):
            with wrapped.no_sync() if step < 2 else nullcontext():
                wrapped(batch(rank, step)).square().mean().backward()
            if step < 2:
                mine = next(model.parameters()).grad
                rows = [torch.empty_like(mine) for _ in range(size)]  # type: ignore[arg-type]
                dist.all_gather(rows, mine.clone())  # type: ignore[union-attr]
                assert not torch.equal(rows[0], rows[1])
        assert_gradients(model, wanted)  # type: ignore[arg-type]


@SUITE.behaviour
def several_types_and_frozen_parameters_share_a_model() -> None:
    rank, _ = place()

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.single, self.wide = nn.Linear(8, 6), nn.Linear(6, 5).double()
            self.narrow, self.frozen = nn.Linear(5, 4).bfloat16(), nn.Linear(4, 4)
            self.frozen.requires_grad_(False)

        def forward(self, data: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.frozen(
                self.narrow(self.wide(self.single(data).double()).bfloat16()).float()
            )
            return result

    torch.manual_seed(5)
    model = Mixed()
    wanted = averaged(model, loss)
    wrapped = DDP(model)
    loss(wrapped, rank).backward()
    for parameter, want in zip(model.parameters(), wanted, strict=True):
        assert (parameter.grad is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(parameter.grad, want, rtol=2e-2, atol=2e-2)


@SUITE.behaviour
def autocast_trains_and_keeps_ranks_equal() -> None:
    rank, _ = place()
    wrapped = DDP(layers())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = loss(wrapped, rank)
    value.backward()
    gradient = next(wrapped.parameters()).grad
    assert gradient is not None
    rows = [torch.empty_like(gradient) for _ in range(2)]
    dist.all_gather(rows, gradient)
    assert torch.equal(*rows)


@SUITE.behaviour
def hooks_of_torch_compress_within_their_precision() -> None:
    rank, _ = place()
    for hook, error in (
        (default_hooks.allreduce_hook, 1e-6),
        (default_hooks.fp16_compress_hook, 1e-2),
    ):
        model = layers()
        wanted = averaged(model, loss)
        wrapped = DDP(model)
        wrapped.register_comm_hook(None, hook)
        for _ in range(2):
            wrapped.zero_grad()
            loss(wrapped, rank).backward()
        for parameter, want in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad, want, rtol=error, atol=error)


@SUITE.behaviour
def power_sgd_keeps_ranks_equal() -> None:
    rank, _ = place()
    # One bucket: its callbacks start operations themselves, those of two would do so in any order.
    wrapped = DDP(layers())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        wrapped(batch(rank, step)).square().mean().backward()
        optimizer.step()
    for parameter in wrapped.parameters():
        rows = [torch.empty_like(parameter) for _ in range(2)]
        dist.all_gather(rows, parameter.detach())
        assert torch.equal(*rows)


@SUITE.behaviour
def a_hook_of_ones_own_may_pass_the_future_on() -> None:
    rank, size = place()

    # Without types: torch compares them with classes, not with their names.
    def own(state, bucket):  # type: ignore[no-untyped-def]
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        assert work is not None
        return work.get_future().then(lambda done: done.value()[0] / (2 * size))

    model = layers()
    wanted = averaged(model, lambda each, of: loss(each, of) / 2)
    wrapped = DDP(model)
    wrapped.register_comm_hook(None, own)
    loss(wrapped, rank).backward()
    assert_gradients(model, wanted)
    with pytest.raises(RuntimeError, match="register_comm_hook"):
        wrapped.register_comm_hook(None, own)


@SUITE.behaviour
def a_hook_must_have_the_form_of_one() -> None:
    with pytest.raises(TypeError, match="must be callable"):
        DDP(layers()).register_comm_hook(None, 5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bucket annotation"):
        wrong: Any = _hook_of_an_int
        DDP(layers()).register_comm_hook(None, wrong)


def _hook_of_an_int(state: object, bucket: int) -> torch.futures.Future[torch.Tensor]:
    return torch.futures.Future()


@SUITE.behaviour
def sparse_gradients_end_on_gloo_in_a_sum_and_elsewhere_in_an_error() -> None:
    rank, _ = place()
    model = nn.Embedding(10, 3, sparse=True)
    wrapped = DDP(model)
    result = wrapped(torch.tensor([rank, 5])).sum()
    if dist.get_backend() == "gloo":
        result.backward()
        assert model.weight.grad is not None
        assert model.weight.grad.to_dense()[:, 0].tolist() == [0.5, 0.5, 0, 0, 0, 1.0, 0, 0, 0, 0]
    else:
        with pytest.raises((RuntimeError, ValueError), match=r"[Ss]parse"):
            result.backward()


@SUITE.behaviour
def uneven_inputs_end_together_under_join() -> None:
    rank, _ = place()
    wrapped = DDP(layers())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    steps = 0
    with wrapped.join():
        for step in range(3 + 4 * rank):
            optimizer.zero_grad()
            wrapped(batch(rank, step)).square().mean().backward()
            optimizer.step()
            steps += 1
    assert steps == 3 + 4 * rank
    for parameter in wrapped.parameters():
        rows = [torch.empty_like(parameter) for _ in range(2)]
        dist.all_gather(rows, parameter.detach())
        assert torch.equal(*rows)


@SUITE.behaviour
def uneven_inputs_may_be_an_error_on_all_ranks_instead() -> None:
    rank, _ = place()
    wrapped = DDP(layers())
    with pytest.raises(RuntimeError, match=r"exhausted|uneven"):
        with wrapped.join(throw_on_early_termination=True):
            for step in range(2 + rank):
                wrapped(batch(rank, step)).sum().backward()


@SUITE.behaviour
def models_that_differ_between_ranks_are_refused_on_all() -> None:
    rank, _ = place()
    with pytest.raises(RuntimeError):
        DDP(nn.Linear(3, 3 + rank))
        # One rank may have been done before the other found out.
        dist.barrier()


@SUITE.behaviour
def parameters_can_be_left_to_their_rank() -> None:
    rank, _ = place()
    model = fork()
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["second.weight", "second.bias"])
    wrapped = DDP(model)
    wrapped(batch(rank)).square().mean().backward()
    for parameter, equal in ((model.first.weight, True), (model.second.weight, False)):
        assert parameter.grad is not None
        rows = [torch.empty_like(parameter) for _ in range(2)]
        dist.all_gather(rows, parameter.grad)
        assert torch.equal(*rows) is equal


@SUITE.behaviour
def checkpointed_layers_and_shared_parameters_train() -> None:
    from torch.utils.checkpoint import checkpoint

    rank, _ = place()

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.onto = nn.Linear(8, 8), nn.Linear(8, 8)
            self.onto.weight = self.into.weight

        def forward(self, data: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.onto(checkpoint(self.into, data, use_reentrant=False))
            return result

    torch.manual_seed(5)
    model = Tied()
    wanted = averaged(model, loss)
    wrapped = DDP(model, static_graph=True)
    for _ in range(2):
        wrapped.zero_grad()
        loss(wrapped, rank).backward()
        assert_gradients(model, wanted)


@SUITE.behaviour
def a_sharded_optimizer_steps_as_a_whole_one() -> None:
    rank, _ = place()
    plain, sharded = DDP(layers()), DDP(layers())
    optimizers = [
        torch.optim.AdamW(plain.parameters(), lr=0.01),
        ZeroRedundancyOptimizer(sharded.parameters(), optimizer_class=torch.optim.AdamW, lr=0.01),
    ]
    for step in range(4):
        for model, optimizer in zip((plain, sharded), optimizers, strict=True):
            optimizer.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            optimizer.step()
    for one, other in zip(plain.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    optimizers[1].consolidate_state_dict(to=0)  # type: ignore[attr-defined]
    if rank == 0:
        assert len(optimizers[1].state_dict()["state"]) == len(list(plain.parameters()))


@SUITE.behaviour
def models_that_go_apart_are_averaged_now_and_then() -> None:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    rank, _ = place()
    model = nn.Linear(4, 4)
    # Parameters without a gradient are left out.
    model(torch.ones(4)).sum().backward()
    averager = PeriodicModelAverager(period=2, warmup_steps=1)
    for step in range(4):
        nn.init.constant_(model.weight, rank + step)
        averager.average_parameters([*model.parameters()])
        averages = step >= 1 and (step - 1) % 2 == 0
        assert model.weight.eq(0.5 + step if averages else rank + step).all()


@SUITE.behaviour
def two_models_train_side_by_side_in_their_own_groups() -> None:
    rank, _ = place()
    groups = [dist.new_group(), dist.new_group()]
    models = [layers(), fork()]
    wanted = [averaged(model, loss) for model in models]
    wrapped = [DDP(model, process_group=group) for model, group in zip(models, groups, strict=True)]
    losses = [loss(model, rank) for model in wrapped]
    for each in reversed(losses):
        each.backward()
    for model, want in zip(models, wanted, strict=True):
        assert_gradients(model, want)


@SUITE.behaviour
def join_also_serves_who_shards_its_optimizer() -> None:
    rank, _ = place()
    wrapped = DDP(layers())
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), optimizer_class=torch.optim.SGD, lr=0.1)
    with Join([wrapped, optimizer]):
        for step in range(2 + 2 * rank):
            optimizer.zero_grad()
            wrapped(batch(rank, step)).square().mean().backward()
            optimizer.step()
    parameter = next(wrapped.parameters()).detach()
    rows = [torch.empty_like(parameter) for _ in range(2)]
    dist.all_gather(rows, parameter)
    assert torch.equal(*rows)


@SUITE.behaviour
def a_model_saved_by_the_first_rank_is_read_by_all() -> None:
    rank, _ = place()
    path: list[str | None] = [None]
    wrapped = DDP(layers())
    loss(wrapped, rank).backward()
    torch.optim.SGD(wrapped.parameters(), lr=0.1).step()
    if rank == 0:
        import tempfile

        path = [str(Path(tempfile.mkdtemp()) / "model.pt")]
        torch.save(wrapped.state_dict(), path[0])
    dist.broadcast_object_list(path, src=0)
    again = DDP(layers())
    again.load_state_dict(torch.load(str(path[0])))
    dist.barrier()
    if rank == 0:
        Path(str(path[0])).unlink()
        Path(str(path[0])).parent.rmdir()
    for one, other in zip(wrapped.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


@SUITE.behaviour
def the_group_of_a_model_may_be_changed() -> None:
    rank, _ = place()
    model = layers()
    wanted = averaged(model, loss)
    wrapped = DDP(model)
    wrapped._update_process_group(dist.new_group())
    loss(wrapped, rank).backward()
    assert_gradients(model, wanted)
    ended(dist.barrier(async_op=True))


@SUITE.each()
def test_two_ranks(name: str, backend: str) -> None:
    SUITE.check(backend, name)
