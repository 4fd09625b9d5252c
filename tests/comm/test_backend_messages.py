"""Messages of baguanet: tags, any source, itself, sizes around every border, beside collectives."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.comm.ranks import GROUP_TIMEOUT, run_ranks, run_ranks_to_the_end


def numbers(count: int, seed: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int64) * 31 + seed


def sizes_around_borders() -> None:
    rank = dist.get_rank()
    for count in (0, 1, 511, 512, 8191, 8192, 8193, 32_768, 131_071, 131_073, 1_000_003):
        wanted = numbers(count, count)
        if rank == 0:
            dist.send(wanted, 1)
        else:
            found = torch.zeros(count, dtype=torch.int64)
            assert dist.recv(found, 0) == 0
            assert torch.equal(found, wanted)


def tags_in_any_order() -> None:
    rank = dist.get_rank()
    tags = list(range(20))
    if rank == 0:
        works = [dist.isend(numbers(1000 * tag, tag), 1, tag=tag) for tag in tags]
        again = [dist.isend(numbers(5, tag), 1, tag=3) for tag in tags]
    else:
        found = {tag: torch.zeros(1000 * tag, dtype=torch.int64) for tag in tags}
        works = [dist.irecv(found[tag], 0, tag=tag) for tag in reversed(tags)]
        # Of one tag in the order of sending.
        rows = [torch.zeros(5, dtype=torch.int64) for _ in tags]
        again = [dist.irecv(row, 0, tag=3) for row in rows]
    for work in [*works, *again]:
        assert work is not None and work.wait()
    if rank == 1:
        for tag in tags:
            assert torch.equal(found[tag], numbers(1000 * tag, tag))
            assert torch.equal(rows[tag], numbers(5, tag))


def any_source() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank != 0:
        dist.send(numbers(100, rank), 0, tag=9)
        return
    seen = set()
    for _ in range(size - 1):
        found = torch.zeros(100, dtype=torch.int64)
        source = dist.recv(found, tag=9)
        assert torch.equal(found, numbers(100, source))
        seen.add(source)
    assert seen == set(range(1, size))


def to_itself() -> None:
    rank = dist.get_rank()
    found = torch.zeros(50, dtype=torch.int64)
    receive = dist.irecv(found, rank, tag=1)
    send = dist.isend(numbers(50, rank), rank, tag=1)
    assert receive is not None and send is not None
    assert send.wait() and receive.wait()
    assert torch.equal(found, numbers(50, rank))


def batches_both_ways() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    for count in (1, 100_000):
        found = torch.zeros(count, dtype=torch.int64)
        operations = [
            dist.P2POp(dist.isend, numbers(count, rank), right),
            dist.P2POp(dist.irecv, found, left),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert torch.equal(found, numbers(count, left))


def beside_collectives() -> None:
    """Rank 0's all-reduce waits for rank 1, which waits for rank 0's answer to its message."""
    rank = dist.get_rank()
    total = torch.ones(3)
    word = torch.zeros(100_000)
    if rank == 0:
        work = dist.all_reduce(total, async_op=True)
        dist.recv(word, 1)
        dist.send(word + 1, 1)
        assert work is not None
        work.wait()
    else:
        dist.send(torch.ones(100_000), 0)
        dist.recv(word, 0)
        assert word[0] == 2
        dist.all_reduce(total)
    assert total.tolist() == [2.0] * 3


def before_a_collective() -> None:
    """Rank 0's thread waits for a message before the all-reduce begins that the message comes in."""
    rank = dist.get_rank()
    total, word = torch.ones(3), torch.zeros(10)
    if rank == 0:

        def answer() -> None:
            work = dist.irecv(word, 1)
            # Longer than the all-reduce, which cannot end before there is an answer.
            assert work is not None and work.wait(2 * GROUP_TIMEOUT)
            dist.send(word + 1, 1)

        thread = threading.Thread(target=answer)
        thread.start()
        time.sleep(0.3)
        dist.all_reduce(total)
        thread.join()
    else:
        time.sleep(0.6)
        dist.send(torch.ones(10), 0)
        dist.recv(word, 0)
        assert word[0] == 2
        dist.all_reduce(total)
    assert total.tolist() == [2.0] * 3


def switches_while_two_threads_wait() -> list[int]:
    """Of each, while it waits for a message that comes a second late."""
    tags, found = (1, 2), torch.zeros(2, 10)
    if dist.get_rank() == 1:
        time.sleep(1)
        for tag in tags:
            dist.send(torch.ones(10), 0, tag=tag)
        return []
    counts = [0, 0]

    def wait(tag: int) -> None:
        before = switches()
        dist.recv(found[tag - 1], 1, tag=tag)
        counts[tag - 1] = switches() - before

    threads = [threading.Thread(target=wait, args=(tag,)) for tag in tags]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(found, torch.ones(2, 10))
    return counts


