"""Collectives of three ranks: what torch's tests of Gloo check beyond plain results."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.torch_suite.suite import Suite, ended, place, sum_of_ranks

SUITE = Suite(world_size=3)
CPU = torch.device("cpu")


def backend() -> dist.Backend:
    group = dist.group.WORLD
    assert group is not None
    return group._get_backend(CPU)


@SUITE.behaviour
def an_empty_tensor_goes_through_every_collective() -> None:
    rank, size = place()
    empty = torch.empty(0)
    for operation in (dist.all_reduce, dist.broadcast, dist.reduce):
        ended(operation(empty, *(() if operation is dist.all_reduce else (0,)), async_op=True))
    dist.all_gather([torch.empty(0) for _ in range(size)], empty)
    dist.gather(empty, [torch.empty(0) for _ in range(size)] if rank == 0 else None)
    dist.scatter(empty, [torch.empty(0) for _ in range(size)] if rank == 0 else None)
    dist.all_to_all_single(torch.empty(0), empty)
    dist.all_gather_into_tensor(torch.empty(0), empty)
    dist.reduce_scatter_tensor(torch.empty(0), empty)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == size


@SUITE.behaviour
def shapes_survive_and_scalars_of_no_dimension_travel() -> None:
    rank, size = place()
    scalar = torch.tensor(float(rank))
    dist.all_reduce(scalar)
    assert scalar.shape == () and scalar.item() == sum_of_ranks()
    cube = torch.full((2, 3, 4), rank)
    dist.broadcast(cube, src=size - 1)
    assert cube.shape == (2, 3, 4) and cube.eq(size - 1).all()
    gathered = [torch.tensor(-1.0) for _ in range(size)]
    dist.all_gather(gathered, torch.tensor(float(rank)))
    assert [each.item() for each in gathered] == list(range(size))


@SUITE.behaviour
def every_rank_may_be_the_root() -> None:
    rank, size = place()
    for root in range(size):
        tensor = torch.tensor([rank, rank + 1])
        dist.broadcast(tensor, src=root)
        assert tensor.tolist() == [root, root + 1]
        tensor = torch.tensor([rank + 1])
        dist.reduce(tensor, dst=root, op=dist.ReduceOp.PRODUCT)
        if rank == root:
            assert tensor.item() == 6
        parts = [torch.tensor([10 * root + peer]) for peer in range(size)] if rank == root else None
        dist.scatter(tensor, parts, src=root)
        assert tensor.item() == 10 * root + rank
        rows = [torch.empty(1, dtype=torch.int64) for _ in range(size)] if rank == root else None
        dist.gather(torch.tensor([rank]), rows, dst=root)
        assert rows is None or [row.item() for row in rows] == list(range(size))


@SUITE.behaviour
def every_reduction_is_right_through_every_reducing_collective() -> None:
    rank, size = place()
    values = [1 << (peer + 1) | peer for peer in range(size)]
    folded = {
        dist.ReduceOp.SUM: sum(values),
        dist.ReduceOp.PRODUCT: values[0] * values[1] * values[2],
        dist.ReduceOp.MIN: min(values),
        dist.ReduceOp.MAX: max(values),
        dist.ReduceOp.BAND: values[0] & values[1] & values[2],
        dist.ReduceOp.BOR: values[0] | values[1] | values[2],
        dist.ReduceOp.BXOR: values[0] ^ values[1] ^ values[2],
    }
    for op, wanted in folded.items():
        tensor = torch.tensor([values[rank]] * 5, dtype=torch.int32)
        dist.all_reduce(tensor, op=op)
        assert tensor.tolist() == [wanted] * 5
        tensor = torch.tensor([values[rank]], dtype=torch.int64)
        dist.reduce(tensor, dst=1, op=op)
        assert rank != 1 or tensor.item() == wanted
        whole = torch.full((2 * size,), values[rank], dtype=torch.int32)
        part = torch.empty(2, dtype=torch.int32)
        dist.reduce_scatter_tensor(part, whole, op=op)
        assert part.tolist() == [wanted] * 2


@SUITE.behaviour
def the_average_is_that_of_the_inputs() -> None:
    rank, size = place()
    tensor = torch.full((7,), float(rank))
    dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
    assert tensor.eq(sum_of_ranks() / size).all()


@SUITE.behaviour
def reducing_twice_adds_twice() -> None:
    rank, size = place()
    tensor = torch.full((3,), float(rank))
    dist.all_reduce(tensor)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [float(sum_of_ranks() * size)] * 3
    for _ in range(2):
        tensor = torch.ones(1)
        dist.reduce(tensor, dst=0)
        assert rank != 0 or tensor.item() == size


@SUITE.behaviour
def complex_numbers_add_up_and_have_no_order() -> None:
    rank, size = place()
    tensor = torch.tensor([complex(rank, 1)])
    dist.all_reduce(tensor)
    assert tensor.item() == complex(sum_of_ranks(), size)
    for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT, dist.ReduceOp.BAND):
        with pytest.raises(ValueError, match="does not support"):
            dist.all_reduce(tensor, op=op)
    rows = [torch.empty(2, dtype=torch.complex64) for _ in range(size)]
    dist.all_gather(rows, torch.tensor([complex(rank, -rank)] * 2))
    assert [row[1].item() for row in rows] == [complex(peer, -peer) for peer in range(size)]


@SUITE.behaviour
def booleans_are_combined_by_or_and_moved_as_they_are() -> None:
    rank, size = place()
    tensor = torch.tensor([rank == 1, False])
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX if dist.get_backend() == "gloo" else dist.ReduceOp.BOR)
    assert tensor.tolist() == [True, False]
    tensor = torch.tensor([rank == 1, rank != 1])
    dist.broadcast(tensor, src=1)
    assert tensor.tolist() == [True, False]
    rows = [torch.empty(1, dtype=torch.bool) for _ in range(size)]
    dist.all_gather(rows, torch.tensor([rank % 2 == 1]))
    assert [row.item() for row in rows] == [peer % 2 == 1 for peer in range(size)]


@SUITE.behaviour
def inputs_with_gaps_between_their_elements_are_read_right() -> None:
    rank, size = place()
    wide = torch.arange(12.0).view(6, 2) + 100 * rank
    column = wide[:, 1]
    rows = [torch.empty(6) for _ in range(size)]
    dist.all_gather(rows, column)
    for peer, row in enumerate(rows):
        assert torch.equal(row, torch.arange(12.0).view(6, 2)[:, 1] + 100 * peer)
    gathered = [torch.empty(6) for _ in range(size)] if rank == 0 else None
    dist.gather(column, gathered, dst=0)
    for peer, row in enumerate(gathered or []):
        assert torch.equal(row, torch.arange(12.0).view(6, 2)[:, 1] + 100 * peer)
    assert wide[:, 0].tolist() == [100.0 * rank + 2 * number for number in range(6)]


@SUITE.behaviour
def channels_last_tensors_are_gathered_by_meaning() -> None:
    rank, size = place()
    image = torch.arange(2.0 * 3 * 4 * 5).view(2, 3, 4, 5) + 1000 * rank
    rows = [torch.empty(2, 3, 4, 5) for _ in range(size)]
    dist.all_gather(rows, image.contiguous(memory_format=torch.channels_last))
    for peer, row in enumerate(rows):
        assert torch.equal(row, torch.arange(2.0 * 3 * 4 * 5).view(2, 3, 4, 5) + 1000 * peer)


@SUITE.behaviour
def tensors_made_in_inference_mode_are_gathered() -> None:
    rank, size = place()
    with torch.inference_mode():
        rows = [torch.empty(2) for _ in range(size)]
        dist.all_gather(rows, torch.full((2,), float(rank)))
        total = torch.ones(2)
        dist.all_reduce(total)
    assert [row[0].item() for row in rows] == list(range(size)) and total.tolist() == [size] * 2


@SUITE.behaviour
def lists_of_tensors_are_reduced_together() -> None:
    rank, size = place()
    tensors = [torch.full((count,), float(rank + count)) for count in (1, 5, 300)]
    dist.all_reduce_coalesced(tensors)
    for tensor, count in zip(tensors, (1, 5, 300), strict=True):
        assert tensor.eq(sum_of_ranks() + size * count).all()
    future = dist.all_reduce_coalesced([torch.ones(2), torch.ones(3)], async_op=True)
    assert [each.tolist() for each in future.wait()] == [[size] * 2, [size] * 3]


@SUITE.behaviour
def lists_of_tensors_are_gathered_together() -> None:
    rank, size = place()
    rows = [[torch.empty(2), torch.empty(2, 3)] for _ in range(size)]
    dist.all_gather_coalesced(rows, [torch.full((2,), float(rank)), torch.full((2, 3), rank + 0.5)])
    for peer, (first, second) in enumerate(rows):
        assert first.eq(peer).all() and second.eq(peer + 0.5).all()


@SUITE.behaviour
def wholes_are_gathered_and_scattered_by_rows() -> None:
    rank, size = place()
    whole = torch.empty(2 * size, 3)
    dist.all_gather_into_tensor(whole, torch.full((2, 3), float(rank)))
    assert whole[:, 0].tolist() == [peer for peer in range(size) for _ in range(2)]
    part = torch.empty(2, 3)
    dist.reduce_scatter_tensor(part, whole)
    assert part.eq(rank * size).all()
    pieces = [torch.full((4,), float(peer + rank)) for peer in range(size)]
    piece = torch.empty(4)
    dist.reduce_scatter(piece, pieces)
    assert piece.eq(sum_of_ranks() + size * rank).all()


@SUITE.behaviour
def blocks_of_any_size_are_exchanged() -> None:
    rank, size = place()
    # Rank r sends r + p rows to rank p; the block from 0 to 0 is empty.
    sent = torch.full((sum(rank + peer for peer in range(size)), 2), float(rank))
    counts = [rank + peer for peer in range(size)]
    received = torch.empty_like(sent)
    work = dist.all_to_all_single(received, sent, counts, counts, async_op=True)
    ended(work)
    assert received[:, 1].tolist() == [peer for peer in range(size) for _ in range(rank + peer)]
    even = torch.empty(size, dtype=torch.complex64)
    dist.all_to_all_single(even, torch.full((size,), complex(rank, 1)))
    assert even.tolist() == [complex(peer, 1) for peer in range(size)]


@SUITE.behaviour
def many_operations_of_each_kind_may_be_under_way() -> None:
    rank, size = place()
    for start, wanted in (
        (lambda tensor, _: dist.all_reduce(tensor, async_op=True), lambda number: size * number + 3),
        (
            lambda tensor, root: dist.broadcast(tensor, root, async_op=True),
            lambda number: number % size + number,
        ),
    ):
        tensors = [torch.full((100,), float(rank + number)) for number in range(200)]
        works = [start(tensor, number % size) for number, tensor in enumerate(tensors)]
        for number, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
            ended(work)
            assert tensor.eq(wanted(number)).all(), number
    rows = [[torch.empty(1) for _ in range(size)] for _ in range(100)]
    works = [dist.all_gather(each, torch.tensor([rank + 0.25]), async_op=True) for each in rows]
    parts = [torch.empty(1) for _ in range(100)]
    works += [
        dist.scatter(part, inputs(number, rank), src=number % size, async_op=True)
        for number, part in enumerate(parts)
    ]
    for work in reversed(works):
        ended(work)
    assert all(row[peer].item() == peer + 0.25 for row in rows for peer in range(size))
    assert [part.item() for part in parts] == [number + rank for number in range(100)]


def inputs(number: int, rank: int) -> list[torch.Tensor] | None:
    """What the root of scatter `number` gives away."""
    size = dist.get_world_size()
    is_root = rank == number % size
    return [torch.tensor([float(number + peer)]) for peer in range(size)] if is_root else None


@SUITE.behaviour
def a_future_holds_the_result_and_chains() -> None:
    _, size = place()
    tensor = torch.ones(4)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    doubled = work.get_future().then(lambda done: [2 * each for each in done.value()])
    assert doubled.wait()[0].tolist() == [2.0 * size] * 4
    assert tensor.tolist() == [size] * 4
    # Gloo tells the future first.
    work.wait()
    assert work.is_completed()
    both = torch.futures.collect_all([
        dist.all_reduce(torch.full((2,), float(number)), async_op=True).get_future() for number in range(3)
    ])  # fmt: skip
    assert [future.value()[0][0].item() for future in both.wait()] == [0, size, 2 * size]


@SUITE.behaviour
def a_callback_waits_for_the_future_of_what_it_starts() -> None:
    _, size = place()

    def again(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        work = dist.all_reduce(done.value()[0], async_op=True)
        assert work is not None
        return work.get_future().wait()[0]  # type: ignore[no-any-return]

    for _ in range(20):
        work = dist.all_reduce(torch.ones(4), async_op=True)
        assert work is not None
        assert work.get_future().then(again).then(lambda done: done.value()).wait()[0] == size * size


@SUITE.behaviour
def a_barrier_comes_after_what_was_started_before_it() -> None:
    rank, _ = place()
    tensors = [torch.full((10_000,), float(rank)) for _ in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    dist.barrier()
    for work, tensor in zip(works, tensors, strict=True):
        ended(work)
        assert tensor.eq(sum_of_ranks()).all()


@SUITE.behaviour
def objects_travel_by_every_way() -> None:
    rank, size = place()
    thing = {"rank": rank, "tensor": torch.full((rank,), 1.0), "text": "ü" * 10_000 * rank}
    everyone: list[dict[str, object]] = [{} for _ in range(size)]
    dist.all_gather_object(everyone, thing)
    assert [each["rank"] for each in everyone] == list(range(size))
    assert [len(each["tensor"]) for each in everyone] == list(range(size))  # type: ignore[arg-type]
    gathered = [None] * size if rank == 2 else None
    dist.gather_object(thing["text"], gathered, dst=2)
    assert gathered is None or [len(text) for text in gathered] == [10_000 * peer for peer in range(size)]
    listed: list[object] = [thing["rank"], None, thing["text"]] if rank == 1 else [None] * 3
    dist.broadcast_object_list(listed, src=1)
    assert listed[0] == 1 and listed[1] is None and len(listed[2]) == 10_000  # type: ignore[arg-type]
    mine: list[object] = [None]
    dist.scatter_object_list(mine, [("for", peer) for peer in range(size)] if rank == 0 else None, src=0)
    assert mine == [("for", rank)]
    with pytest.raises((ValueError, RuntimeError), match="scatter_object_output_list"):
        dist.scatter_object_list([], [1, 2, 3], src=0)


@SUITE.behaviour
def wrong_arguments_are_refused_and_the_group_lives_on() -> None:
    rank, size = place()
    group = dist.group.WORLD
    assert group is not None
    tensor = torch.zeros(3)
    wrong = [
        lambda: group.broadcast(tensor, -1),
        lambda: group.broadcast(tensor, size),
        lambda: dist.all_gather([torch.zeros(3)] * (size - 1), tensor),
        lambda: dist.all_gather([torch.zeros(4)] * size, tensor),
        lambda: dist.all_gather([torch.zeros(3, dtype=torch.float64)] * size, tensor),
        lambda: dist.gather(tensor, [torch.zeros(3)] * (size - 1), dst=rank),
        lambda: dist.scatter(tensor, [torch.zeros(3)] * (size + 1), src=rank),
        lambda: dist.scatter(tensor, [torch.zeros(2)] * size, src=rank),
        lambda: dist.scatter(tensor, None, src=rank),
        lambda: dist.gather(tensor, None, dst=rank),
        lambda: dist.reduce_scatter(tensor, [tensor] * (size - 1)),
        lambda: dist.all_to_all_single(torch.zeros(4), torch.zeros(4), [1, 1], [2, 2]),
        lambda: dist.all_reduce("no tensor"),  # type: ignore[arg-type]
        lambda: group.allreduce([]),
        lambda: group.reduce([torch.zeros(1), torch.zeros(1)], dist.ReduceOptions()),
    ]
    for number, call in enumerate(wrong):
        with pytest.raises((ValueError, RuntimeError, TypeError)):
            call()
            raise AssertionError(f"call {number} was accepted")
    dist.all_reduce(tensor)
    assert tensor.tolist() == [0] * 3


@SUITE.behaviour
def a_default_timeout_can_be_changed_and_is_read_back() -> None:
    from datetime import timedelta

    own = backend()
    own._set_default_timeout(timedelta(seconds=123))
    assert own.options._timeout == timedelta(seconds=123)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 3


@SUITE.behaviour
def numbers_of_collectives_go_up_by_one_each() -> None:
    own = backend()
    own._set_sequence_number_for_group()
    first = own._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(1))
    dist.broadcast(torch.ones(1), 0)
    dist.barrier()
    assert own._get_sequence_number_for_group() == first + 3


@SUITE.behaviour
def functional_collectives_leave_their_input_alone() -> None:
    import torch.distributed._functional_collectives as functional

    rank, size = place()
    mine = torch.full((size, 2), float(rank))
    group = dist.group.WORLD
    assert group is not None
    assert functional.all_reduce(mine, "sum", group).eq(sum_of_ranks()).all()
    assert functional.all_gather_tensor(mine, 0, group)[::size, 0].tolist() == list(range(size))
    assert functional.reduce_scatter_tensor(mine, "sum", 0, group).eq(sum_of_ranks()).all()
    exchanged = functional.all_to_all_single(mine, [1] * size, [1] * size, group)
    assert exchanged[:, 0].tolist() == list(range(size))
    assert functional.broadcast(mine, 2, group).eq(2).all()
    first, second = functional.all_reduce_coalesced([mine, mine + 1], "sum", group)
    assert first.eq(sum_of_ranks()).all() and second.eq(sum_of_ranks() + size).all()
    assert mine.eq(rank).all()


@SUITE.behaviour
def collectives_have_gradients() -> None:
    import torch.distributed.nn.functional as differentiable

    rank, size = place()
    # Its default is the World of when it was imported.
    world = dist.group.WORLD
    mine = torch.full((2,), float(rank), requires_grad=True)
    (differentiable.all_reduce(mine, group=world) * (rank + 1)).sum().backward()
    assert mine.grad is not None and mine.grad.tolist() == [sum_of_ranks() + size] * 2
    mine.grad = None
    rows = differentiable.all_gather(mine, group=world)
    (torch.stack(list(rows)) * (rank + 1)).sum().backward()
    assert mine.grad.tolist() == [sum_of_ranks() + size] * 2
    mine.grad = None
    (differentiable.broadcast(mine, src=1, group=world) * (rank + 1)).sum().backward()
    assert mine.grad is None or rank != 1 or mine.grad.tolist() == [sum_of_ranks() + size] * 2


@SUITE.each()
def test_three_ranks(name: str, backend: str) -> None:
    SUITE.check(backend, name)
