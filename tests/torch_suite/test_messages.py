"""Messages between three ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.torch_suite.suite import Suite, ended, place

SUITE = Suite(world_size=3)


@SUITE.behaviour
def every_rank_sends_to_every_other_in_turn() -> None:
    rank, size = place()
    for sender in range(size):
        for receiver in range(size):
            tensor = torch.full((3, 5), float(10 * sender + receiver))
            if rank == sender != receiver:
                dist.send(tensor, receiver)
            elif rank == receiver != sender:
                found = torch.zeros(3, 5)
                assert dist.recv(found, sender) == sender
                assert torch.equal(found, tensor)


@SUITE.behaviour
def whoever_sends_is_received_and_named() -> None:
    rank, size = place()
    if rank != 1:
        dist.send(torch.full((4,), float(rank)), 1)
        return
    seen = set()
    for _ in range(size - 1):
        found = torch.zeros(4)
        sender = dist.recv(found)
        assert found.tolist() == [float(sender)] * 4
        seen.add(sender)
    assert seen == {0, 2}


@SUITE.behaviour
def started_receives_from_anyone_each_get_one() -> None:
    rank, size = place()
    if rank != 0:
        for turn in range(10):
            dist.send(torch.tensor([rank, turn]), 0, tag=turn)
        return
    found = [torch.zeros(2, dtype=torch.int64) for _ in range(10 * (size - 1))]
    works = [dist.irecv(each, tag=number // (size - 1)) for number, each in enumerate(found)]
    for work in works:
        ended(work)
    assert sorted(each.tolist() for each in found) == [[peer, turn] for peer in (1, 2) for turn in range(10)]


@SUITE.behaviour
def tags_keep_messages_apart() -> None:
    rank, size = place()
    if rank == 0:
        words = [(peer, tag) for peer in range(1, size) for tag in (3, 1, 2)]
        for work in [dist.isend(torch.tensor([10 * peer + tag]), peer, tag=tag) for peer, tag in words]:
            ended(work)
    else:
        for tag in (1, 2, 3):
            found = torch.zeros(1, dtype=torch.int64)
            dist.recv(found, 0, tag=tag)
            assert found.item() == 10 * rank + tag


@SUITE.behaviour
def sends_that_were_started_end_and_can_be_awaited_in_any_order() -> None:
    rank, _ = place()
    if rank == 0:
        works = [dist.isend(torch.full((50_000,), float(number)), 1) for number in range(8)]
    elif rank == 1:
        found = [torch.zeros(50_000) for _ in range(8)]
        works = [dist.irecv(each, 0) for each in found]
    else:
        works = []
    for work in reversed(works):
        ended(work)
        assert work is not None and work.is_completed()
    if rank == 1:
        assert [each[-1].item() for each in found] == list(range(8))


@SUITE.behaviour
def a_batch_goes_to_everyone_at_once() -> None:
    rank, size = place()
    others = [peer for peer in range(size) if peer != rank]
    found = {peer: torch.zeros(1000) for peer in others}
    operations = [dist.P2POp(dist.isend, torch.full((1000,), float(rank)), peer, tag=rank) for peer in others]
    operations += [dist.P2POp(dist.irecv, found[peer], peer, tag=peer) for peer in others]
    for work in dist.batch_isend_irecv(operations):
        ended(work)
    assert all(found[peer].eq(peer).all() for peer in others)


@SUITE.behaviour
def a_batch_may_leave_out_ranks() -> None:
    rank, _ = place()
    if rank == 0:
        return
    peer = 3 - rank
    found = torch.zeros(2)
    operations = [
        dist.P2POp(dist.isend, torch.full((2,), float(rank)), peer),
        dist.P2POp(dist.irecv, found, peer),
    ]
    for work in dist.batch_isend_irecv(operations):
        ended(work)
    assert found.tolist() == [float(peer)] * 2


@SUITE.behaviour
def a_batch_of_nonsense_is_refused() -> None:
    with pytest.raises((ValueError, IndexError)):
        dist.batch_isend_irecv([])
    with pytest.raises(ValueError):
        dist.batch_isend_irecv([1])  # type: ignore[list-item]
    with pytest.raises(ValueError):
        dist.P2POp(dist.broadcast, torch.zeros(1), 1)  # type: ignore[arg-type]


@SUITE.behaviour
def objects_are_sent_in_lists() -> None:
    rank, _ = place()
    things = [{"a": 1}, "text" * 5000, [torch.ones(3)]]
    if rank == 0:
        dist.send_object_list(things, dst=2)
    elif rank == 2:
        found: list[object] = [None] * 3
        assert dist.recv_object_list(found, src=0) == 0
        assert found[:2] == things[:2]


@SUITE.behaviour
def a_ring_of_blocking_sends_of_small_messages_does_not_block() -> None:
    rank, size = place()
    found = torch.zeros(1)
    receive = dist.irecv(found, (rank - 1) % size)
    dist.send(torch.full((1,), float(rank)), (rank + 1) % size)
    ended(receive)
    assert found.item() == (rank - 1) % size


@SUITE.behaviour
def an_exchange_of_all_with_all_by_messages_is_an_all_to_all() -> None:
    rank, size = place()
    rows = [torch.zeros(100) for _ in range(size)]
    works = [dist.irecv(rows[peer], peer) for peer in range(size) if peer != rank]
    works += [
        dist.isend(torch.full((100,), float(size * rank + peer)), peer)
        for peer in range(size)
        if peer != rank
    ]
    for work in works:
        ended(work)
    assert all(rows[peer].eq(size * peer + rank).all() for peer in range(size) if peer != rank)


@SUITE.behaviour
def messages_to_itself_and_of_no_tensor_are_refused() -> None:
    rank, _ = place()
    for call in (
        lambda: dist.send(torch.zeros(1), rank),
        lambda: dist.recv("no tensor", 0),  # type: ignore[arg-type]
    ):
        with pytest.raises((ValueError, RuntimeError, TypeError)):
            call()
    dist.barrier()


@SUITE.each()
def test_three_ranks(name: str, backend: str) -> None:
    SUITE.check(backend, name)
