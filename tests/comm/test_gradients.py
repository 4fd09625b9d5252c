"""What scripts do to gradients between and beside rounds: they stay averages, or somebody is told."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from baguarun.comm.algorithms import QAdam, QAdamOptimizer
from baguarun.comm.ddp import DistributedDataParallel
from baguarun.errors import UsageError
from tests.comm.models import assert_averaged, assert_same_on_all_ranks, batch, gathered_gradients, loss, mlp
from tests.comm.ranks import run_ranks

Check = Callable[[], None]


def check_steps(model: DistributedDataParallel, inputs: list[torch.Tensor], *, set_to_none: bool) -> None:
    for x in inputs:
        reference = gathered_gradients(model.module, lambda local, x=x: loss(local(x)).backward())
        model.zero_grad(set_to_none=set_to_none)
        loss(model(x)).backward()
        assert_averaged(model.module, reference)


def averages_after_data_of_gradients_was_assigned() -> None:
    for set_to_none in (False, True):
        model = DistributedDataParallel(mlp(), bucket_cap_mb=0.005)
        inputs = [batch(model.module) for _ in range(6)]
        check_steps(model, inputs[:2], set_to_none=set_to_none)
        for parameter in model.parameters():
            parameter.grad.data = parameter.grad.data.clone()
        check_steps(model, inputs[2:], set_to_none=set_to_none)


def averages_after_the_memory_format_has_changed() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    model = DistributedDataParallel(net)
    torch.manual_seed(dist.get_rank())
    inputs = [torch.randn(2, 3, 9, 9) for _ in range(6)]
    check_steps(model, inputs[:2], set_to_none=False)
    net.to(memory_format=torch.channels_last)
    check_steps(model, inputs[2:], set_to_none=False)


def knows_momentum_only_where_it_has_put_it() -> None:
    net = nn.Linear(4, 3)
    optimizer = QAdamOptimizer(net.parameters(), lr=0.01, warmup_steps=1)
    model = DistributedDataParallel(net, algorithm=QAdam(), optimizers=[optimizer])
    engine = model._session._engine
    for _ in range(3):
        optimizer.zero_grad()
        loss(model(torch.randn(5, 4))).backward()
        optimizer.step()
    assert engine.momentum_is_known_finite()
    net.weight.grad.data = torch.full((3, 4), torch.nan)
    assert not engine.momentum_is_known_finite()


def keeps_gradients_where_they_are() -> None:
    """Without copies, and without new tensors, step by step."""
    for set_to_none in (False, True):
        model = DistributedDataParallel(mlp())
        seen = []
        for _ in range(5):
            model.zero_grad(set_to_none=set_to_none)
            loss(model(batch(model.module))).backward()
            seen.append([(id(p.grad), p.grad.data_ptr()) for p in model.parameters()])
        assert seen[2] == seen[3] == seen[4]


class Complex(nn.Module):
    """Its gradients are what the lazy bits of conjugation leave to be negated."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor(-0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.complex(self.a, self.b).conj() * x)


def negates_what_is_to_be_negated() -> None:
    model = DistributedDataParallel(Complex())
    for _ in range(3):
        x = torch.randn((), dtype=torch.complex64)
        reference = gathered_gradients(model.module, lambda local, x=x: local(x).sum().backward())
        model.zero_grad()
        model(x).sum().backward()
        assert_averaged(model.module, reference)


class Headed(nn.Module):
    def __init__(self, trunk: nn.Module, width: int) -> None:
        super().__init__()
        self.trunk, self.head = trunk, nn.Linear(40, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(x))


def shared_models(**settings: bool) -> tuple[list[Headed], list[DistributedDataParallel]]:
    """An actor and a critic on one trunk. Small buckets: each goes as soon as it can."""
    torch.manual_seed(0)
    trunk = mlp()
    modules = [Headed(trunk, 2), Headed(trunk, 1)]
    wrapped = [
        DistributedDataParallel(
            module, bucket_cap_mb=0.0001, static_graph=settings.get(f"static_{index}", False)
        )
        for index, module in enumerate(modules)
    ]
    torch.manual_seed(1 + dist.get_rank())
    return modules, wrapped


def averages_what_two_models_share() -> None:
    for settings in ({}, {"static_0": True}, {"static_1": True}, {"static_0": True, "static_1": True}):
        modules, wrapped = shared_models(**settings)
        both = nn.ModuleList(modules)
        for step in range(12):
            x = torch.randn(5, 37)

            def joint(models: nn.ModuleList | list[DistributedDataParallel], x: torch.Tensor = x) -> None:
                (loss(models[0](x)) + loss(models[1](x))).backward()

            reference = gathered_gradients(both, joint)
            both.zero_grad(set_to_none=step % 2 == 0)
            joint(wrapped)
            assert_averaged(both, reference)


