from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from baguarun.comm.algorithms import Decentralized, resolve
from baguarun.comm.algorithms.decentralized import PeerSelection, choose_peers
from baguarun.comm.algorithms.pending import PendingExchange
from baguarun.comm.algorithms.stepper import StepContext
from baguarun.comm.ddp import DistributedDataParallel
from baguarun.comm.weights import FlatWeights, pieces_of
from baguarun.errors import CommunicationError, UsageError
from tests.comm.algorithms.simulation import (
    assert_same_training,
    run_for_tensors,
    simulate,
    train_each,
    weights_of,
)
from tests.comm.ranks import run_ranks

STEPS = 7
MODES = [mode.value for mode in PeerSelection]


def mixing_matrix(mode: str, exchange: int, world_size: int) -> torch.Tensor:
    """Row r: how much of each rank's weights rank r has afterwards. Written out from the papers."""
    matrix = torch.zeros(world_size, world_size, dtype=torch.float64)
    if mode == "all":
        return matrix + 1 / world_size
    for rank in range(world_size):
        if mode == "exponential":
            hops = [1, 2, 4, 8]
            distances = [hop for hop in hops if hop < world_size]
            other = rank - distances[exchange % len(distances)]
        elif world_size % 2 == 1:
            other = exchange - rank
        else:
            half = world_size // 2
            other = (rank + exchange) % half + half if rank < half else (rank - half - exchange) % half
        matrix[rank, rank] += 0.5
        matrix[rank, other % world_size] += 0.5
    return matrix