def switches() -> int:
    """How often the calling thread has gone to sleep."""
    status = Path(f"/proc/self/task/{threading.get_native_id()}/status").read_text()
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


def from_many_threads() -> None:
    rank = dist.get_rank()
    failures: list[BaseException] = []

    def talk(tag: int) -> None:
        try:
            for turn in range(100):
                tensor = torch.full((64 * tag,), float(turn))
                if rank == 0:
                    dist.send(tensor, 1, tag=tag)
                    dist.recv(tensor, 1, tag=tag)
                else:
                    dist.recv(tensor, 0, tag=tag)
                    dist.send(tensor + 1, 0, tag=tag)
                assert tensor.eq(turn + (1 if rank == 0 else 0)).all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=talk, args=(tag,)) for tag in range(1, 5)]
    for thread in threads:
        thread.start()
    for _ in range(200):
        total = torch.ones(10)
        dist.all_reduce(total)
        assert total.tolist() == [2.0] * 10
    for thread in threads:
        thread.join()
    assert not failures, failures


def objects() -> None:
    if dist.get_rank() == 0:
        dist.send_object_list([{"a": 1}, "text"], dst=1)
    else:
        found = [None, None]
        dist.recv_object_list(found, src=0)
        assert found == [{"a": 1}, "text"]


@pytest.mark.parametrize(
    "check", [sizes_around_borders, tags_in_any_order, objects], ids=lambda c: c.__name__
)
def test_messages_arrive_whole(check: object) -> None:
    run_ranks(check, 2)  # type: ignore[arg-type]


def test_a_message_from_any_source_says_where_it_came_from() -> None:
    run_ranks(any_source, 4)


def test_a_rank_may_send_to_itself() -> None:
    run_ranks(to_itself, 2)


def test_batches_go_round_a_ring() -> None:
    run_ranks(batches_both_ways, 3)


@pytest.mark.parametrize("check", [beside_collectives, before_a_collective], ids=lambda c: c.__name__)
def test_messages_and_collectives_do_not_wait_for_each_other(check: object) -> None:
    run_ranks(check, 2)  # type: ignore[arg-type]


def test_who_waits_for_a_message_sleeps_until_it_comes() -> None:
    counts, _ = run_ranks(switches_while_two_threads_wait, 2)
    assert all(0 < count < 30 for count in counts), counts


def test_threads_talk_beside_collectives() -> None:
    run_ranks(from_many_threads, 2)


def short_ones_to_a_rank_that_does_not_read_yet(folder: str) -> None:
    """Sends end as soon as the link keeps them, which is more than the network takes."""
    os.environ["NCCL_HOSTID"] = str(dist.get_rank())
    rank, sent, received = dist.get_rank(), Path(folder) / "sent", Path(folder) / "received"
    dist.destroy_process_group()
    store = dist.FileStore(str(Path(folder) / "world"), 2)
    dist.init_process_group("baguanet", store=store, rank=rank, world_size=2)
    messages = [numbers(7500, number) for number in range(14)]
    if rank == 0:
        dist.send(messages[0], 1)
        for work in [dist.isend(message, 1) for message in messages]:
            assert work is not None
            work.wait()
        sent.touch()
        wait_for(received)
    else:
        found = torch.zeros_like(messages[0])
        dist.recv(found, 0)
        wait_for(sent)
        for message in messages:
            dist.recv(found, 0)
            assert torch.equal(found, message)
        received.touch()


def wait_for(path: Path) -> None:
    """Without a call of the group."""
    while not path.exists():
        time.sleep(0.01)


def test_short_messages_arrive_though_their_sender_has_nothing_more_to_do(tmp_path: Path) -> None:
    run_ranks(short_ones_to_a_rank_that_does_not_read_yet, 2, str(tmp_path))


def sizes_that_differ() -> None:
    if dist.get_rank() == 0:
        dist.send(torch.zeros(5), 1)
        dist.barrier()
    else:
        dist.recv(torch.zeros(7), 0)


def test_a_message_of_another_size_than_expected_is_an_error_naming_both() -> None:
    outcomes = run_ranks_to_the_end(sizes_that_differ, 2)
    for outcome in outcomes:
        assert isinstance(outcome.error, RuntimeError), outcome
        assert "20" in str(outcome.error) and "28" in str(outcome.error), outcome.error
