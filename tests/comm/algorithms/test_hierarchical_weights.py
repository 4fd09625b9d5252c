"""Algorithms that exchange weights, by rail among nodes that are simulated on this machine."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from baguarun.comm import rail_groups
from baguarun.comm.algorithms import (
    Algorithm,
    AsyncModelAverage,
    Decentralized,
    DiLoCo,
    LocalSGD,
    StepContext,
    Stepper,
)
from baguarun.comm.ddp import DistributedDataParallel
from baguarun.comm.groups import keeps_order
from baguarun.comm.weights import FlatWeights
from baguarun.errors import CommunicationError, UsageError
from tests.comm.algorithms.simulation import (
    assert_same_training,
    run_for_tensors,
    simulate,
    train_each,
)
from tests.comm.algorithms.test_decentralized import MODES, mixing_matrix
from tests.comm.nodes import live_among, live_on_nodes
from tests.comm.ranks import run_ranks, run_ranks_to_the_end

STEPS = 5


def train_on_nodes(sizes: Sequence[int], algorithms: Sequence[Algorithm], steps: int) -> list[torch.Tensor]:
    live_on_nodes(sizes)
    return train_each(algorithms, steps)


def node_mixing(mode: str, exchange: int, sizes: Sequence[int]) -> torch.Tensor:
    """Row r: how much of each rank's weights rank r has after nodes have exchanged their averages."""
    world_size, num_nodes = sum(sizes), len(sizes)
    if mode == "all":
        return mixing_matrix(mode, exchange, world_size)
    node_of = torch.repeat_interleave(torch.arange(num_nodes), torch.tensor(sizes))
    belongs = torch.nn.functional.one_hot(node_of).double()
    averages = belongs.T / torch.tensor(sizes).double().unsqueeze(1)
    if num_nodes == 1:
        return belongs @ averages
    return belongs @ mixing_matrix(mode, exchange, num_nodes) @ averages


@pytest.mark.parametrize(
    ("sizes", "backend"),
    [
        ((2, 2), "gloo"),
        ((2, 1), "baguanet"),
        ((1, 2, 1), "gloo"),
        ((2, 2), "baguanet"),
        ((4,), "baguanet"),
        ((2,), "gloo"),
        ((1, 1), "baguanet"),
    ],
)
def test_nodes_are_the_peers_and_ranks_of_a_node_share_weights(sizes: tuple[int, ...], backend: str) -> None:
    algorithms = [Decentralized(peer_selection_mode=mode, hierarchical=True) for mode in MODES]
    algorithms.append(
        Decentralized(peer_selection_mode="shift_one", hierarchical=True, communication_interval=2)
    )
    found = run_for_tensors(train_on_nodes, sum(sizes), sizes, algorithms, STEPS, backend=backend)
    for index, algorithm in enumerate(algorithms):

        def mix(step: int, weights: torch.Tensor, algorithm: Decentralized = algorithm) -> torch.Tensor:
            interval = algorithm.communication_interval
            if step % interval != 0:
                return weights
            return node_mixing(algorithm.peer_selection_mode, step // interval, sizes) @ weights

        expected = simulate(sum(sizes), STEPS, before_step=mix)
        assert_same_training([each[index] for each in found], expected)


# Ranks by node: torch would sort the second rail, 3 and 2.
INTERLEAVED, BY_NODE = (0, 1, 1, 0), [0, 3, 1, 2]

keeps_rails = pytest.mark.skipif(
    not keeps_order([3, 2]), reason="torch before 2.13 sorts them, and such rails are refused"
)


def train_interleaved(algorithm: Algorithm, steps: int) -> torch.Tensor:
    live_among(INTERLEAVED)
    return train_each([algorithm], steps)[0]


@keeps_rails
@pytest.mark.parametrize("backend", ["baguanet", "gloo"])
def test_ranks_of_a_node_need_not_follow_one_another(backend: str) -> None:
    algorithm = Decentralized(peer_selection_mode="shift_one", hierarchical=True)
    found = run_for_tensors(train_interleaved, 4, algorithm, STEPS, backend=backend)

    def mix(step: int, weights: torch.Tensor) -> torch.Tensor:
        mixed = torch.empty_like(weights)
        mixed[BY_NODE] = node_mixing("shift_one", step, (2, 2)) @ weights[BY_NODE]
        return mixed

    assert_same_training(found, simulate(4, STEPS, before_step=mix))


def refuse_rails_that_torch_would_sort() -> None:
    live_among(INTERLEAVED)
    rail_groups.keeps_order = lambda ranks: list(ranks) == sorted(ranks)
    wanted = Decentralized(peer_selection_mode="shift_one", hierarchical=True)
    with pytest.raises(UsageError, match=r"the ranks of nodes are \(\(0, 3\), \(1, 2\)\)"):
        train_each([wanted], 1)
    # Among all ranks, then.
    train_each([Decentralized(peer_selection_mode="shift_one", hierarchical="auto")], 2)


def test_where_torch_sorts_groups_rails_that_would_differ_are_refused_on_all_ranks() -> None:
    run_ranks(refuse_rails_that_torch_would_sort, 4)


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1)])
def test_averages_of_weights_by_rail_are_those_of_all_ranks(sizes: tuple[int, ...]) -> None:
    algorithms: list[Algorithm] = [
        LocalSGD(local_steps=2, warmup_steps=1, hierarchical=True),
        # An outer step of one along the average change is an average of the weights.
        DiLoCo(local_steps=2, outer_lr=1, outer_momentum=0, hierarchical=True),
    ]
    found = run_for_tensors(train_on_nodes, sum(sizes), sizes, algorithms, STEPS, backend="gloo")
    for index, warmup_steps in enumerate((1, 0)):

        def mix(step: int, weights: torch.Tensor, warmup_steps: int = warmup_steps) -> torch.Tensor:
            ended = step + 1 - warmup_steps
            return weights.mean(0).expand_as(weights) if ended > 0 and ended % 2 == 0 else weights

        expected = simulate(sum(sizes), STEPS, after_step=mix, warmup_steps=warmup_steps)
        assert_same_training([each[index] for each in found], expected)