@pytest.mark.parametrize(
    ("world_size", "backend", "micro_batches"), [(2, "gloo", 2), (3, "baguanet", 1), (4, "baguanet", 2)]
)
def test_every_step_is_that_of_the_written_out_mixing(
    world_size: int, backend: str, micro_batches: int
) -> None:
    algorithms = [
        Decentralized(peer_selection_mode=mode, communication_interval=interval)
        for mode, interval in [*itertools.product(MODES, [1]), ("shift_one", 3)]
    ]
    found = run_for_tensors(train_each, world_size, algorithms, STEPS, micro_batches, backend=backend)
    for index, algorithm in enumerate(algorithms):

        def mix(step: int, weights: torch.Tensor, algorithm: Decentralized = algorithm) -> torch.Tensor:
            interval = algorithm.communication_interval
            if step % interval != 0:
                return weights
            return mixing_matrix(algorithm.peer_selection_mode, step // interval, world_size) @ weights

        expected = simulate(world_size, STEPS, before_step=mix, micro_batches=micro_batches)
        assert_same_training([each[index] for each in found], expected)


def mixed_in_pieces(mode: str, come_late: bool, is_cut_off: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights before and after one exchange; of its pieces those behind the first may never come."""
    rank = dist.get_rank()
    parameter = nn.Parameter(torch.rand(3 << 18, generator=torch.Generator().manual_seed(rank)))
    weights = FlatWeights([("weight", parameter)])
    stepper = Decentralized(peer_selection_mode=mode).make_stepper(
        StepContext(weights=weights, lanes=(dist.new_group(),))
    )
    before = parameter.detach().clone()
    stepper.before_forward()
    pending = stepper._pending  # type: ignore[attr-defined]
    assert len(pieces_of(weights.buffers)) == 3
    pending.is_done = lambda: not come_late
    if is_cut_off:
        arrivals = pending.arrivals

        def some() -> Iterator[torch.Tensor]:
            yield from list(arrivals())[:1]
            raise CommunicationError("cut off")

        pending.arrivals = some
    with pytest.raises(CommunicationError) if is_cut_off else contextlib.nullcontext():
        stepper.before_step()
    return before, parameter.detach().clone()


@pytest.mark.parametrize("come_late", [False, True])
@pytest.mark.parametrize("mode", ["shift_one", "all"])
def test_a_model_that_travels_in_pieces_is_averaged_as_a_whole_or_not_at_all(
    mode: str, come_late: bool
) -> None:
    (mine, found), (theirs, found_there) = run_for_tensors(mixed_in_pieces, 2, mode, come_late, False)
    assert torch.equal(found, (mine + theirs) / 2)
    assert torch.equal(found_there, found)
    for before, after in run_for_tensors(mixed_in_pieces, 2, mode, come_late, True):
        assert torch.equal(before, after)


def takes_a_piece_whose_counterpart_is_not_sent() -> None:
    """Rank 0 has been sent a piece, and its own is not wanted yet."""
    group = dist.group.WORLD
    assert group is not None
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    mine, theirs = torch.full((1 << 20,), float(rank)), torch.empty(1 << 20)
    if rank == 1:
        sending = dist.isend(mine, 0)
        store.wait(["looked"])
        dist.recv(theirs, 0)
        assert sending is not None
        sending.wait()
        assert bool((theirs == 0).all())
        return
    pending = PendingExchange([mine], [theirs], group, to_rank=1, from_rank=1)
    incoming, outgoing = pending._works
    incoming.wait()
    assert not outgoing.is_completed()
    taken: list[torch.Tensor] = []

    def take() -> None:
        taken.extend(pending.arrivals())
        mine.fill_(-1)

    taking = threading.Thread(target=take)
    taking.start()
    taking.join(0.3)
    came_early = bool(taken)
    store.set("looked", "")
    taking.join()
    assert not came_early
    assert bool((taken[0] == 1).all())


def test_a_piece_has_not_arrived_while_what_goes_out_from_its_place_is_still_needed() -> None:
    run_ranks(takes_a_piece_whose_counterpart_is_not_sent, 2)


@pytest.mark.parametrize("world_size", range(2, 18))
@pytest.mark.parametrize("mode", [PeerSelection.SHIFT_ONE, PeerSelection.EXPONENTIAL])
def test_who_sends_to_whom_is_what_they_receive_from(mode: PeerSelection, world_size: int) -> None:
    met = set()
    for exchange in range(2 * world_size):
        peers = [choose_peers(mode, exchange, rank, world_size) for rank in range(world_size)]
        for rank, mine in enumerate(peers):
            if mine is None:
                continue
            assert mine.to_rank != rank
            there = peers[mine.to_rank]
            assert there is not None
            assert there.from_rank == rank
            met.add((rank, mine.to_rank))
        idle = peers.count(None)
        assert idle == (world_size % 2 if mode is PeerSelection.SHIFT_ONE else 0)
    if mode is PeerSelection.SHIFT_ONE:
        half = world_size // 2
        pairs = world_size * (world_size - 1) if world_size % 2 else 2 * half * half
        assert len(met) == pairs


def mixed_by_exponential(steps: int) -> torch.Tensor:
    """Each rank's weights before the first step and after each; the optimizer leaves them alone."""
    net = nn.Linear(3, 2, dtype=torch.float64)
    with torch.no_grad():
        for parameter in net.parameters():
            # Halves of whole numbers are exact.
            parameter.fill_(3.0 ** dist.get_rank())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    model = DistributedDataParallel(
        net,
        init_sync=False,
        optimizers=[optimizer],
        algorithm=Decentralized(peer_selection_mode="exponential"),
    )
    rows = [weights_of(net)]
    for _ in range(steps):
        model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
        optimizer.step()
        rows.append(weights_of(net))
    return torch.stack(rows)


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_exponential_averages_exactly_after_log2_exchanges(world_size: int) -> None:
    steps = world_size.bit_length() - 1
    found = torch.stack(run_for_tensors(mixed_by_exponential, world_size, steps))
    average = found[:, 0].mean(0)
    assert torch.equal(found[:, steps], average.expand_as(found[:, steps]))
    assert not torch.equal(found[:, steps - 1], average.expand_as(found[:, steps]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peer_selection_mode": "ring"}, "want one of all, shift_one, exponential"),
        ({"communication_interval": 0}, "communication_interval=0; want 1 <= communication_interval"),
    ],
)
def test_a_setting_out_of_range_is_refused_with_its_range(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Decentralized(**settings)  # type: ignore[arg-type]


def test_it_is_known_by_name() -> None:
    assert resolve("decentralized") == Decentralized()
