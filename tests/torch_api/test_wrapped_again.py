"""A module that `with_bagua` is called on again, as Bagua's tests do with all algorithms in turn."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import baguarun.torch_api  # noqa: F401  (adds with_bagua)
from baguarun.comm.algorithms import Algorithm, DiLoCo, LocalSGD, PowerSGD, Sparse
from baguarun.errors import UsageError
from baguarun.torch_api.algorithms import (
    async_model_average,
    bytegrad,
    decentralized,
    gradient_allreduce,
    q_adam,
)
from tests.comm.algorithms.simulation import Net, backward, make_optimizer, run_for_tensors, weights_of
from tests.comm.ranks import run_ranks
from tests.comm.worlds import num_open_files, threads

STEPS = 5


def sgd(net: nn.Module, algorithm: Callable[[], Algorithm]) -> tuple[torch.optim.Optimizer, Algorithm]:
    return make_optimizer(net), algorithm()


def qadam(net: nn.Module) -> tuple[torch.optim.Optimizer, Algorithm]:
    parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]
    optimizer = q_adam.QAdamOptimizer(parameters, lr=0.01, warmup_steps=2)
    return optimizer, q_adam.QAdamAlgorithm(optimizer)


MAKERS: list[Callable[[nn.Module], tuple[torch.optim.Optimizer, Algorithm]]] = [
    lambda net: sgd(net, gradient_allreduce.GradientAllReduceAlgorithm),
    lambda net: sgd(net, bytegrad.ByteGradAlgorithm),
    lambda net: sgd(net, lambda: decentralized.DecentralizedAlgorithm(peer_selection_mode="shift_one")),
    lambda net: sgd(net, decentralized.LowPrecisionDecentralizedAlgorithm),
    qadam,
    lambda net: sgd(net, lambda: decentralized.DecentralizedAlgorithm(hierarchical=False)),
    lambda net: sgd(net, lambda: LocalSGD(local_steps=2)),
    lambda net: sgd(net, lambda: DiLoCo(local_steps=2, delay_steps=1)),
    lambda net: sgd(net, lambda: PowerSGD(start_step=1)),
    lambda net: sgd(net, Sparse),
    lambda net: sgd(net, gradient_allreduce.GradientAllReduceAlgorithm),
]
"""All but the asynchronous one, whose rounds end when they do."""


def make_net() -> Any:
    net = Net(torch.float32)
    net.unused.requires_grad_(False)
    return net


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> torch.Tensor:
    for step in range(steps):
        optimizer.zero_grad()
        backward(net, dist.get_rank(), step, 0, torch.float32)
        optimizer.step()
    return weights_of(net)


def hooks_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[int]:
    own = [net._forward_hooks, net._forward_pre_hooks]
    return [len(each) for each in (*own, optimizer._optimizer_step_post_hooks)]


def one_algorithm_after_the_other() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Weights after each, of one module and of a fresh copy that no other algorithm has had."""
    net = make_net()
    found = []
    last: torch.optim.Optimizer | None = None
    for make in MAKERS:
        fresh = make_net()
        fresh.load_state_dict(copy.deepcopy(net.state_dict()))
        optimizer, algorithm = make(net)
        net.with_bagua([optimizer], algorithm)
        if last is not None:
            assert hooks_of(net, last) == [1, 1, 0]
        last = optimizer
        train(net, optimizer)
        alone, algorithm = make(fresh)
        fresh.with_bagua([alone], algorithm)
        found.append((weights_of(net), train(fresh, alone)))
    return found


@pytest.mark.parametrize(("world_size", "backend"), [(2, "baguanet"), (3, "baguanet"), (2, "gloo")])
def test_each_algorithm_trains_as_if_it_were_the_first(world_size: int, backend: str) -> None:
    for pairs in run_for_tensors(one_algorithm_after_the_other, world_size, backend=backend):
        for again, fresh in pairs:
            assert torch.equal(again, fresh)


def wrap(net: Any, algorithm: Algorithm | str = "gradient_allreduce") -> torch.optim.Optimizer:
    optimizer = make_optimizer(net)
    net.with_bagua([optimizer], algorithm)
    return optimizer


