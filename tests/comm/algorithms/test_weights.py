from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from baguarun.comm.algorithms import ALGORITHMS, StepContext
from baguarun.comm.extension import load_extension
from baguarun.comm.weights import FlatWeights, at_places, pieces_of, replace_as_they_come
from baguarun.errors import UsageError
from tests.comm.ranks import run_ranks


def test_flat_weights_keep_values_strides_and_ties() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Conv2d(3, 4, 2)).to(memory_format=torch.channels_last)
    net[1].weight = net[0].weight
    before = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    strides = net[0].weight.stride()
    flat = FlatWeights(list(net.named_parameters()))
    assert net[1].weight is net[0].weight
    assert net[0].weight.stride() == strides
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter, before[name])
    (buffer,) = flat.buffers
    buffer.add_(1)
    assert torch.equal(net[0].weight, before["0.weight"] + 1)


def test_parameters_that_share_memory_as_two_objects_are_refused() -> None:
    first = nn.Parameter(torch.zeros(10))
    second = nn.Parameter(first.detach()[5:])
    with pytest.raises(UsageError, match="'a' and 'b' share memory"):
        FlatWeights([("a", first), ("b", second)])
    with pytest.raises(UsageError, match="'c' has strides"):
        FlatWeights([("c", nn.Parameter(torch.zeros(10)[::2]))])


def test_a_copy_is_of_the_spare_ones_while_there_are_any_of_its_kind() -> None:
    parameters = [nn.Parameter(torch.ones(100, dtype=dtype)) for dtype in (torch.bfloat16, torch.float64)]
    weights = FlatWeights([(str(index), parameter) for index, parameter in enumerate(parameters)])
    weights.keep_spare(2, exact=True)
    spare = [[each.data_ptr() for each in copy] for copy in weights._spare]
    copies = [weights.empty_copy(exact=exact) for exact in (True, False, True, True)]
    assert [[each.dtype for each in copy] for copy in copies] == [
        [torch.float32, torch.float64],
        [torch.bfloat16, torch.float64],
        [torch.float32, torch.float64],
        [torch.float32, torch.float64],
    ]
    assert all([each.shape for each in copy] == [each.shape for each in weights.buffers] for copy in copies)
    assert [[each.data_ptr() for each in copy] for copy in (copies[0], copies[2])] == spare
    addresses = [each.data_ptr() for copy in copies for each in copy]
    assert len(set(addresses)) == len(addresses)
    weights.keep_spare(1)
    weights.drop_spare()
    assert weights._spare == []


def copies_that_are_left() -> list[int]:
    left = []
    for kind in dict.fromkeys(ALGORITHMS.values()):
        algorithm = kind()
        if algorithm.exchanges_weights:
            weights = FlatWeights(list(nn.Linear(3, 2).named_parameters()))
            algorithm.prepare(weights)
            assert weights._spare
            context = StepContext(weights=weights, lanes=(dist.group.WORLD,))
            algorithm.make_stepper(context)
            left.append(len(weights._spare))
    return left


def test_a_stepper_takes_all_that_was_made_ahead_for_it() -> None:
    for left in run_ranks(copies_that_are_left, 3):
        assert left == [0] * 5


SIZES = (0, 300_001, 0, 70_000, 5, 0)
"""Of buffers, some of them empty."""


def numbered(start: int) -> list[torch.Tensor]:
    """Buffers of these sizes, of two types, with numbers that occur once."""
    return [
        torch.arange(start, start + size, dtype=torch.float32 if index % 2 else torch.float64)
        for index, size in enumerate(SIZES)
    ]


@pytest.mark.parametrize("cuts", [1, 2, 3])
def test_each_piece_has_the_place_that_it_was_cut_out_of(cuts: int) -> None:
    buffers = numbered(0)
    pieces = [piece for buffer in numbered(0) for piece in buffer.tensor_split(cuts)]
    pairs = list(at_places(buffers, pieces))
    assert len(pairs) == len(pieces)
    for mine, piece in pairs:
        assert torch.equal(mine, piece)
        mine.fill_(-1)
    assert all(bool((buffer == -1).all()) for buffer in buffers)


@pytest.mark.parametrize("there_after", [0, 1, 3, 100])
def test_weights_are_replaced_whenever_the_last_piece_comes(there_after: int) -> None:
    buffers, averages = numbered(0), numbered(1_000_000)
    asked = 0

    def are_there() -> bool:
        nonlocal asked
        asked += 1
        return asked > there_after

    pieces = [piece for average in averages for piece in average.tensor_split(2)]
    replace_as_they_come(buffers, iter(pieces), are_there)
    for buffer, wanted in zip(buffers, numbered(1_000_000), strict=True):
        assert torch.equal(buffer, wanted)


@pytest.mark.parametrize("there_after", [0, 2, 100])
@pytest.mark.parametrize("come", [0, 1, 3, 7])
def test_if_a_piece_does_not_come_the_weights_are_what_they_were(there_after: int, come: int) -> None:
    buffers = numbered(0)
    taken: list[torch.Tensor] = []
    changed: list[bool] = []

    def some() -> Iterator[torch.Tensor]:
        for piece in pieces_of(numbered(1_000_000), most=2)[:come]:
            taken.append(piece)
            yield piece
        changed.append(any(bool((buffer >= 1_000_000).any()) for buffer in buffers))
        raise ConnectionError("cut off")

    with pytest.raises(ConnectionError):
        replace_as_they_come(buffers, some(), lambda: len(taken) > there_after)
    for buffer, wanted in zip(buffers, numbered(0), strict=True):
        assert torch.equal(buffer, wanted)
    # Replaced they were, where they came one after the other and had anything in them.
    assert changed == [there_after > 1 and come > 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [0, 1, 1023, 2048, 50_001])
def test_two_tensors_change_places(size: int, dtype: torch.dtype) -> None:
    room = torch.arange(2 * size + 3).to(dtype)
    before = room.clone()
    one, other = room[1 : size + 1], room[size + 2 : 2 * size + 2]
    load_extension().swap_tensors(one, other)
    assert torch.equal(one, before[size + 2 : 2 * size + 2])
    assert torch.equal(other, before[1 : size + 1])
    assert room[[0, size + 1, -1]].tolist() == before[[0, size + 1, -1]].tolist()


@pytest.mark.parametrize("other", [torch.zeros(9), torch.zeros(10).double(), torch.zeros(20)[::2]])
def test_what_does_not_fit_does_not_change_places(other: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="want dense ones on the CPU, of one type and size"):
        load_extension().swap_tensors(torch.ones(10), other)
