from __future__ import annotations

import inspect
import io
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from baguarun.comm.algorithms import LowPrecisionDecentralized, device_differences, resolve
from baguarun.comm.algorithms.device_differences import DeviceDifferences
from baguarun.comm.algorithms.low_precision_decentralized import RingStepper
from baguarun.comm.ddp import DistributedDataParallel
from baguarun.comm.extension import load_extension
from baguarun.errors import CommunicationError, UsageError
from baguarun.torch_api.algorithms.base import Algorithm as BaguaAlgorithm
from baguarun.torch_api.algorithms.decentralized import LowPrecisionDecentralizedAlgorithm
from tests.comm.algorithms.simulation import (
    Net,
    assert_same_training,
    make_optimizer,
    one_step,
    run_for_tensors,
    set_weights,
    simulate,
    train_each,
    weights_of,
)
from tests.comm.ranks import run_ranks, run_ranks_to_the_end

STEPS = 7
PIECE = 128 * 1024
"""Numbers that are encoded together."""
WIRES = {8: "MINMAX8", 4: "MINMAX4"}


def coded(values: torch.Tensor, bits: int) -> torch.Tensor:
    """What `values` come out as after encoding and decoding, in their own type."""
    extension = load_extension()
    wire = extension.Wire.__members__[WIRES[bits]]
    pieces = [
        extension.decode(extension.encode(piece, wire), wire, piece.numel(), torch.float32)
        for piece in values.float().split(PIECE)
    ]
    return torch.cat(pieces).to(values.dtype)


def difference(x: torch.Tensor, own: torch.Tensor, copies: Sequence[torch.Tensor]) -> torch.Tensor:
    """t = x + L/3 + R/3 - (5/3)w, or x + L/2 - (3/2)w of two ranks; written so that no change gives zero."""
    return (x - own) + torch.stack([copy - own for copy in copies]).sum(0) / (len(copies) + 1)


def neighbours(rank: int, world_size: int) -> list[int]:
    return [1 - rank] if world_size == 2 else [(rank - 1) % world_size, (rank + 1) % world_size]