def end_a_round_under_way() -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of all ranks when a round has just begun, and this rank's when the next algorithm has."""
    net = make_net()
    optimizer = wrap(net, async_model_average.AsyncModelAverageAlgorithm())
    mine = train(net, optimizer, steps=1)
    assert net.stats().weight_rounds == 1
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    wrap(net)
    return torch.stack(everyone), weights_of(net)


def test_a_round_of_weights_under_way_is_waited_for_and_counts() -> None:
    for everyone, now in run_for_tensors(end_a_round_under_way, 3):
        assert not torch.equal(everyone[0], everyone[1])
        torch.testing.assert_close(now, everyone.mean(0), rtol=1e-5, atol=1e-6)


def wrap_asynchronously_again_and_again() -> torch.Tensor:
    net = make_net()
    for _ in range(4):
        optimizer = wrap(net, async_model_average.AsyncModelAverageAlgorithm(sync_interval_ms=0))
        train(net, optimizer)
    return train(net, wrap(net))


def test_the_asynchronous_algorithm_may_follow_itself() -> None:
    first, second = run_for_tensors(wrap_asynchronously_again_and_again, 2)
    assert torch.equal(first, second)


def wrap_in_the_middle_of_a_backward(algorithm: Algorithm | str) -> str:
    net = make_net()
    optimizer = wrap(net, algorithm)
    said = []

    def on_gradient(gradient: torch.Tensor) -> torch.Tensor:
        if not said:
            with pytest.raises(UsageError) as caught:
                wrap(net)
            said.append(str(caught.value))
        return gradient

    net.middle.weight.register_hook(on_gradient)
    # It stays what it was.
    train(net, optimizer)
    train(net, wrap(net))
    return said[0]


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "decentralized"])
def test_in_the_middle_of_a_backward_it_is_refused(algorithm: str) -> None:
    for message in run_ranks(wrap_in_the_middle_of_a_backward, 2, algorithm):
        assert f"{algorithm}: the model is in the middle of a step or of a backward" in message


def wrap_after(steps_of_rank: list[int], algorithm: Algorithm) -> str:
    """Behind the last step of rank 1 there may be a forward without a backward."""
    net = make_net()
    optimizer = wrap(net, algorithm)
    steps = steps_of_rank[dist.get_rank()]
    train(net, optimizer, steps)
    if steps_of_rank == [2, 2] and dist.get_rank() == 1:
        net(torch.ones(1, 7))
    with pytest.raises(UsageError) as caught:
        wrap(net)
    return str(caught.value)


def test_ranks_after_different_steps_are_told_so() -> None:
    for message in run_ranks(wrap_after, 2, [2, 3], LocalSGD(local_steps=10)):
        assert "ranks differ in the steps that the model was wrapped again after: rank 0 has 2" in message


def test_in_the_middle_of_a_step_it_is_refused_on_all_ranks() -> None:
    zero, one = run_ranks(wrap_after, 2, [2, 2], LocalSGD(local_steps=10))
    assert "the model is in the middle of a step" in one
    assert f"rank 1 cannot take part: {one}" in zero


def wrap_on_rank_0_only_again() -> str:
    net, other = make_net(), make_net()
    wrap(net)
    with pytest.raises(UsageError) as caught:
        wrap(net if dist.get_rank() == 0 else other)
    return str(caught.value)


def test_ranks_that_do_not_all_wrap_again_are_told_so() -> None:
    for message in run_ranks(wrap_on_rank_0_only_again, 2):
        assert "wraps a model that is wrapped already, the other does not" in message


def count_what_stays() -> list[tuple[int, int]]:
    net = make_net()
    found = []
    for times in range(9):
        algorithm = decentralized.LowPrecisionDecentralizedAlgorithm() if times % 2 else "gradient_allreduce"
        train(net, wrap(net, algorithm), steps=2)
        dist.barrier()
        found.append((len(threads()), num_open_files()))
    return found


def test_threads_and_most_files_of_what_was_there_are_gone() -> None:
    for found in run_ranks(count_what_stays, 2):
        (few_threads, few_files), (all_threads, all_files) = found[2], found[8]
        assert all_threads <= few_threads
        # A group of this rank alone holds the place of each that was destroyed, as its name is used up.
        assert all_files <= few_files + 2 * 6
