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
from tests.comm.models import batch, loss, mlp
from tests.comm.ranks import run_ranks
from tests.comm.test_bytegrad import reference_exchange

STEPS = 10


class PlainOuter:
    """The outer step in plain torch: torch's own SGD with Nesterov momentum on the outer weights."""

    def __init__(
        self, settings: DiLoCo, start: torch.Tensor | None = None, first_turn: int | None = None
    ) -> None:
        """Of all weights of a `Net`, after each period; or of some, first after step `first_turn`."""
        self.settings = settings
        self.first_turn = settings.local_steps if first_turn is None else first_turn
        self.outer = torch.nn.Parameter(weights_of(Net()) if start is None else start)
        momentum = settings.outer_momentum
        self.sgd = torch.optim.SGD(
            [self.outer], lr=settings.outer_lr, momentum=momentum, nesterov=momentum > 0
        )
        self.averaged: dict[int, torch.Tensor] = {}

    def __call__(self, step: int, weights: torch.Tensor) -> torch.Tensor:
        ended, delay = step + 1, self.settings.delay_steps
        turn = ended - self.first_turn
        if turn >= 0 and turn % self.settings.local_steps == 0:
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


def fragments_of_weights(count: int) -> torch.Tensor:
    """In which of so many equal parts of the flat buffer each weight of a `Net` is: parameters begin at
    multiples of 64 bytes there."""
    places, begin = [], 0
    for parameter in Net().parameters():
        if parameter.requires_grad:
            places.append(begin + torch.arange(parameter.numel()))
            begin = -(-(begin + parameter.numel()) // 8) * 8
    parts = torch.arange(begin).tensor_split(count)
    of_place = torch.cat([torch.full_like(part, index) for index, part in enumerate(parts)])
    return of_place[torch.cat(places)]


class PlainFragments:
    """An outer step of its own for each fragment, which take turns."""

    def __init__(self, settings: DiLoCo) -> None:
        start, where = weights_of(Net()), fragments_of_weights(settings.fragments)
        apart = settings.local_steps // settings.fragments
        self.parts = [
            (where == index, PlainOuter(settings, start[where == index], (index + 1) * apart))
            for index in range(settings.fragments)
        ]

    def __call__(self, step: int, weights: torch.Tensor) -> torch.Tensor:
        mixed = weights.clone()
        for part, outer in self.parts:
            mixed[:, part] = outer(step, weights[:, part])
        return mixed


@pytest.mark.parametrize(("world_size", "backend"), [(2, "gloo"), (3, "baguanet")])
def test_every_step_of_fragments_is_that_of_as_many_outer_optimizers(world_size: int, backend: str) -> None:
    algorithms = [
        DiLoCo(local_steps=4, fragments=2),
        DiLoCo(local_steps=6, fragments=3, delay_steps=3, keep_local=0.25),
    ]
    found = run_for_tensors(train_each, world_size, algorithms, 2 * STEPS, backend=backend)
    for index, algorithm in enumerate(algorithms):
        expected = simulate(world_size, 2 * STEPS, after_step=PlainFragments(algorithm))
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


def flat_of(module: torch.nn.Module) -> torch.Tensor:
    """As the buffer that is exchanged: parameters at multiples of 64 bytes, zeros between them."""
    parts = []
    for parameter in module.parameters():
        parts += [parameter.detach().reshape(-1), torch.zeros(-parameter.numel() % 16)]
    return torch.cat(parts)


def takes_outer_steps_with_few_bits(wire: str, wire_name: str) -> None:
    module = mlp(torch.float32, width=61)
    inner = torch.optim.SGD(module.parameters(), lr=0.01)
    before_exchange: list[torch.Tensor] = []
    # Registered before the wrapper's own, and so called before it.
    inner.register_step_post_hook(lambda *_call: before_exchange.append(flat_of(module)))
    settings = DiLoCo(local_steps=2, wire=wire)
    model = DistributedDataParallel(module, optimizers=[inner], algorithm=settings)
    outer = torch.nn.Parameter(flat_of(module))
    sgd = torch.optim.SGD(
        [outer], lr=settings.outer_lr, momentum=settings.outer_momentum, nesterov=True, fused=True
    )
    for step in range(6):
        inner.zero_grad()
        loss(model(batch(module))).backward()
        inner.step()
        if step % 2 == 1:
            change = outer.detach() - before_exchange[-1]
            changes = [torch.empty_like(change) for _ in range(dist.get_world_size())]
            dist.all_gather(changes, change)
            outer.grad = reference_exchange(changes, wire_name)
            sgd.step()
            assert torch.equal(flat_of(module), outer.detach()), step


@pytest.mark.parametrize(("wire", "wire_name"), [("int8", "MINMAX8"), ("int4", "MINMAX4")])
@pytest.mark.parametrize("world_size", [2, 3])
def test_an_outer_step_with_few_bits_is_the_exchange_written_out_bit_for_bit(
    world_size: int, wire: str, wire_name: str
) -> None:
    run_ranks(takes_outer_steps_with_few_bits, world_size, wire, wire_name)


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
