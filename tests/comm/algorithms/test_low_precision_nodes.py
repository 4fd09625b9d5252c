"""Low-precision decentralized on a ring of nodes, which are simulated on this machine."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from baguarun.comm.algorithms import Algorithm, LowPrecisionDecentralized
from baguarun.comm.algorithms.low_precision_decentralized import RingStepper
from baguarun.comm.ddp import DistributedDataParallel
from baguarun.elastic.training.in_place import blamed
from baguarun.errors import CommunicationError
from tests.comm.algorithms.simulation import (
    Net,
    assert_same_training,
    make_optimizer,
    one_step,
    run_for_tensors,
    simulate,
    train_each,
    train_through,
)
from tests.comm.algorithms.test_hierarchical_weights import BY_NODE, keeps_rails, train_interleaved
from tests.comm.algorithms.test_low_precision_decentralized import PlainRing, coded, difference, neighbours
from tests.comm.nodes import live_on_nodes
from tests.comm.ranks import run_ranks_to_the_end

STEPS = 5


class PlainNodes(PlainRing):
    """The exchange of all nodes at once: averages inside them, whose shards are coded each by itself."""

    def __init__(self, settings: LowPrecisionDecentralized, sizes: Sequence[int]) -> None:
        super().__init__(settings, len(sizes))
        self.sizes = list(sizes)

    def __call__(self, step: int, weights: torch.Tensor) -> torch.Tensor:
        if step % self.settings.communication_interval != 0:
            return weights
        averages = [node.mean(0) for node in weights.split(self.sizes)]
        if len(averages) > 1:
            own, places = list(self.own), torch.cat(self.places)
            for node, x in enumerate(averages):
                peers = [own[peer] for peer in neighbours(node, len(averages))]
                flat = torch.zeros(self.flat_elements, dtype=torch.float64)
                flat[places] = difference(x, own[node], peers)
                shards = [coded(shard, self.settings.bits) for shard in flat.tensor_split(min(self.sizes))]
                self.own[node] = own[node] + torch.cat(shards)[places]
            averages = self.own
        return torch.stack(averages).repeat_interleave(torch.tensor(self.sizes), 0)


def train_on_nodes(sizes: Sequence[int], algorithms: Sequence[Algorithm], steps: int) -> list[torch.Tensor]:
    live_on_nodes(sizes)
    return train_each(algorithms, steps)


@pytest.mark.parametrize(
    ("sizes", "backend"),
    [
        ((2, 2), "baguanet"),
        ((2, 1), "gloo"),
        ((1, 2, 1), "baguanet"),
        ((4,), "baguanet"),
        ((1, 1), "baguanet"),
    ],
)
def test_every_step_is_that_of_the_written_out_ring_of_nodes(sizes: tuple[int, ...], backend: str) -> None:
    algorithms = [
        LowPrecisionDecentralized(hierarchical=True),
        LowPrecisionDecentralized(hierarchical=True, bits=4, communication_interval=2),
        # Changes nothing as long as nothing drifts.
        LowPrecisionDecentralized(hierarchical=True, check_interval=1, resync_interval=2),
    ]
    found = run_for_tensors(train_on_nodes, sum(sizes), sizes, algorithms, STEPS, backend=backend)
    for index, algorithm in enumerate(algorithms):
        expected = simulate(sum(sizes), STEPS, after_step=PlainNodes(algorithm, sizes))
        assert_same_training([each[index] for each in found], expected)


@keeps_rails
@pytest.mark.parametrize("backend", ["baguanet", "gloo"])
def test_ranks_of_a_node_need_not_follow_one_another(backend: str) -> None:
    algorithm = LowPrecisionDecentralized(hierarchical=True, check_interval=2, resync_interval=4)
    found = run_for_tensors(train_interleaved, 4, algorithm, STEPS, backend=backend)
    plain = PlainNodes(algorithm, (2, 2))

    def mix(step: int, weights: torch.Tensor) -> torch.Tensor:
        mixed = torch.empty_like(weights)
        mixed[BY_NODE] = plain(step, weights[BY_NODE])
        return mixed

    assert_same_training(found, simulate(4, STEPS, after_step=mix))


def train_through_a_cut(sizes: Sequence[int]) -> list[torch.Tensor]:
    live_on_nodes(sizes)
    settings = LowPrecisionDecentralized(hierarchical=True)
    return [train_through(settings, STEPS), train_through(settings, STEPS, cut=3)]


@pytest.mark.parametrize("sizes", [(2, 2), (2, 1)])
def test_a_resumed_training_is_that_without_a_pause_bit_for_bit(sizes: tuple[int, ...]) -> None:
    for through, resumed in run_for_tensors(train_through_a_cut, sum(sizes), sizes):
        assert torch.equal(through, resumed)


def wrapped(algorithm: LowPrecisionDecentralized) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    net = Net()
    optimizer = make_optimizer(net)
    return DistributedDataParallel(net, optimizers=[optimizer], algorithm=algorithm), optimizer


def stepper_of(model: DistributedDataParallel) -> RingStepper:
    stepper = model._session.stepper
    assert isinstance(stepper, RingStepper)
    return stepper


def go_on_by_rail_from_a_ring_of_ranks() -> bool:
    """Whether nobody's copies differ after a step from a state of other shards."""
    live_on_nodes((2, 2))
    before, optimizer = wrapped(LowPrecisionDecentralized(hierarchical=False))
    one_step(before, optimizer, 0, 1, torch.float64)
    after, optimizer = wrapped(LowPrecisionDecentralized(hierarchical=True))
    after.load_algorithm_state_dict(before.algorithm_state_dict())
    one_step(after, optimizer, 1, 1, torch.float64)
    stepper = stepper_of(after)
    stepper.finish()
    return stepper.steps == 2 and stepper._differing_links() == []