class PlainRing:
    """The exchange of all ranks at once: w of each, which the neighbours' copies equal."""

    def __init__(self, settings: LowPrecisionDecentralized, world_size: int) -> None:
        self.settings = settings
        self.own = [weights_of(Net())] * world_size
        # Parameters begin at multiples of 64 bytes in the buffer that is coded.
        self.places = []
        start = 0
        for parameter in Net().parameters():
            if parameter.requires_grad:
                self.places.append(torch.arange(start, start + parameter.numel()))
                start += -(-parameter.numel() // 8) * 8
        self.flat_elements = start

    def __call__(self, step: int, weights: torch.Tensor) -> torch.Tensor:
        if step % self.settings.communication_interval != 0:
            return weights
        world_size = len(weights)
        own = list(self.own)
        for rank, x in enumerate(weights):
            change = difference(x, own[rank], [own[peer] for peer in neighbours(rank, world_size)])
            flat = torch.zeros(self.flat_elements, dtype=torch.float64)
            flat[torch.cat(self.places)] = change
            self.own[rank] = own[rank] + coded(flat, self.settings.bits)[torch.cat(self.places)]
        return torch.stack(self.own)


@pytest.mark.parametrize(
    ("world_size", "backend", "micro_batches"), [(2, "gloo", 2), (3, "baguanet", 1), (4, "baguanet", 2)]
)
def test_every_step_is_that_of_the_written_out_ring(
    world_size: int, backend: str, micro_batches: int
) -> None:
    algorithms = [
        LowPrecisionDecentralized(),
        LowPrecisionDecentralized(bits=4),
        LowPrecisionDecentralized(communication_interval=3),
        # Neither changes anything as long as nothing drifts.
        LowPrecisionDecentralized(check_interval=1),
        LowPrecisionDecentralized(resync_interval=2),
    ]
    found = run_for_tensors(train_each, world_size, algorithms, STEPS, micro_batches, backend=backend)
    for index, algorithm in enumerate(algorithms):
        mix = PlainRing(algorithm, world_size)
        expected = simulate(world_size, STEPS, after_step=mix, micro_batches=micro_batches)
        assert_same_training([each[index] for each in found], expected)


def make_exchange(kind: str, bits: int, replicas: list[Any]) -> Any:
    """The one of the CPU, or the one that is enqueued on accelerators."""
    group, extension = dist.group.WORLD, load_extension()
    assert group is not None
    wire = extension.Wire.__members__[WIRES[bits]]
    if kind == "enqueued":
        return DeviceDifferences(group, wire, replicas, neighbours(dist.get_rank(), dist.get_world_size()))
    return extension.DifferenceExchange(group, wire, replicas)


def exchange_large_buffers(kind: str, dtype: torch.dtype, bits: int) -> None:
    """Raises unless w follows the formula and neighbours' copies equal it, bit for bit, in every round."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    replicas = []
    # Several pieces, one that ends inside of a block, and less than a block.
    for num_elements in (2 * PIECE + 2048 + 77, PIECE, 5):
        x = torch.zeros(num_elements, dtype=dtype)
        own = torch.zeros(num_elements, dtype=state_dtype)
        replicas.append((x, own, [own.clone() for _ in neighbours(rank, world_size)]))
    exchange = make_exchange(kind, bits, replicas)
    for _ in range(3):
        exchange.wait()
        expected = []
        for x, own, copies in replicas:
            x.add_(torch.randn(x.numel()).to(dtype))
            change = difference(x.to(state_dtype), own, copies)
            expected.append(own + coded(change, bits))
        exchange.start()
        for (x, own, _), wanted in zip(replicas, expected, strict=True):
            assert torch.equal(own, wanted)
            assert torch.equal(x, own.to(dtype))
        exchange.wait()
        everyone: list[list[torch.Tensor]] = [[] for _ in range(world_size)]
        dist.all_gather_object(everyone, [own for _, own, _ in replicas])
        for index, (_, _, copies) in enumerate(replicas):
            for peer, copy in zip(neighbours(rank, world_size), copies, strict=True):
                assert torch.equal(copy, everyone[peer][index])


@pytest.mark.parametrize("kind", ["on the host", "enqueued"])
@pytest.mark.parametrize(
    ("world_size", "dtype", "bits"),
    [(2, torch.float32, 8), (3, torch.bfloat16, 4), (4, torch.float32, 4), (4, torch.float64, 8)],
)
def test_copies_equal_what_they_are_copies_of(
    world_size: int, dtype: torch.dtype, bits: int, kind: str
) -> None:
    run_for_tensors(exchange_large_buffers, world_size, kind, dtype, bits)


def exchange_with_and_without_waiting(kind: str, bits: int) -> None:
    """Raises unless what comes in on the way of the next exchange makes the same bits as if waited for."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    found = []
    for waits in (True, False):
        torch.manual_seed(rank)
        replicas = []
        for num_elements in (2 * PIECE + 3 * 2048 + 77, 5):
            own = torch.zeros(num_elements)
            copies = [own.clone() for _ in neighbours(rank, world_size)]
            replicas.append((own.clone(), own, copies))
        exchange = make_exchange(kind, bits, replicas)
        for _ in range(4):
            for x, _, _ in replicas:
                x.add_(torch.randn(x.numel()))
            exchange.start()
            if waits:
                exchange.wait()
        exchange.wait()
        found.append([tensor for x, own, copies in replicas for tensor in (x, own, *copies)])
    for waited_for, taken_in_passing in zip(*found, strict=True):
        assert torch.equal(waited_for, taken_in_passing)


@pytest.mark.parametrize("kind", ["on the host", "enqueued"])
@pytest.mark.parametrize(("world_size", "bits"), [(2, 8), (3, 4)])
def test_what_came_meanwhile_is_taken_in_by_the_next_exchange(world_size: int, bits: int, kind: str) -> None:
    run_for_tensors(exchange_with_and_without_waiting, world_size, kind, bits)


def hold_a_piece_back() -> None:
    """Rank 1 plays a neighbour whose last piece is late. Raises unless rank 0 goes on before that."""
    num_elements, bound = 2 * PIECE + 5, timedelta(seconds=30)
    if dist.get_rank() == 0:
        own = torch.zeros(num_elements)
        exchange = make_exchange("on the host", 8, [(torch.randn(num_elements), own, [own.clone()])])
        exchange.start()
        exchange.start()
        exchange.wait()
        return
    extension = load_extension()
    wire = extension.Wire.MINMAX8
    messages = [extension.encode(piece, wire) for piece in torch.zeros(num_elements).split(PIECE)]

    def tag(exchange: int, piece: int) -> int:
        # As messageTag in cpp_ext/engine/transfers.h.
        return exchange << 19 | piece << 1

    come = {
        (exchange, piece): dist.irecv(messages[piece].clone(), 0, tag=tag(exchange, piece))
        for exchange in (1, 2)
        for piece in range(3)
    }
    sent = [dist.isend(messages[piece], 0, tag=tag(1, piece)) for piece in (0, 1)]
    come[2, 1].wait(bound)
    sent += [dist.isend(messages[piece], 0, tag=tag(exchange, piece)) for exchange, piece in ((1, 2), (2, 0))]
    sent += [dist.isend(messages[piece], 0, tag=tag(2, piece)) for piece in (1, 2)]
    for work in (*come.values(), *sent):
        work.wait(bound)


def test_the_next_exchange_waits_for_no_more_than_the_piece_that_is_its_turn() -> None:
    run_ranks(hold_a_piece_back, 2)


def one_buffer() -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    return torch.randn(3000), torch.zeros(3000), [torch.randn(3000)]


def test_an_enqueued_exchange_that_broke_stays_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise CommunicationError("the network is gone")

    monkeypatch.setattr(device_differences, "start_messages", fail)
    x, own, copies = one_buffer()
    wire = load_extension().Wire.MINMAX8
    exchange = DeviceDifferences(cast("dist.ProcessGroup", None), wire, [(x, own, copies)], [1])
    with pytest.raises(CommunicationError, match="the network is gone"):
        exchange.start()
    weights = x.clone()
    for again in (exchange.start, exchange.join, exchange.wait):
        with pytest.raises(CommunicationError, match="the network is gone"):
            again()
    assert torch.equal(x, weights)


def test_a_message_that_never_came_adds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    extension = load_extension()
    wire = extension.Wire.MINMAX8
    change = torch.ones(3000)
    messages = [extension.encode(change, wire)]

    class Ended:
        """Work that has ended, or was broken off: of NCCL's nobody on the host hears of that in time."""

        def wait(self) -> bool:
            return True

    def receive_once(_group: Any, _sent: Any, received: list[tuple[int, list[torch.Tensor]]]) -> list[Ended]:
        if messages:
            received[0][1][0].copy_(messages.pop())
        return [Ended()]

    monkeypatch.setattr(device_differences, "start_messages", receive_once)
    x, own, copies = one_buffer()
    before = copies[0].clone()
    exchange = DeviceDifferences(cast("dist.ProcessGroup", None), wire, [(x, own, copies)], [1])
    for _ in range(3):
        exchange.start()
    exchange.wait()
    assert torch.equal(copies[0], before + change)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_checksum_of_the_device_sees_every_bit_and_its_place(dtype: torch.dtype) -> None:
    tensors = [torch.arange(1.0, 50.0, dtype=dtype), torch.zeros(3, dtype=dtype)]
    words = [tensor.view(torch.int32) for tensor in tensors]
    sums = {device_differences.checksum(tensors)}
    changes = 0
    for view in words:
        for place in range(view.numel()):
            for bit in (0, 15, 31):
                change = (1 << bit) - (1 << 32 if bit == 31 else 0)
                view[place] ^= change
                sums.add(device_differences.checksum(tensors))
                view[place] ^= change
                changes += 1
    tensors[0][[4, 40]] = tensors[0][[40, 4]]
    sums.add(device_differences.checksum(tensors))
    assert len(sums) == changes + 2


def ring(model: DistributedDataParallel) -> RingStepper:
    stepper = model._session.stepper
    assert isinstance(stepper, RingStepper)
    return stepper


def train_with_a_damaged_copy(check_interval: int, interval: int = 1) -> tuple[list[str], bool]:
    """Rank 1's copy of rank 0 is damaged in step 3. What was warned of, and whether all fits at last."""
    net = Net()
    optimizer = make_optimizer(net)
    algorithm = LowPrecisionDecentralized(check_interval=check_interval, communication_interval=interval)
    model = DistributedDataParallel(net, optimizers=[optimizer], algorithm=algorithm)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(8):
            one_step(model, optimizer, step, 1, torch.float64)
            if step == 3 and dist.get_rank() == 1:
                ring(model).finish()
                ring(model)._copies[0][0][3] += 2**-20
    ring(model).finish()
    texts = [str(each.message) for each in caught if "low_precision" in str(each.message)]
    return texts, ring(model)._differing_links() == []


# The third exchange from the start, or the sixth: every third one is checked.
@pytest.mark.parametrize(("interval", "found_in"), [(1, 6), (2, 5)])
def test_a_copy_that_drifted_is_found_sent_again_and_warned_of_by_both_ends(
    interval: int, found_in: int
) -> None:
    for rank, (texts, fits) in enumerate(run_for_tensors(train_with_a_damaged_copy, 4, 3, interval)):
        assert fits
        assert len(texts) == (1 if rank in (0, 1) else 0)
        if texts:
            assert f"in step {found_in} this rank ({rank}) and rank {1 - rank} found" in texts[0]


def test_without_checks_a_damaged_copy_stays_damaged() -> None:
    found = run_for_tensors(train_with_a_damaged_copy, 4, 0)
    assert [(texts, fits) for texts, fits in found] == [([], False), ([], False), ([], True), ([], True)]


def train_halves(settings: LowPrecisionDecentralized, cut: int | None) -> torch.Tensor:
    """Trains through; at `cut` all goes through a checkpoint of each rank's own into a new model."""
    net = Net()
    optimizer = make_optimizer(net)
    model = DistributedDataParallel(net, optimizers=[optimizer], algorithm=settings)
    for step in range(STEPS):
        if step == cut:
            file = io.BytesIO()
            torch.save([model.state_dict(), optimizer.state_dict(), model.algorithm_state_dict()], file)
            file.seek(0)
            weights, inner, state = torch.load(file)
            net = Net()
            optimizer = make_optimizer(net)
            model = DistributedDataParallel(net, optimizers=[optimizer], algorithm=settings, init_sync=False)
            model.load_state_dict(weights)
            optimizer.load_state_dict(inner)
            model.load_algorithm_state_dict(state)
        one_step(model, optimizer, step, 1, torch.float64)
    return weights_of(net)


def train_with_and_without_a_cut() -> list[torch.Tensor]:
    """Of three steps the first one ends with an exchange; cut before it, behind it and between."""
    settings = LowPrecisionDecentralized(communication_interval=3)
    return [train_halves(settings, cut) for cut in (None, 3, 4, 5)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_resumed_training_is_that_without_a_pause_bit_for_bit(world_size: int) -> None:
    for through, *resumed in run_for_tensors(train_with_and_without_a_cut, world_size):
        assert all(torch.equal(through, other) for other in resumed)


def start_from_different_weights() -> tuple[torch.Tensor, bool]:
    """A step of ranks whose weights were not made equal, with a state from a World of another size."""
    net = Net()
    with torch.no_grad():
        set_weights(net, weights_of(net) + dist.get_rank())
    optimizer = make_optimizer(net)
    model = DistributedDataParallel(
        net, optimizers=[optimizer], algorithm=LowPrecisionDecentralized(), init_sync=False
    )
    state = model.algorithm_state_dict()
    state["copies"] = state["copies"][:1]
    model.load_algorithm_state_dict(state)
    one_step(model, optimizer, 0, 1, torch.float64)
    ring(model).finish()
    return weights_of(net) - weights_of(Net()), ring(model)._differing_links() == []


def test_ranks_that_do_not_know_each_others_weights_send_them_in_full() -> None:
    found = run_for_tensors(start_from_different_weights, 3)
    for change, fits in found:
        assert fits
        # They began at 0, 1 and 2 above, and a third each is the average; the step itself moved a few, too.
        assert (change - 1).abs().median() < 0.05


def load_a_wrong_state() -> str:
    def wrap(net: torch.nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(
            net, optimizers=[torch.optim.SGD(net.parameters())], algorithm="low_precision_decentralized"
        )

    with pytest.raises(UsageError) as caught:
        wrap(torch.nn.Linear(3, 4)).load_algorithm_state_dict(
            wrap(torch.nn.Linear(30, 4)).algorithm_state_dict()
        )
    return str(caught.value)


def test_the_state_of_another_model_is_refused() -> None:
    for message in run_for_tensors(load_a_wrong_state, 2):
        assert "want the state of the same model" in message


def count_bytes() -> tuple[int, int]:
    net = torch.nn.Linear(1000, 300)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sent = []
    for bits in (8, 4):
        model = DistributedDataParallel(
            net, optimizers=[optimizer], algorithm=LowPrecisionDecentralized(bits=bits)
        )
        model(torch.ones(1, 1000)).sum().backward()
        optimizer.step()
        sent.append(model.stats().bytes_sent)
    return sent[0], sent[1]


@pytest.mark.parametrize(("world_size", "messages"), [(2, 1), (3, 2)])
def test_each_neighbour_is_sent_a_byte_or_half_a_byte_per_number(world_size: int, messages: int) -> None:
    for eight, four in run_for_tensors(count_bytes, world_size):
        assert 1 <= eight / (messages * 300_300) < 1.01
        assert 0.5 <= four / (messages * 300_300) < 0.51


def lose_a_neighbour() -> None:
    net = Net()
    optimizer = make_optimizer(net)
    model = DistributedDataParallel(net, optimizers=[optimizer], algorithm="low_precision_decentralized")
    for step in range(20):
        if step == 2 and dist.get_rank() == 1:
            raise SystemExit
        one_step(model, optimizer, step, 1, torch.float64)


def test_a_neighbour_that_is_gone_ends_the_next_step_with_its_name() -> None:
    outcomes = run_ranks_to_the_end(lose_a_neighbour, 3)
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome.error, CommunicationError)
        assert "rank 1" in str(outcome.error)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 2}, "bits=2; want one of 8, 4"),
        ({"communication_interval": 0}, "want 1 <= communication_interval"),
        ({"check_interval": -1}, "want 0 <= check_interval"),
        ({"resync_interval": -1}, "want 0 <= resync_interval"),
    ],
)
def test_a_setting_out_of_range_is_refused_with_its_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        LowPrecisionDecentralized(**settings)


def test_it_is_known_by_name_and_by_baguas_names() -> None:
    assert resolve("low_precision_decentralized") == LowPrecisionDecentralized()
    theirs = BaguaAlgorithm.init("low_precision_decentralized")
    assert theirs == LowPrecisionDecentralizedAlgorithm(hierarchical=True)
    assert isinstance(theirs, LowPrecisionDecentralized)
    assert list(inspect.signature(LowPrecisionDecentralizedAlgorithm).parameters) == [
        "hierarchical",
        "communication_interval",
    ]
