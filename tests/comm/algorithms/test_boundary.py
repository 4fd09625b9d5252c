"""Where steps end, and what is refused around them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from baguarun.comm.algorithms import (
    ALGORITHMS,
    Algorithm,
    Decentralized,
    DiLoCo,
    LocalSGD,
    LowPrecisionDecentralized,
)
from baguarun.comm.ddp import DistributedDataParallel
from baguarun.errors import CommunicationError, UsageError
from tests.comm.algorithms.simulation import Net, run_for_tensors, weights_of
from tests.comm.ranks import run_ranks

WEIGHT_ALGORITHMS = [kind() for kind in dict.fromkeys(ALGORITHMS.values()) if kind.exchanges_weights]


def one_number(algorithm: Algorithm, lr: float = 1.0) -> tuple[Any, nn.Parameter, torch.optim.Optimizer]:
    net = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(net.weight)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    return (
        DistributedDataParallel(net, optimizers=[optimizer], algorithm=algorithm),
        net.weight,
        optimizer,
    )


def step_left_out_by_one_rank(ends_at_commit: bool) -> list[float]:
    """As GradScaler does on the rank whose gradients overflowed."""
    model, weight, optimizer = one_number(LocalSGD(local_steps=1))
    found = []
    for step in range(3):
        optimizer.zero_grad()
        model(-torch.ones(1, 1, dtype=torch.float64)).sum().backward()
        if step != 1 or dist.get_rank() != 1:
            optimizer.step()
        if ends_at_commit:
            model.end_left_out_step()
        else:
            with torch.no_grad():
                model(torch.ones(1, 1, dtype=torch.float64))
        found.append(weight.item())
    return found


@pytest.mark.parametrize("ends_at_commit", [False, True])
def test_a_rank_that_leaves_a_step_out_still_takes_part_in_the_average(ends_at_commit: bool) -> None:
    for found in run_ranks(step_left_out_by_one_rank, 2, ends_at_commit):
        assert found == [1.0, 1.5, 2.5]


def two_optimizers() -> tuple[int, list[torch.Tensor]]:
    net = Net()
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in (net.first.weight, net.last.weight)]
    model = DistributedDataParallel(net, optimizers=optimizers, algorithm=LocalSGD(local_steps=1))
    for _ in range(3):
        model(torch.randn(4, 7, dtype=torch.float64)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    return model.stats().weight_rounds, [weights_of(net)]


def test_a_step_ends_when_all_optimizers_have_stepped() -> None:
    first, second = run_for_tensors(two_optimizers, 2)
    assert first[0] == second[0] == 3
    assert torch.equal(first[1][0], second[1][0])


def closure_and_replaced_weights() -> list[str]:
    model, weight, optimizer = one_number(LocalSGD(local_steps=1))
    messages = []

    def closure() -> torch.Tensor:
        loss: torch.Tensor = model(torch.ones(1, 1, dtype=torch.float64)).sum()
        loss.backward()
        return loss

    with pytest.raises(UsageError) as caught:
        optimizer.step(closure)
    messages.append(str(caught.value))
    model, weight, optimizer = one_number(LocalSGD(local_steps=1))
    closure()
    weight.data = weight.data.clone()
    with pytest.raises(UsageError) as caught:
        optimizer.step()
    messages.append(str(caught.value))
    return messages


def test_forward_inside_of_step_and_moved_weights_are_refused() -> None:
    for inside, moved in run_ranks(closure_and_replaced_weights, 2):
        assert "forward ran inside of optimizer.step(closure)" in inside
        assert "parameter 'weight' was [1, 1] on cpu" in moved
        assert "Wrap the model again" in moved


def go_on_after_a_step_that_raised() -> float:
    model, weight, optimizer = one_number(LocalSGD(local_steps=1))
    x = torch.ones(1, 1, dtype=torch.float64)
    (-model(x)).sum().backward()
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    optimizer.zero_grad()
    (-model(x)).sum().backward()
    optimizer.step()
    return weight.item()


def test_a_step_that_raised_is_one_that_was_left_out() -> None:
    assert run_ranks(go_on_after_a_step_that_raised, 2) == [1.0, 1.0]


def checkpointed(algorithm: Algorithm, use_reentrant: bool | None) -> tuple[list[torch.Tensor], int]:
    """The weights after some steps; None: without a checkpoint around the model."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = DistributedDataParallel(net, optimizers=[optimizer], algorithm=algorithm)
    torch.manual_seed(dist.get_rank())
    for _ in range(5):
        x = torch.randn(2, 3, requires_grad=True)
        optimizer.zero_grad()
        if use_reentrant is None:
            output = model(x)
        else:
            output = checkpoint(model, x, use_reentrant=use_reentrant)
        output.square().sum().backward()
        optimizer.step()
    return [weights_of(net)], model.shared_steps()[0]