def takes_turns_with_a_model_that_shares() -> None:
    modules, wrapped = shared_models()
    both = nn.ModuleList(modules)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            x = torch.randn(5, 37)

            def in_turn(models: nn.ModuleList | list[DistributedDataParallel], x: torch.Tensor = x) -> None:
                loss(models[0](x)).backward()
                loss(models[1](x)).backward()

            reference = gathered_gradients(both, in_turn)
            both.zero_grad()
            in_turn(wrapped)
            assert_averaged(both, reference)


def is_wrapped_again_beside_an_older_wrapper() -> None:
    net = mlp()
    older = DistributedDataParallel(net, bucket_cap_mb=0.005)
    check_steps(older, [batch(net) for _ in range(2)], set_to_none=True)
    # A backward that never comes: the older one takes part in those of the newer one.
    older(batch(net))
    newer = DistributedDataParallel(net, bucket_cap_mb=0.0001)
    check_steps(newer, [batch(net) for _ in range(4)], set_to_none=True)
    assert older.module is newer.module


def refuses_momentum_that_two_models_share() -> None:
    net = nn.Linear(4, 3)
    plain = DistributedDataParallel(net)
    optimizer = QAdamOptimizer(net.parameters(), lr=0.01, warmup_steps=1)
    model = DistributedDataParallel(net, algorithm=QAdam(), optimizers=[optimizer])
    for _ in range(2):
        optimizer.zero_grad()
        loss(model(torch.randn(5, 4))).backward()
        optimizer.step()
    with pytest.raises(UsageError, match=r"'(weight|bias)' .*shared with another wrapped model"):
        (loss(plain(torch.randn(5, 4))) + loss(model(torch.randn(5, 4)))).backward()


class Recomputed(nn.Module):
    """All that is trained is in one block, which two re-entrant checkpoints use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block, self.head = nn.Linear(6, 6), nn.Linear(6, 2).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=True)
        return self.head(x)


def refuses_a_second_gradient_behind_the_round() -> None:
    model = DistributedDataParallel(Recomputed())
    for _ in range(2):
        with pytest.raises(UsageError, match=r"'block\.\w+' .*second gradient.*static_graph=True"):
            loss(model(torch.randn(2, 6, requires_grad=True))).backward()
    model = DistributedDataParallel(Recomputed(), static_graph=True)
    inputs = [torch.randn(2, 6, requires_grad=True) for _ in range(3)]
    check_steps(model, inputs, set_to_none=True)


def local_gradients_behind_a_round(wrapped: nn.Module, x: torch.Tensor) -> list[str]:
    out = wrapped(x)
    first, second = loss(out), out.sum()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        first.backward(retain_graph=True)
        second.backward()
    return [str(warning.message) for warning in found if "stays" in str(warning.message)]


def warns_once_of_what_stays_local() -> None:
    model = DistributedDataParallel(mlp())
    messages = [local_gradients_behind_a_round(model, batch(model.module)) for _ in range(2)]
    assert len(messages[0]) == 1
    assert "parameter '4.bias'" in messages[0][0] or "parameter '4.weight'" in messages[0][0]
    assert "this rank" in messages[0][0]
    assert messages[1] == []


class OneCheckpoint(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=True)


def warns_of_a_second_backward_through_a_checkpoint() -> None:
    model = DistributedDataParallel(OneCheckpoint())
    assert len(local_gradients_behind_a_round(model, torch.randn(2, 6, requires_grad=True))) == 1


def does_not_warn_of_ordinary_gradients() -> None:
    model = DistributedDataParallel(mlp())
    x = batch(model.module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for set_to_none in (True, False, True):
            model.zero_grad(set_to_none=set_to_none)
            with model.no_sync():
                loss(model(x)).backward()
            loss(model(x)).backward()
            with model.no_sync():
                loss(model(x)).backward()
            with torch.no_grad():
                model(x)
            # Several forwards, of which one is for another rank's eyes.
            one, two, _ = model(x), model(x), model(x)
            loss(one).backward()
            loss(two).backward()
            model.zero_grad()
            # A penalty that comes before the forward is averaged with it.
            sum(parameter.square().sum() for parameter in model.parameters()).backward()
            loss(model(x)).backward()
            assert_same_on_all_ranks([p.grad for p in model.parameters()])


@pytest.mark.parametrize(
    "check",
    [
        averages_after_data_of_gradients_was_assigned,
        averages_after_the_memory_format_has_changed,
        knows_momentum_only_where_it_has_put_it,
        keeps_gradients_where_they_are,
        negates_what_is_to_be_negated,
        averages_what_two_models_share,
        takes_turns_with_a_model_that_shares,
        is_wrapped_again_beside_an_older_wrapper,
        refuses_momentum_that_two_models_share,
        refuses_a_second_gradient_behind_the_round,
        warns_once_of_what_stays_local,
        warns_of_a_second_backward_through_a_checkpoint,
        does_not_warn_of_ordinary_gradients,
    ],
    ids=lambda check: check.__name__,
)
def test_gradients(check: Check) -> None:
    run_ranks(check, 2)
