"""Bagua's primitives on both CPU backends, each against a plain loop over what the ranks give."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import baguarun.torch_api as bagua
from baguarun.torch_api.communication import (
    ArgumentError,
    ReduceOp,
    allreduce_coalesced_inplace,
    broadcast_coalesced,
)
from tests.comm.ranks import run_ranks

pytestmark = pytest.mark.parametrize("backend", ["baguanet", "gloo"])

COUNT = 6
"""Elements per rank and part: as a matrix of two rows in most calls, since shapes do not matter."""


def given(rank: int, parts: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What rank `rank` gives: small whole numbers that differ from rank to rank."""
    return ((torch.arange(parts * COUNT) * 7 + rank * 3) % 5 + 1).to(dtype)


def all_given(parts: int = 1, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [given(rank, parts, dtype) for rank in range(bagua.get_world_size())]


def part(whole: torch.Tensor, index: int) -> torch.Tensor:
    return whole[index * COUNT : (index + 1) * COUNT]


def blank(parts: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((parts * COUNT,), 99, dtype=dtype)


def sends_and_broadcasts() -> None:
    rank, size = bagua.get_rank(), bagua.get_world_size()
    received = blank()
    if rank == 0:
        bagua.send(given(0), 1)
        bagua.recv(received, src=size - 1)
    else:
        bagua.recv(received, rank - 1)
        bagua.send(given(rank), dst=(rank + 1) % size)
    assert torch.equal(received, given((rank - 1) % size))

    for root in range(size):
        tensor = given(rank).view(2, 3)
        bagua.broadcast(tensor, root)
        assert torch.equal(tensor, given(root).view(2, 3))
        found = bagua.broadcast_object({"from": root, "tensor": given(rank)}, root)
        assert found["from"] == root and torch.equal(found["tensor"], given(root))
    tensors = [given(rank), given(rank + 1).view(3, 2)]
    broadcast_coalesced(tensors, src=1)
    assert torch.equal(tensors[0], given(1)) and torch.equal(tensors[1], given(2).view(3, 2))
    bagua.barrier()


def reductions() -> list[tuple[ReduceOp, list[torch.dtype], Callable[..., torch.Tensor]]]:
    floats, whole = [torch.float64, torch.float32, torch.bfloat16], [torch.int64, torch.int32, torch.uint8]
    return [
        (ReduceOp.SUM, floats + whole, operator.add),
        (ReduceOp.PRODUCT, floats + whole, operator.mul),
        (ReduceOp.MIN, floats + whole, torch.minimum),
        (ReduceOp.MAX, floats + whole, torch.maximum),
        (ReduceOp.BAND, whole, torch.bitwise_and),
        (ReduceOp.BOR, whole, torch.bitwise_or),
        (ReduceOp.BXOR, whole, torch.bitwise_xor),
    ]


def reduces() -> None:
    rank, size = bagua.get_rank(), bagua.get_world_size()
    for op, dtypes, fold in reductions():
        for dtype in dtypes:
            wanted = functools.reduce(fold, all_given(dtype=dtype))
            mine, received = given(rank, dtype=dtype), blank(dtype=dtype)
            bagua.allreduce(mine, received, op)
            assert torch.equal(received, wanted) and torch.equal(mine, given(rank, dtype=dtype))
            bagua.allreduce_inplace(mine, op)
            assert torch.equal(mine, wanted)

            root = size - 1
            mine, received = given(rank, dtype=dtype), blank(dtype=dtype)
            bagua.reduce(mine, received, root, op)
            assert torch.equal(received, wanted if rank == root else blank(dtype=dtype))
            assert torch.equal(mine, given(rank, dtype=dtype))
            bagua.reduce_inplace(mine, root, op)
            assert torch.equal(mine, wanted if rank == root else given(rank, dtype=dtype))

            whole = functools.reduce(fold, all_given(size, dtype))
            spread, received = given(rank, size, dtype), blank(dtype=dtype)
            bagua.reduce_scatter(spread, received, op)
            assert torch.equal(received, part(whole, rank))
            bagua.reduce_scatter_inplace(spread, op)
            # As with MPI_IN_PLACE: on every rank at the start, wherever the part was.
            assert torch.equal(part(spread, 0), part(whole, rank))
            assert torch.equal(spread[COUNT:], given(rank, size, dtype)[COUNT:])


def averages() -> None:
    rank, size = bagua.get_rank(), bagua.get_world_size()
    for dtype in (torch.float64, torch.float32):
        wanted = functools.reduce(operator.add, all_given(size, dtype)) / size
        tensor, received = given(rank, size, dtype), blank(dtype=dtype)
        bagua.reduce_scatter(tensor, received, ReduceOp.AVG)
        torch.testing.assert_close(received, part(wanted, rank))
        bagua.allreduce_inplace(tensor, ReduceOp.AVG)
        torch.testing.assert_close(tensor, wanted)
        received = blank(size, dtype)
        bagua.reduce(given(rank, size, dtype), received, 0, ReduceOp.AVG)
        torch.testing.assert_close(received, wanted if rank == 0 else blank(size, dtype))
    with pytest.raises(ArgumentError, match=r"AVG of torch\.int64"):
        bagua.allreduce_inplace(given(rank, dtype=torch.int64), ReduceOp.AVG)
    pair = [given(rank), given(rank + 1).view(2, 3)]
    allreduce_coalesced_inplace(pair)
    assert torch.equal(pair[0], functools.reduce(operator.add, all_given()))
    assert torch.equal(pair[1].view(-1), functools.reduce(operator.add, [given(r + 1) for r in range(size)]))


def gathers_and_scatters() -> None:
    rank, size = bagua.get_rank(), bagua.get_world_size()
    everything = torch.cat(all_given())
    gathered = blank(size).view(size, COUNT)
    bagua.allgather(given(rank), gathered)
    assert torch.equal(gathered.view(-1), everything)
    gathered = blank(size)
    part(gathered, rank).copy_(given(rank))
    bagua.allgather_inplace(gathered)
    assert torch.equal(gathered, everything)

    for root in range(size):
        gathered = blank(size)
        bagua.gather(given(rank), gathered, root)
        assert torch.equal(gathered, everything if rank == root else blank(size))
        tensor = blank(size) if rank == root else given(rank)
        if rank == root:
            part(tensor, root).copy_(given(root))
        bagua.gather_inplace(tensor, COUNT, root)
        assert torch.equal(tensor, everything if rank == root else given(rank))

        dealt = blank()
        bagua.scatter(given(rank, size), dealt, root)
        assert torch.equal(dealt, part(given(root, size), rank))
        tensor = given(root, size) if rank == root else blank()
        bagua.scatter_inplace(tensor, COUNT, root)
        assert torch.equal(tensor, given(root, size) if rank == root else part(given(root, size), rank))


def exchanges() -> None:
    rank, size = bagua.get_rank(), bagua.get_world_size()
    wanted = torch.cat([part(whole, rank) for whole in all_given(size)])
    received = blank(size)
    bagua.alltoall(given(rank, size).view(size, COUNT), received)
    assert torch.equal(received, wanted)
    tensor = given(rank, size)
    bagua.alltoall_inplace(tensor)
    assert torch.equal(tensor, wanted)


def uneven_exchanges() -> None:
    """Rank a sends (a + 2b) % 3 elements to b, some of them none, from places with gaps and in any order."""
    rank, size = bagua.get_rank(), bagua.get_world_size()
    outgoing = [(rank + 2 * peer) % 3 for peer in range(size)]
    incoming = [(peer + 2 * rank) % 3 for peer in range(size)]
    assert 0 in outgoing + incoming
    numbers = [torch.arange(100 * r, 100 * r + 10 * size).float() for r in range(size)]
    for gap in (None, 4):
        if gap is None:
            starts = [sum(outgoing[:peer]) for peer in range(size)]
            targets = [sum(incoming[:peer]) for peer in range(size)] + [sum(incoming)]
        else:
            starts = [gap * (size - 1 - peer) for peer in range(size)]
            targets = [gap * (size - 1 - peer) + 1 for peer in range(size)]
        received = torch.full((4 * size,), -1.0)
        bagua.alltoall_v(numbers[rank], outgoing, starts, received, incoming, targets)
        wanted = torch.full((4 * size,), -1.0)
        for peer, count in enumerate(incoming):
            theirs = [(peer + 2 * other) % 3 for other in range(size)]
            at = sum(theirs[:rank]) if gap is None else gap * (size - 1 - rank)
            wanted[targets[peer] : targets[peer] + count] = numbers[peer][at : at + count]
        assert torch.equal(received, wanted), (received, wanted)

    nothing = torch.empty(0)
    bagua.alltoall_v(nothing, [0] * size, [0] * size, nothing, [0] * size, [0] * size)
    counts = [(rank + peer) % 3 for peer in range(size)]
    tensor = numbers[rank].clone()
    bagua.alltoall_v_inplace(tensor, counts, [5 * peer for peer in range(size)])
    wanted = numbers[rank].clone()
    for peer, count in enumerate(counts):
        wanted[5 * peer : 5 * peer + count] = numbers[peer][5 * rank : 5 * rank + count]
    assert torch.equal(tensor, wanted)


def odd_tensors() -> None:
    """Parameters, strided inputs, empty tensors."""
    rank, size = bagua.get_rank(), bagua.get_world_size()
    parameter = torch.nn.Parameter(given(rank))
    bagua.broadcast(parameter, 1)
    bagua.allreduce_inplace(parameter)
    assert torch.equal(parameter.detach(), size * given(1)) and parameter.is_leaf
    received = blank()
    bagua.allreduce(given(rank, 2)[::2], received)
    assert torch.equal(received, functools.reduce(operator.add, [each[::2] for each in all_given(2)]))
    channels_last_images()
    empty = torch.empty(0)
    bagua.allreduce_inplace(empty)
    bagua.allgather(empty, empty)
    bagua.alltoall_inplace(empty)


def channels_last_images() -> None:
    """Tensors without gaps travel as they lie in memory, where one tensor is both input and output."""
    rank, size = bagua.get_rank(), bagua.get_world_size()

    def image(rank: int, parts: int = 1) -> torch.Tensor:
        plain = given(rank, 4 * parts).view(2 * parts, 3, 2, 2)
        return plain.contiguous(memory_format=torch.channels_last)

    def in_memory(rank: int, parts: int = 1) -> torch.Tensor:
        return image(rank, parts).permute(0, 2, 3, 1).reshape(-1)

    def lies(tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()
        return tensor.permute(0, 2, 3, 1).reshape(-1)

    total = functools.reduce(operator.add, [in_memory(each) for each in range(size)])
    for root in range(size):
        tensor = image(rank)
        bagua.broadcast(tensor, root)
        assert torch.equal(tensor, image(root))
        tensor = image(rank)
        bagua.reduce_inplace(tensor, root)
        assert torch.equal(lies(tensor), total if rank == root else in_memory(rank))
    tensor = image(rank)
    bagua.allreduce_inplace(tensor)
    assert torch.equal(lies(tensor), total)
    tensor = image(rank).transpose(0, 1)
    bagua.allreduce_inplace(tensor)
    assert torch.equal(lies(tensor.transpose(0, 1)), total)
    if size > 1:
        received = torch.empty_like(image(0))
        if rank == 0:
            bagua.send(image(0), 1)
        elif rank == 1:
            bagua.recv(received, 0)
            assert torch.equal(received, image(0))

    part_size = in_memory(0).numel()

    def parts(flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return flat.split(part_size)

    tensor = image(rank, size)
    bagua.alltoall_inplace(tensor)
    wanted = torch.cat([parts(in_memory(each, size))[rank] for each in range(size)])
    assert torch.equal(lies(tensor), wanted)
    counts, starts = [part_size] * size, [part_size * each for each in range(size)]
    bagua.alltoall_v_inplace(tensor, counts, starts)
    assert torch.equal(lies(tensor), in_memory(rank, size))
    bagua.allgather_inplace(tensor)
    gathered = torch.cat([parts(in_memory(each, size))[each] for each in range(size)])
    assert torch.equal(lies(tensor), gathered)
    tensor = image(rank, size) if rank == 0 else image(rank)
    bagua.gather_inplace(tensor, part_size, 0)
    assert rank or torch.equal(
        lies(tensor), torch.cat([parts(in_memory(0, size))[0], *map(in_memory, range(1, size))])
    )
    bagua.scatter_inplace(tensor, part_size, 0)
    assert not rank or torch.equal(lies(tensor), in_memory(rank))
    tensor = image(rank, size)
    bagua.reduce_scatter_inplace(tensor)
    whole = functools.reduce(operator.add, [in_memory(each, size) for each in range(size)])
    assert torch.equal(parts(lies(tensor))[0], parts(whole)[rank])


PROGRAMS = [
    sends_and_broadcasts,
    reduces,
    averages,
    gathers_and_scatters,
    exchanges,
    uneven_exchanges,
    odd_tensors,
]


@pytest.mark.parametrize("world_size", [2, 3])
def test_each_gives_what_a_loop_over_the_ranks_gives(backend: str, world_size: int) -> None:
    run_ranks(runs_all, world_size, backend=backend)


def runs_all() -> None:
    for program in PROGRAMS:
        program()


def test_one_rank_is_a_world_too(backend: str) -> None:
    run_ranks(runs_all_but_messages, 1, backend=backend)


def runs_all_but_messages() -> None:
    for program in (reduces, gathers_and_scatters, exchanges):
        program()
    bagua.barrier()
    with pytest.raises(ArgumentError, match=r"dst=0 is this rank itself"):
        bagua.send(given(0), 0)


def refusals() -> None:
    rank, size = bagua.get_rank(), bagua.get_world_size()
    tensor = given(rank)
    cases: list[tuple[str, Callable[[], object]]] = [
        (
            r"allreduce: send_tensor is torch\.float32 .* recv_tensor torch\.int64",
            lambda: bagua.allreduce(tensor, given(0, dtype=torch.int64)),
        ),
        (r"recv_tensor has 12 elements; want 6", lambda: bagua.allreduce(tensor, given(0, 2))),
        (r"recv_tensor has 6 elements; want 12, which is nranks", lambda: bagua.allgather(tensor, blank())),
        (r"has 1 elements; want a multiple of the 2 ranks", lambda: bagua.alltoall_inplace(torch.ones(1))),
        (r"dst=2; want a rank of the communicator, 0 to 1", lambda: bagua.reduce(tensor, tensor, 2)),
        (r"src=-1", lambda: bagua.broadcast(tensor, -1)),
        (r"this rank itself", lambda: bagua.recv(tensor, rank)),
        (r"op=<RedOpType\.SUM", lambda: bagua.allreduce_inplace(tensor, dist.ReduceOp.SUM)),  # type: ignore[arg-type]
        (r"op=4; want ReduceOp's SUM", lambda: bagua.allreduce_inplace(tensor, 4)),  # type: ignore[arg-type]
        (r"tensor is torch\.sparse_coo", lambda: bagua.broadcast(tensor.to_sparse())),
        (r"not contiguous", lambda: bagua.allreduce(tensor, given(0, 2)[::2])),
        (r"gaps", lambda: bagua.broadcast(given(0, 2)[::2])),
        (r"gaps", lambda: bagua.reduce_inplace(torch.ones(1).expand(6), 0)),
        (r"count", lambda: bagua.gather_inplace(tensor, COUNT + 1, 0)),
        (
            r"1 counts and 2 displacements; want one of each per rank, 2",
            lambda: bagua.alltoall_v(tensor, [6], [0, 0], blank(), [3, 3], [0, 3]),
        ),
        (
            r"for rank 1 is elements 4 to 7 of 6",
            lambda: bagua.alltoall_v(tensor, [3, 3], [0, 4], blank(), [3, 3], [0, 3]),
        ),
        (r"overlap at element 2", lambda: bagua.alltoall_v(tensor, [3, 3], [0, 3], blank(), [3, 3], [0, 2])),
        (r"comm='nccl'", lambda: bagua.barrier("nccl")),  # type: ignore[arg-type]
    ]
    for message, call in cases:
        with pytest.raises(ArgumentError, match=message):
            call()
    assert issubclass(ArgumentError, ValueError)
    # Nothing was sent: the next collective finds all ranks at the same place.
    bagua.allreduce_inplace(tensor)
    assert torch.equal(tensor, functools.reduce(operator.add, all_given())) and size == 2


def test_what_cannot_be_meant_is_refused_before_anything_is_sent(backend: str) -> None:
    run_ranks(refusals, 2, backend=backend)