def test_a_state_of_other_shards_is_gone_on_from_with_weights_sent_in_full() -> None:
    assert run_for_tensors(go_on_by_rail_from_a_ring_of_ranks, 4) == [True] * 4


def go_on_with_two_workers_a_node(before: dict[str, Any]) -> bool:
    """From what a ring of one node left: whether nobody's copies differ after a step."""
    live_on_nodes((2, 2))
    model, optimizer = wrapped(LowPrecisionDecentralized(hierarchical=True))
    model.load_algorithm_state_dict(before)
    one_step(model, optimizer, 1, 1, torch.float64)
    stepper = stepper_of(model)
    stepper.finish()
    return stepper.steps == 2 and stepper._differing_links() == []


def state_after_a_step_on_one_node() -> dict[str, Any]:
    live_on_nodes((2,))
    model, optimizer = wrapped(LowPrecisionDecentralized(hierarchical=True))
    one_step(model, optimizer, 0, 1, torch.float64)
    return model.algorithm_state_dict()


def test_a_state_of_one_node_is_gone_on_from_on_two() -> None:
    before = run_for_tensors(state_after_a_step_on_one_node, 2)[0]
    assert run_for_tensors(go_on_with_two_workers_a_node, 4, before) == [True] * 4


def train_with_a_damaged_copy() -> tuple[list[str], bool]:
    live_on_nodes((2, 2))
    model, optimizer = wrapped(LowPrecisionDecentralized(hierarchical=True, check_interval=3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(8):
            one_step(model, optimizer, step, 1, torch.float64)
            if step == 3 and dist.get_rank() == 3:
                stepper_of(model).finish()
                stepper_of(model)._copies[0][0][3] += 2**-20
    stepper_of(model).finish()
    texts = [str(each.message) for each in caught if "low_precision" in str(each.message)]
    return texts, stepper_of(model)._differing_links() == []


def test_a_copy_that_drifted_is_found_on_its_rail_and_sent_again() -> None:
    for rank, (texts, fits) in enumerate(run_for_tensors(train_with_a_damaged_copy, 4)):
        assert fits
        assert len(texts) == (1 if rank in (1, 3) else 0)
        if texts:
            assert f"in step 6 this rank ({rank}) and rank {4 - rank} found" in texts[0]


def bytes_of_one_exchange(sizes: Sequence[int]) -> int:
    live_on_nodes(sizes)
    net = torch.nn.Linear(512, 512, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    algorithm = LowPrecisionDecentralized(hierarchical=True)
    model = DistributedDataParallel(net, optimizers=[optimizer], algorithm=algorithm)
    model(torch.ones(1, 512)).sum().backward()
    optimizer.step()
    return model.stats().bytes_sent


def test_only_a_ranks_shard_leaves_the_node_with_a_byte_per_number() -> None:
    numbers = 512 * 512
    for found in run_for_tensors(bytes_of_one_exchange, 4, (2, 2)):
        # Inside the node, in fp32: half of the weights to the other owner, half of them back.
        assert 1 <= (found - 4 * numbers) / (numbers / 2) < 1.01


def exchange_until_a_peer_dies(victim: int) -> str:
    live_on_nodes((2, 2))
    model, optimizer = wrapped(LowPrecisionDecentralized(hierarchical=True))
    for step in range(6):
        if step == 3 and dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            one_step(model, optimizer, step, 1, torch.float64)
        except CommunicationError as error:
            return str(error)
    raise AssertionError("the loss of a peer went unnoticed")


def test_a_killed_peer_is_an_error_on_every_survivor() -> None:
    outcomes = run_ranks_to_the_end(exchange_until_a_peer_dies, 4, 2, timeout=timedelta(seconds=20))
    assert outcomes[2].died
    for rank in (0, 1, 3):
        assert outcomes[rank].error is None, outcomes[rank].traceback
        if rank == 0:
            assert "(its ranks are the World's 0, 2): rank 1 (" in outcomes[rank].value
            assert blamed(outcomes[rank].value) == 2
        else:
            assert "(its ranks are the World's" in outcomes[rank].value, outcomes[rank].value