def drift_together() -> float:
    live_on_nodes((2, 2))
    net = torch.nn.Linear(50, 50, bias=False)
    torch.nn.init.constant_(net.weight, float(dist.get_rank()))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    algorithm = AsyncModelAverage(sync_interval_ms=0, max_staleness_steps=1)
    model = DistributedDataParallel(net, optimizers=[optimizer], algorithm=algorithm, init_sync=False)
    for _ in range(4):
        model(torch.ones(1, 50)).sum().backward()
        optimizer.step()
    stepper = model._session.stepper
    assert stepper is not None and stepper.rails is not None
    stepper.pause()  # type: ignore[attr-defined]
    return net.weight.mean().item()


def test_rounds_in_the_background_go_by_rail_too() -> None:
    assert run_ranks(drift_together, 4, backend="gloo") == pytest.approx([1.5] * 4)


def bytes_of_one_exchange(sizes: Sequence[int], mode: str) -> int:
    live_on_nodes(sizes)
    net = torch.nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    algorithm = Decentralized(peer_selection_mode=mode, hierarchical=True)
    model = DistributedDataParallel(net, optimizers=[optimizer], algorithm=algorithm)
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    return model.stats().bytes_sent


def test_bytes_of_all_levels_are_counted() -> None:
    size = 4 * 64 * 64
    # Half to the owner in the node, half back, half to the other node.
    found = run_ranks(bytes_of_one_exchange, 4, (2, 2), "shift_one", backend="gloo")
    assert found == [3 * size // 2] * 4
    # The leader gives all of it to its node and to the other node; who owns nothing gives to the leader.
    assert run_ranks(bytes_of_one_exchange, 3, (2, 1), "all", backend="gloo") == [2 * size, size, size]


def stepper_of_many_pieces(sizes: Sequence[int], mode: str) -> Stepper:
    """On weights of two types, of 5 and 3 pieces, whose numbers are whole."""
    live_on_nodes(sizes)
    group = dist.new_group()
    rails = rail_groups.join_rails(True, group, torch.device("cpu"), collectives=True, with_few=mode != "all")
    draw = torch.Generator().manual_seed(dist.get_rank())
    parameters = [
        (str(dtype), torch.nn.Parameter(torch.randint(0, 1 << 12, (count,), generator=draw).to(dtype)))
        for dtype, count in ((torch.float32, (5 << 18) + 1), (torch.float64, (3 << 17) + 1))
    ]
    context = StepContext(weights=FlatWeights(parameters), lanes=(group,), rails=rails)
    return Decentralized(peer_selection_mode=mode, hierarchical=True).make_stepper(context)


def all_weights(stepper: Stepper) -> torch.Tensor:
    return torch.cat([buffer.double() for buffer in stepper.context.weights.buffers])


def mixed_in_pieces(sizes: Sequence[int], mode: str) -> torch.Tensor:
    """Before and after."""
    stepper = stepper_of_many_pieces(sizes, mode)
    before = all_weights(stepper)
    stepper.before_forward()
    assert torch.equal(all_weights(stepper), before)
    pending = stepper._pending  # type: ignore[attr-defined]
    pending.is_done = lambda: False
    stepper.before_step()
    return torch.stack([before, all_weights(stepper)])


@pytest.mark.parametrize(
    ("sizes", "backend"), [((2, 2), "gloo"), ((2, 2), "baguanet"), ((2, 1), "gloo"), ((1, 2), "baguanet")]
)
@pytest.mark.parametrize("mode", ["all", "shift_one"])
def test_pieces_of_weights_come_to_their_places(mode: str, sizes: tuple[int, ...], backend: str) -> None:
    found = torch.stack(run_for_tensors(mixed_in_pieces, sum(sizes), sizes, mode, backend=backend))
    wanted = node_mixing(mode, 0, sizes) @ found[:, 0]
    # Thirds are rounded.
    torch.testing.assert_close(found[:, 1], wanted, rtol=0, atol=0 if sizes == (2, 2) else 1e-3)


def broken_between_pieces() -> tuple[bool, bool, bool]:
    """The third piece of five is not spread: whether weights had changed, are as before, and nothing of the
    exchange is kept."""
    stepper = stepper_of_many_pieces((2, 2), "shift_one")
    before = all_weights(stepper)
    rails = stepper.rails
    assert rails is not None
    store = distributed_c10d._get_default_store()
    spread, calls, had_changed = rails._spread, itertools.count(), []

    def fail(shards: Sequence[torch.Tensor]) -> list[dist.Work]:
        if next(calls) == 2:
            # Two have come: the first one is in its place when the second is taken.
            first.wait(10)
            had_changed.append(not torch.equal(all_weights(stepper), before))
            store.set(f"{dist.get_rank()} has come", "")
            store.wait([f"{rank} has come" for rank in range(4)])
            raise RuntimeError("not spread")
        return spread(shards)

    first = threading.Event()
    rails._spread = fail  # type: ignore[method-assign]
    stepper.before_forward()
    pending = stepper._pending  # type: ignore[attr-defined]

    asked = itertools.count()

    def is_done() -> bool:
        if next(asked) == 1:
            first.set()
        return False

    pending.is_done = is_done
    gc.disable()
    left = weakref.ref(pending._exchange)
    text = ""
    try:
        stepper.before_step()
    except CommunicationError as error:
        text = str(error)
    assert "between nodes failed" in text
    stepper._pending = None  # type: ignore[attr-defined]
    del pending
    return had_changed[0], torch.equal(all_weights(stepper), before), left() is None


def test_an_exchange_that_breaks_between_pieces_leaves_the_weights_as_they_were_and_nothing_else() -> None:
    assert run_ranks(broken_between_pieces, 4) == [(True, True, True)] * 4


def exchange_until_a_peer_dies(victim: int) -> str:
    live_on_nodes((2, 2))
    net = torch.nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    algorithm = Decentralized(peer_selection_mode="shift_one", hierarchical=True)
    model = DistributedDataParallel(net, optimizers=[optimizer], algorithm=algorithm)
    for step in range(5):
        if step == 3 and dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
        except CommunicationError as error:
            return str(error)
    raise AssertionError("the loss of a peer went unnoticed")


@pytest.mark.parametrize("backend", ["baguanet", "gloo"])
def test_a_killed_peer_is_an_error_on_every_survivor(backend: str) -> None:
    outcomes = run_ranks_to_the_end(
        exchange_until_a_peer_dies, 4, 2, timeout=timedelta(seconds=20), backend=backend
    )
    assert outcomes[2].died
    for rank in (0, 1, 3):
        assert outcomes[rank].error is None, outcomes[rank].traceback
        assert "between nodes failed" in outcomes[rank].value


@pytest.mark.parametrize("kind", [Decentralized, LocalSGD, DiLoCo, AsyncModelAverage])
def test_what_is_neither_a_bool_nor_auto_is_refused_with_the_choice(kind: type) -> None:
    with pytest.raises(UsageError, match="hierarchical=None; want True, False or 'auto'"):
        kind(hierarchical=None)


def groups_made(sizes: Sequence[int], algorithm: Algorithm) -> int:
    live_on_nodes(sizes)
    net = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = len(distributed_c10d._world.pg_names)
    model = DistributedDataParallel(net, optimizers=[optimizer], algorithm=algorithm)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    return len(distributed_c10d._world.pg_names) - before


@pytest.mark.parametrize(
    ("sizes", "algorithm", "backend", "groups"),
    [
        ((2, 2), AsyncModelAverage(), "baguanet", 1),
        ((2, 2), LocalSGD(), "baguanet", 1),
        # On Gloo four lanes: of each rail, or where it goes among all ranks of these.
        ((2, 2), AsyncModelAverage(), "gloo", 6),
        ((3, 1), AsyncModelAverage(hierarchical=True), "gloo", 6),
        ((2, 2), LocalSGD(hierarchical=False), "gloo", 4),
        ((2, 2), Decentralized(peer_selection_mode="shift_one"), "gloo", 3),
        ((2, 2), Decentralized(peer_selection_mode="shift_one"), "baguanet", 3),
        ((4,), Decentralized(peer_selection_mode="shift_one", hierarchical=True), "baguanet", 1),
    ],
)
def test_groups_of_nodes_and_rails_are_made_for_whom_baguanet_does_not_serve(
    sizes: tuple[int, ...], algorithm: Algorithm, backend: str, groups: int
) -> None:
    assert run_ranks(groups_made, 4, sizes, algorithm, backend=backend) == [groups] * 4
