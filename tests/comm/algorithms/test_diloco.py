from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from baguarun.comm.algorithms import DiLoCo, resolve
from baguarun.comm.ddp import DistributedDataParallel
from baguarun.errors import UsageError
from tests.comm.algorithms.simulation import (
    Net,
    assert_same_training,
    backward,
    make_optimizer,
    one_step,
    run_for_tensors,
    simulate,
    train,
    train_each,
    train_through,
    weights_of,
)

STEPS = 10


class PlainOuter:
    """The outer step in plain torch: torch's own SGD with Nesterov momentum on the outer weights."""

    def __init__(self, settings: DiLoCo) -> None:
        self.settings = settings
        self.outer = torch.nn.Parameter(weights_of(Net()))
        momentum = settings.outer_momentum
        self.sgd = torch.optim.SGD(
            [self.outer], lr=settings.outer_lr, momentum=momentum, nesterov=momentum > 0
        )
        self.averaged: dict[int, torch.Tensor] = {}

    def __call__(self, step: int, weights: torch.Tensor) -> torch.Tensor:
        ended, delay = step + 1, self.settings.delay_steps
        if ended % self.settings.local_steps == 0:
            self.averaged[ended + delay] = (self.outer.detach() - weights).mean(0)
        if ended not in self.averaged:
            return weights
        self.outer.grad = self.averaged.pop(ended)
        self.sgd.step()
        keep = self.settings.keep_local
        return keep * weights + (1 - keep) * self.outer.detach()


@pytest.mark.parametrize(
    ("world_size", "backend", "micro_batches"), [(2, "gloo", 2), (3, "baguanet", 1), (4, "baguanet", 1)]
)
def test_every_step_is_that_of_torchs_sgd_on_the_outer_weights(
    world_size: int, backend: str, micro_batches: int
) -> None:
    algorithms = [
        DiLoCo(local_steps=3),
        DiLoCo(local_steps=2, outer_lr=1, outer_momentum=0),
        DiLoCo(local_steps=4, delay_steps=2, keep_local=0.5),
    ]
    found = run_for_tensors(train_each, world_size, algorithms, STEPS, micro_batches, backend=backend)
    for index, algorithm in enumerate(algorithms):
        expected = simulate(world_size, STEPS, after_step=PlainOuter(algorithm), micro_batches=micro_batches)
        assert_same_training([each[index] for each in found], expected)


def train_streaming() -> tuple[torch.Tensor, torch.Tensor, int]:
    settings = DiLoCo(local_steps=4, fragments=2)
    net = Net()
    optimizer = make_optimizer(net)
    model = DistributedDataParallel(net, optimizers=[optimizer], algorithm=settings)
    differing = []
    for step in range(8):
        one_step(model, optimizer, step, 1, torch.float64)
        everyone = [torch.empty_like(weights_of(net)) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, weights_of(net))
        together = torch.stack(everyone)
        differing.append((together != together[0]).any(0))
    return torch.stack(differing), weights_of(net), model.stats().weight_rounds


def test_fragments_take_turns_and_each_is_equal_on_all_ranks_after_its_own() -> None:
    for differing, weights, rounds in run_for_tensors(train_streaming, 2):
        half = weights.numel() // 2
        # Half of the buffer, which has a few numbers of padding, is about half of the weights.
        first, second = slice(0, half - 16), slice(half + 16, None)
        assert rounds == 4
        for step, row in enumerate(differing):
            assert row[first].any() == (step % 4 != 1), step
            assert row[second].any() == (step % 4 != 3), step


@pytest.mark.parametrize(("wire", "within"), [("bf16", 0.03), ("int8", 0.03), ("int4", 0.25)])
def test_a_shorter_wire_stays_close_and_replicas_bit_identical(wire: str, within: float) -> None:
    found = run_for_tensors(train, 3, DiLoCo(local_steps=3, wire=wire), 9)
    expected = simulate(3, 9, after_step=PlainOuter(DiLoCo(local_steps=3)))
    for step in (2, 5, 8):
        assert all(torch.equal(found[0][step], other[step]) for other in found[1:])
        moved = (expected[step] - weights_of(Net())).abs().max()
        assert (found[0][step] - expected[step, 0]).abs().max() < within * moved