def checkpoint_wrapped_models(algorithms: Sequence[Algorithm]) -> list[torch.Tensor]:
    found = []
    for algorithm in algorithms:
        [plain], steps = checkpointed(algorithm, None)
        for use_reentrant in (False, True):
            [weights], counted = checkpointed(algorithm, use_reentrant)
            assert counted == steps == 5, (algorithm, use_reentrant)
            assert torch.equal(weights, plain), (algorithm, use_reentrant)
        found.append(plain)
    return found


def test_a_forward_that_a_checkpoint_goes_through_again_ends_no_step() -> None:
    algorithms = [
        LocalSGD(local_steps=1),
        DiLoCo(local_steps=2),
        Decentralized(),
        LowPrecisionDecentralized(),
    ]
    run_for_tensors(checkpoint_wrapped_models, 2, algorithms)


class ReturnsItsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * self.weight, self.weight


def hooks_on_a_weight_that_is_returned() -> int:
    net = ReturnsItsWeight()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    model = DistributedDataParallel(net, optimizers=[optimizer], algorithm=LocalSGD(local_steps=1))
    for _ in range(5):
        model(torch.ones(3))[0].sum().backward()
        optimizer.step()
    return len(net.weight._backward_hooks or ())


def test_a_weight_that_forward_returns_gathers_nothing() -> None:
    assert run_ranks(hooks_on_a_weight_that_is_returned, 2) == [0, 0]


def buffers_after_each_forward() -> list[float]:
    net = nn.BatchNorm1d(3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    model = DistributedDataParallel(net, optimizers=[optimizer], algorithm=LocalSGD(local_steps=3))
    found = []
    for _ in range(4):
        model(torch.full((4, 3), float(dist.get_rank()))).sum().backward()
        found.append(net.running_mean[0].item())
        optimizer.step()
    return found


def test_buffers_are_shared_only_when_replicas_are_equal() -> None:
    zero, one = run_ranks(buffers_after_each_forward, 2)
    assert zero == [0.0, 0.0, 0.0, 0.0]
    # 0.1 of the way to 1 each time, from rank 0's value in forwards 0 and 3.
    assert one == pytest.approx([0.1, 0.19, 0.271, 0.1])


def mixed_dtypes() -> torch.Tensor:
    net = nn.ModuleDict({"a": nn.Linear(5, 5), "b": nn.Linear(5, 5, dtype=torch.bfloat16)})
    forward = nn.Module()
    forward.net = net
    forward.forward = lambda x: net["b"](net["a"](x).bfloat16()).float()  # type: ignore[method-assign]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = DistributedDataParallel(forward, optimizers=[optimizer], algorithm=LocalSGD(local_steps=1))
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(2, 5)).sum().backward()
        optimizer.step()
    return weights_of(net)


def test_a_model_may_mix_dtypes() -> None:
    first, second = run_for_tensors(mixed_dtypes, 2)
    assert torch.equal(first, second)


@pytest.mark.parametrize("algorithm", WEIGHT_ALGORITHMS, ids=lambda algorithm: algorithm.name)
def test_without_optimizers_it_is_refused(algorithm: Algorithm) -> None:
    with pytest.raises(UsageError, match=r"want optimizers=\[...\]"):
        DistributedDataParallel(nn.Linear(2, 2), algorithm=algorithm)


def test_every_name_has_an_algorithm_with_defaults() -> None:
    for kind in ALGORITHMS.values():
        assert ALGORITHMS[kind.name] is kind
        assert kind() == kind()


def world_of_one() -> tuple[float, dict[str, Any]]:
    model, weight, optimizer = one_number(LocalSGD(local_steps=1))
    model(-torch.ones(1, 1, dtype=torch.float64)).sum().backward()
    optimizer.step()
    return weight.item(), model.algorithm_state_dict()


