"""Collectives of baguanet through torch.distributed, against a plain loop over the ranks' inputs."""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.comm.ranks import run_ranks

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
COMPLEX = [torch.complex64, torch.complex128]
MOVED = [*FLOATS, *SIGNED, *UNSIGNED, *COMPLEX, torch.bool, torch.float8_e4m3fn]
SIZES = [0, 1, 7, 4096, 70_001]


def values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Rank `rank`'s input: small whole numbers, which every type holds and adds exactly."""
    numbers = (torch.arange(count) * 7 + rank * 3) % 5
    if dtype.is_complex:
        return torch.complex(numbers.double(), numbers.double() - rank).to(dtype)
    return (numbers % 2 == 0) if dtype is torch.bool else numbers.to(dtype)


def inputs(count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [values(rank, count, dtype) for rank in range(dist.get_world_size())]


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    # As bytes: not every type has a comparison.
    assert torch.equal(
        found.contiguous().view(-1).view(torch.uint8), wanted.contiguous().view(-1).view(torch.uint8)
    ), (found, wanted)


def total(tensors: list[torch.Tensor]) -> torch.Tensor:
    dtype = tensors[0].dtype
    if dtype in UNSIGNED or dtype is torch.bool:
        summed = functools.reduce(operator.add, [tensor.to(torch.int64) for tensor in tensors])
        return summed.to(dtype)
    return functools.reduce(operator.add, tensors)


def every_reduction() -> None:
    rank = dist.get_rank()
    for dtype in [*FLOATS, *SIGNED, *UNSIGNED, *COMPLEX, torch.bool]:
        for count in SIZES:
            tensor = values(rank, count, dtype)
            dist.all_reduce(tensor)
            same(tensor, total(inputs(count, dtype)))
    folds: list[tuple[dist.ReduceOp.RedOpType, list[torch.dtype], Callable[..., torch.Tensor]]] = [
        (dist.ReduceOp.MIN, [*FLOATS, *SIGNED, torch.uint8], torch.minimum),
        (dist.ReduceOp.MAX, [*FLOATS, *SIGNED, torch.uint8], torch.maximum),
        (dist.ReduceOp.PRODUCT, [*FLOATS, *SIGNED, torch.uint8], torch.mul),
        (dist.ReduceOp.BAND, [*SIGNED, torch.uint8, torch.bool], torch.bitwise_and),
        (dist.ReduceOp.BOR, [*SIGNED, torch.uint8, torch.bool], torch.bitwise_or),
        (dist.ReduceOp.BXOR, [*SIGNED, torch.uint8, torch.bool], torch.bitwise_xor),
    ]
    for op, dtypes, fold in folds:
        for dtype in dtypes:
            tensor = values(rank, 301, dtype)
            dist.all_reduce(tensor, op=op)
            same(tensor, functools.reduce(fold, inputs(301, dtype)))


def averages_and_scaled_sums() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in FLOATS:
        tensor = values(rank, 999, dtype)
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
        wanted = (total([each.double() for each in inputs(999, dtype)]) / size).to(dtype)
        torch.testing.assert_close(tensor, wanted)
    tensor = values(rank, 99, torch.float32)
    dist.all_reduce(tensor, op=dist._make_nccl_premul_sum(0.5))
    same(tensor, total(inputs(99, torch.float32)) * 0.5)
    whole = values(rank, 4 * size, torch.float32)
    before, part = whole.clone(), torch.empty(4)
    dist.reduce_scatter_tensor(part, whole, op=dist._make_nccl_premul_sum(torch.tensor([0.25])))
    same(part, total(inputs(4 * size, torch.float32)).chunk(size)[rank] * 0.25)
    same(whole, before)


def everything_that_moves() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in MOVED:
        for count in SIZES:
            wanted = inputs(count, dtype)
            for root in (0, size - 1):
                tensor = values(rank, count, dtype)
                dist.broadcast(tensor, src=root)
                same(tensor, wanted[root])
                gathered = [torch.empty_like(tensor) for _ in range(size)] if rank == root else None
                dist.gather(values(rank, count, dtype), gathered, dst=root)
                for found, want in zip(gathered or [], wanted, strict=False):
                    same(found, want)
                dist.scatter(tensor, wanted if rank == root else None, src=root)
                same(tensor, wanted[rank])
            listed = [torch.empty(count, dtype=dtype) for _ in range(size)]
            dist.all_gather(listed, values(rank, count, dtype))
            whole = torch.empty(count * size, dtype=dtype)
            dist.all_gather_into_tensor(whole, values(rank, count, dtype))
            same(whole, torch.cat(wanted))
            for found, want in zip(listed, wanted, strict=True):
                same(found, want)
    dist.barrier()


def reduce_and_reduce_scatter() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in [*FLOATS, torch.int64, torch.complex64]:
        for count in SIZES:
            for root in (0, size - 1):
                tensor = values(rank, count, dtype)
                dist.reduce(tensor, dst=root)
                mine = values(rank, count, dtype)
                same(tensor, total(inputs(count, dtype)) if rank == root else mine)
            whole = values(rank, count * size, dtype)
            wanted = total(inputs(count * size, dtype)).view(size, count)[rank]
            part = torch.empty(count, dtype=dtype)
            dist.reduce_scatter_tensor(part, whole)
            same(part, wanted)
            # Views of one tensor, and tensors of their own.
            for pieces in ([*whole.view(size, count)], [each.clone() for each in whole.view(size, count)]):
                part = torch.empty(count, dtype=dtype)
                dist.reduce_scatter(part, pieces)
                same(part, wanted)


def all_to_all() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()

    def block(sender: int, receiver: int, dtype: torch.dtype) -> torch.Tensor:
        return values(sender + 2 * receiver, 3 * (sender + 1) * receiver, dtype).view(-1, 3)

    for dtype in MOVED:
        sent = [block(rank, receiver, dtype) for receiver in range(size)]
        wanted = [block(sender, rank, dtype) for sender in range(size)]
        listed = [torch.empty_like(each) for each in wanted]
        dist.all_to_all(listed, sent)
        for found, want in zip(listed, wanted, strict=True):
            same(found, want)
        whole = torch.empty_like(torch.cat(wanted))
        dist.all_to_all_single(
            whole, torch.cat(sent), [len(each) for each in wanted], [len(each) for each in sent]
        )
        same(whole, torch.cat(wanted))
        even = torch.empty(2 * size, dtype=dtype)
        dist.all_to_all_single(even, values(rank, 2 * size, dtype))
        same(even, torch.cat([each.chunk(size)[rank] for each in inputs(2 * size, dtype)]))


def tensors_that_are_not_contiguous() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    wanted = [each.view(4, 6) for each in inputs(24, torch.float32)]
    mine = wanted[rank]

    def spread(tensor: torch.Tensor) -> torch.Tensor:
        """The same values, every other element of a wider tensor, and transposed on odd ranks."""
        if rank % 2:
            return tensor.t().contiguous().t()
        wide = torch.full((*tensor.shape, 2), -1.0)
        wide[..., 0] = tensor
        return wide[..., 0]

    tensor = spread(mine)
    dist.all_reduce(tensor)
    same(tensor, total(wanted))
    tensor = spread(mine)
    dist.broadcast(tensor, src=1)
    same(tensor, wanted[1])
    listed = [spread(torch.zeros(4, 6)) for _ in range(size)]
    dist.all_gather(listed, spread(mine))
    for found, want in zip(listed, wanted, strict=True):
        same(found, want)
    part = spread(torch.zeros(4, 6))
    dist.reduce_scatter(part, [spread(mine + peer) for peer in range(size)])
    same(part, total([each + rank for each in wanted]))
    dist.all_to_all(listed, [spread(mine + peer) for peer in range(size)])
    for found, want in zip(listed, wanted, strict=True):
        same(found, want + rank)
    if rank == 0:
        dist.send(spread(mine), 1)
    if rank == 1:
        tensor = spread(torch.zeros(4, 6))
        dist.recv(tensor, 0)
        same(tensor, wanted[0])
    conjugate = values(rank, 5, torch.complex64).conj()
    group = dist.group.WORLD
    assert group is not None
    # What torch puts in front of a backend copies or refuses a lazy conjugate; a direct call does not.
    group._get_backend(torch.device("cpu")).allreduce([conjugate]).wait()
    torch.testing.assert_close(
        conjugate.resolve_conj(), total(inputs(5, torch.complex64)).conj().resolve_conj()
    )


def tensors_that_autograd_watches() -> None:
    rank = dist.get_rank()
    wide = torch.full((4, 2), float(rank + 1), requires_grad=True)
    column = wide.detach()[:, 0].requires_grad_()
    dist.all_reduce(column)
    assert column.grad_fn is None and column.tolist() == [3.0] * 4
    with torch.inference_mode():
        inference = torch.full((4, 2), float(rank + 1))[:, 0]
    dist.all_reduce(inference, async_op=True).wait()
    assert inference.tolist() == [3.0] * 4


def coalesced() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    assert group is not None
    mixed = ((5, torch.float32), (9, torch.int64), (0, torch.half))
    tensors = [values(rank, count, dtype) for count, dtype in mixed]
    group.allreduce_coalesced(tensors).wait()
    for tensor in tensors:
        same(tensor, total(inputs(tensor.numel(), tensor.dtype)))
    with dist._coalescing_manager(group):
        first, second = values(rank, 4, torch.float32), values(rank, 6, torch.float32)
        dist.all_reduce(first)
        dist.all_reduce(second)
    same(first, total(inputs(4, torch.float32)))
    same(second, total(inputs(6, torch.float32)))
    wholes = [torch.empty(count * size) for count in (3, 8)]
    with dist._coalescing_manager(group):
        for whole in wholes:
            dist.all_gather_into_tensor(whole, values(rank, whole.numel() // size, torch.float32))
    for whole in wholes:
        same(whole, torch.cat(inputs(whole.numel() // size, torch.float32)))
    parts = [torch.empty(count) for count in (3, 8)]
    with dist._coalescing_manager(group):
        for part in parts:
            dist.reduce_scatter_tensor(part, values(rank, part.numel() * size, torch.float32))
    for part in parts:
        same(part, total(inputs(part.numel() * size, torch.float32)).chunk(size)[rank])
    lists = [[torch.empty(2), torch.empty(5)] for _ in range(size)]
    group.allgather_coalesced(lists, [values(rank, 2, torch.float32), values(rank, 5, torch.float32)]).wait()
    for peer, (short, long) in enumerate(lists):
        same(short, values(peer, 2, torch.float32))
        same(long, values(peer, 5, torch.float32))


def objects() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    everyone: list[object] = [None] * size
    dist.all_gather_object(everyone, {"rank": rank, "text": "x" * 1000 * rank})
    assert everyone == [{"rank": peer, "text": "x" * 1000 * peer} for peer in range(size)]
    listed: list[object] = [("from", rank), None]
    dist.broadcast_object_list(listed, src=1)
    assert listed == [("from", 1), None]
    gathered: list[object] | None = [None] * size if rank == 0 else None
    dist.gather_object(rank * rank, gathered)
    assert gathered == ([peer * peer for peer in range(size)] if rank == 0 else None)
    output: list[object] = [None]
    dist.scatter_object_list(output, [f"for {peer}" for peer in range(size)], src=0)
    assert output == [f"for {rank}"]


def many_at_once() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = [torch.full((1 + 97 * number,), float(rank + number)) for number in range(50)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    last = torch.ones(1)
    # Synchronous, behind all the others.
    dist.all_reduce(last)
    assert last.item() == size
    for number, tensor in enumerate(tensors):
        assert tensor[0].item() == sum(peer + number for peer in range(size))
    # In another order than they were started.
    for work in reversed(works):
        assert work.wait() and work.is_completed()


def share_no_memory(folder: Path) -> None:
    """The default group again, of ranks that take themselves to be alone on their hosts."""
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ["NCCL_HOSTID"] = str(rank)
    dist.destroy_process_group()
    store = dist.FileStore(str(folder / "world"), size)
    dist.init_process_group("baguanet", store=store, rank=rank, world_size=size)


Started = tuple[dist.Work | None, torch.Tensor, torch.Tensor]
"""What is waited for, the tensor, and what it is to be then."""


def end(started: list[Started]) -> None:
    for work, _, _ in started:
        assert work is not None
        work.wait()
    # Not one by one: what follows may have been begun.
    for _, found, wanted in started:
        same(found, wanted)


def a_queue_between_hosts(folder: Path) -> None:
    """What is next in the queue sets out before its turn, if it is sent as it lies."""
    share_no_memory(folder)
    rank, size = dist.get_rank(), dist.get_world_size()
    started: list[Started] = []
    for number in range(4):
        count = 50_001 + 9_000 * number
        sums = {dtype: total(inputs(count, dtype)) for dtype in (torch.float32, torch.bfloat16, torch.int64)}
        for dtype, wanted in sums.items():
            tensor = values(rank, count, dtype)
            started.append((dist.all_reduce(tensor, async_op=True), tensor, wanted))
        strided = torch.zeros(count, 2)
        strided[:, 0] = values(rank, count, torch.float32)
        started.append((dist.all_reduce(strided[:, 0], async_op=True), strided[:, 0], sums[torch.float32]))
        scaled = values(rank, count, torch.float32)
        half = dist._make_nccl_premul_sum(0.5)
        started.append((dist.all_reduce(scaled, half, async_op=True), scaled, sums[torch.float32] * 0.5))
        few = values(rank, 7, torch.float32)
        started.append((dist.all_reduce(few, async_op=True), few, total(inputs(7, torch.float32))))
        told = values(rank, count, torch.float32)
        root = number % size
        started.append((dist.broadcast(told, root, async_op=True), told, values(root, count, torch.float32)))
    end(started)


def a_queue_whose_calls_need_each_other(folder: Path) -> None:
    """What the one before it writes must not set out before that has ended."""
    share_no_memory(folder)
    rank, size = dist.get_rank(), dist.get_world_size()
    count = 300_001
    once = total(inputs(count, torch.float32))
    for _ in range(5):
        twice, sliced = (values(rank, count, torch.float32) for _ in range(2))
        strided = torch.zeros(count, 2)
        strided[:, 0] = values(rank, count, torch.float32)
        part = count // 3
        parts_twice = once.clone()
        parts_twice[:part] *= size
        both = torch.stack([once * size, torch.zeros(count)], dim=1)
        works = [
            dist.all_reduce(each, async_op=True)
            for each in (twice, twice, sliced[:part], sliced, strided[:, 0], strided)
        ]
        group = dist.group.WORLD
        assert group is not None
        # Several calls at one place of the queue.
        row = [values(rank, count, torch.float32) for _ in range(3)]
        behind = values(rank, count, torch.float32)
        works += [group.allreduce_coalesced(row), dist.all_reduce(behind, async_op=True)]
        wanted = [once * size, once * size, parts_twice, parts_twice, both, both, once, once]
        found = [twice, twice, sliced, sliced, strided, strided, row[0], behind]
        end([*zip(works, found, wanted, strict=True), (works[-2], row[1], once), (works[-2], row[2], once)])


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    "check",
    [every_reduction, averages_and_scaled_sums, everything_that_moves, reduce_and_reduce_scatter, all_to_all],
    ids=lambda check: check.__name__,
)
def test_it_gives_what_a_loop_over_the_inputs_gives(check: Callable[[], None], world_size: int) -> None:
    run_ranks(check, world_size)


def test_tensors_that_are_not_contiguous_give_the_same() -> None:
    run_ranks(tensors_that_are_not_contiguous, 3)


def test_tensors_that_autograd_or_inference_mode_watch_are_served() -> None:
    run_ranks(tensors_that_autograd_watches, 2)


def test_coalesced_operations_serve_each_tensor() -> None:
    run_ranks(coalesced, 3)


def test_objects_of_different_sizes_travel() -> None:
    run_ranks(objects, 3)


def test_operations_started_together_all_end_in_any_order_of_waits() -> None:
    run_ranks(many_at_once, 3)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "check",
    [a_queue_between_hosts, a_queue_whose_calls_need_each_other],
    ids=lambda check: check.__name__,
)
def test_a_queue_gives_what_its_calls_give_one_by_one(
    check: Callable[[Path], None], world_size: int, tmp_path: Path
) -> None:
    run_ranks(check, world_size, tmp_path)


def refusals() -> list[str]:
    size = dist.get_world_size()
    other = torch.zeros(3)

    def said(call: Callable[[], object]) -> str:
        with pytest.raises(ValueError) as caught:
            call()
        return str(caught.value).split("\n")[0]

    group = dist.group.WORLD
    assert group is not None
    refused = [
        said(lambda: dist.all_reduce(torch.ones(3, dtype=torch.int32), op=dist.ReduceOp.AVG)),
        said(lambda: dist.all_reduce(torch.ones(3), op=dist.ReduceOp.BAND)),
        said(lambda: group.allreduce([torch.ones(3, dtype=torch.complex64)], dist.ReduceOp.MAX)),
        said(lambda: dist.all_reduce(torch.ones(3, dtype=torch.uint16), op=dist.ReduceOp.MIN)),
        said(lambda: dist.all_reduce(torch.ones(3, dtype=torch.float8_e4m3fn))),
        said(lambda: dist.all_reduce(torch.eye(3).to_sparse())),
        said(lambda: dist.all_gather([torch.zeros(3)] * (size + 1), other)),
        said(lambda: dist.all_gather([torch.zeros(4)] * size, other)),
        said(lambda: dist.all_gather_into_tensor(torch.zeros(3 * size + 1), other)),
        said(lambda: dist.all_to_all_single(torch.zeros(4), torch.zeros(4), [3, 2], [2, 2])),
        said(lambda: group.broadcast(other, 7)),
        said(lambda: group.send([other], 5, 0)),
        said(lambda: group.send([other], 0, -3)),
    ]
    # Nobody was disturbed.
    dist.all_reduce(other)
    return refused


def test_wrong_arguments_are_refused_with_what_was_found_and_the_group_lives_on() -> None:
    for refused in run_ranks(refusals, 2):
        wanted = [
            "avg of int32",
            "band of fp32",
            "ComplexFloat",
            "UInt16",
            "Float8",
            "parse",
            "found 3 tensors; want one for each of 2 ranks",
            "4 Float and 3 Float",
            "7 and 3 elements",
            "split sizes",
            "root 7",
            "destination 5",
            "tag -3",
        ]
        for text, want in zip(refused, wanted, strict=True):
            assert want.lower() in text.lower(), (text, want)