def bytes_of_an_outer_step(wire: str) -> torch.Tensor:
    layer = torch.nn.Linear(128, 128, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    model = DistributedDataParallel(layer, optimizers=[optimizer], algorithm=DiLoCo(local_steps=1, wire=wire))
    model(torch.ones(1, 128)).sum().backward()
    optimizer.step()
    return torch.tensor(model.stats().bytes_sent)


@pytest.mark.parametrize(
    ("wire", "block_bytes"), [("fp32", 8192), ("bf16", 4096), ("int8", 2048 + 8), ("int4", 1024 + 8)]
)
def test_bytes_are_those_of_the_wire(wire: str, block_bytes: int) -> None:
    # 8 blocks; of two ranks each sends half of them, and the sum of the other half.
    assert run_for_tensors(bytes_of_an_outer_step, 2, wire) == [torch.tensor(8 * block_bytes)] * 2


def train_with_and_without_a_cut() -> list[list[torch.Tensor]]:
    delayed = DiLoCo(local_steps=4, delay_steps=2, keep_local=0.5, fragments=2)
    coded = DiLoCo(local_steps=4, delay_steps=2, wire="int8")
    return [
        [train_through(DiLoCo(local_steps=3), STEPS), train_through(DiLoCo(local_steps=3), STEPS, cut=7)],
        [train_through(delayed, STEPS), train_through(delayed, STEPS, cut=5)],
        [train_through(coded, STEPS), train_through(coded, STEPS, cut=5)],
    ]


def test_a_checkpoint_keeps_outer_weights_momentum_and_what_is_under_way() -> None:
    for pairs in run_for_tensors(train_with_and_without_a_cut, 2):
        for through, resumed in pairs:
            assert torch.equal(through, resumed)


def train_without_the_wrapper(calls_wrapper: bool) -> torch.Tensor:
    net = Net()
    optimizer = make_optimizer(net)
    model = DistributedDataParallel(
        net, optimizers=[optimizer], algorithm=DiLoCo(local_steps=2), find_unused_parameters=True
    )
    for step in range(4):
        optimizer.zero_grad()
        backward(model if calls_wrapper else net, dist.get_rank(), step, 0, torch.float64)
        optimizer.step()
    return weights_of(net)


def test_steps_without_a_forward_through_the_wrapper_are_steps_all_the_same() -> None:
    wanted = run_for_tensors(train_without_the_wrapper, 2, True)
    found = run_for_tensors(train_without_the_wrapper, 2, False)
    assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))


def load_a_wrong_state() -> str:
    def wrap(fragments: int) -> DistributedDataParallel:
        net = Net()
        algorithm = DiLoCo(local_steps=6, fragments=fragments)
        return DistributedDataParallel(net, optimizers=[make_optimizer(net)], algorithm=algorithm)

    with pytest.raises(UsageError) as caught:
        wrap(2).load_algorithm_state_dict(wrap(3).algorithm_state_dict())
    return str(caught.value)


def test_a_state_with_other_fragments_is_refused() -> None:
    for message in run_for_tensors(load_a_wrong_state, 2):
        assert "want the state of the same model with the same number of fragments" in message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"local_steps": 0}, "want 1 <= local_steps"),
        ({"outer_lr": float("nan")}, "outer_lr=nan; want 0 <= outer_lr"),
        ({"outer_momentum": 1.5}, "want 0 <= outer_momentum <= 1"),
        ({"keep_local": -0.1}, "want 0 <= keep_local <= 1"),
        ({"local_steps": 4, "delay_steps": 4}, "want 0 <= delay_steps <= 3"),
        ({"local_steps": 10, "fragments": 3}, "fragments=3 does not divide local_steps=10"),
        ({"wire": "int2"}, "wire='int2'; want one of fp32, bf16, int8, int4"),
    ],
)
def test_a_setting_out_of_range_is_refused_with_its_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        DiLoCo(**settings)


def test_it_is_known_by_name() -> None:
    assert resolve("diloco") == DiLoCo()