def test_a_world_of_one_trains_by_the_optimizer_alone() -> None:
    assert run_ranks(world_of_one, 1) == [(1.0, {})]


SHARED = {
    LocalSGD(local_steps=2, warmup_steps=1): [1, 1, 3, 3, 5, 5],
    DiLoCo(local_steps=3): [0, 0, 3, 3, 3, 6],
    DiLoCo(local_steps=3, delay_steps=1): [0, 0, 0, 3, 3, 3],
    # The first half of the weights goes after 1, 3 and 5 steps, the second after 2, 4 and 6.
    DiLoCo(local_steps=2, fragments=2): [0, 1, 2, 3, 4, 5],
    # What a step has changed goes while the next one's gradients are computed.
    Decentralized(): [0, 1, 2, 3, 4, 5],
    Decentralized(communication_interval=2): [0, 0, 2, 2, 4, 4],
    LowPrecisionDecentralized(communication_interval=2): [0, 0, 1, 1, 3, 3],
}


def share_steps(algorithms: Sequence[Algorithm]) -> list[list[tuple[int, int]]]:
    found = []
    for algorithm in algorithms:
        model, _, optimizer = one_number(algorithm)
        found.append([])
        for _ in range(6):
            model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
            optimizer.step()
            found[-1].append(model.shared_steps())
    return found


def test_ranks_know_which_steps_others_have_what_came_of() -> None:
    for found in run_ranks(share_steps, 2, list(SHARED)):
        assert found == [list(zip(range(1, 7), shared, strict=True)) for shared in SHARED.values()]


def leave_steps_out() -> list[tuple[int, int]]:
    """As GradScaler does on one rank: what the others did in such a step is theirs alone."""
    model, _, optimizer = one_number(LocalSGD(local_steps=2))
    found = []
    for step in range(4):
        model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
        if step != 2 or dist.get_rank() == 1:
            optimizer.step()
        model.end_left_out_step()
        found.append(model.shared_steps())
    return found


def test_a_step_that_was_left_out_here_is_not_shared_for_that() -> None:
    assert run_ranks(leave_steps_out, 2) == [[(1, 0), (2, 2), (3, 2), (4, 4)]] * 2


def lose_a_peer_in_the_exchange(holds: bool, later: str) -> list[str]:
    """Of two ranks the second goes before the second step's average."""
    model, weight, optimizer = one_number(LocalSGD(local_steps=2))
    model.keep_committed(holds)
    data = torch.ones(1, 1, dtype=torch.float64)
    happened = []
    for step in range(2):
        optimizer.zero_grad()
        model(-data).sum().backward()
        if step == 1 and dist.get_rank() == 1:
            return []
        try:
            optimizer.step()
        except CommunicationError:
            happened.append("step() raised")
    happened.append(f"weight {weight.item():g}")
    calls = {"asked": model.require_ended, "forward": lambda: model(data)}
    for call in (calls[later], *calls.values()):
        try:
            call()
        except CommunicationError:
            happened.append("raised later")
    return happened


@pytest.mark.parametrize("later", ["asked", "forward"])
@pytest.mark.parametrize(("holds", "told"), [(False, ["step() raised"]), (True, [])])
def test_an_exchange_that_breaks_behind_a_step_is_told_of_later_if_steps_are_to_be_committed(
    holds: bool, told: list[str], later: str
) -> None:
    found, _ = run_ranks(lose_a_peer_in_the_exchange, 2, holds, later)
    assert found == [*told, "weight 2", *(["raised later"] if holds else [])]


def forget_the_error() -> tuple[bool, int]:
    """The World changes before anybody has asked."""
    model, _, optimizer = one_number(LocalSGD(local_steps=1))
    model.keep_committed()
    model(-torch.ones(1, 1, dtype=torch.float64)).sum().backward()
    if dist.get_rank() == 1:
        return True, 0
    optimizer.step()
    gc.disable()
    left = weakref.ref(model._session._boundary)
    model._session.close()
    return left() is None, len(optimizer._optimizer_step_post_hooks)


def test_an_error_that_nobody_asked_for_keeps_nothing_of_its_world() -> None:
    assert run_ranks(forget_the_error, 2)[0] == (True, 0)
