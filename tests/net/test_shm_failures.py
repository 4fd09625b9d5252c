"""What the ranks of a host learn when one of them ends, freezes, aborts or calls something else."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.net.shm_peer import DEADLINE_S, Failed, Group, Ranks, pointer, ranks


def reduce_for_ever(group: Group, count: int) -> Any:
    data = np.zeros(count, np.float32)
    while True:
        try:
            group.all_reduce(data)
        except Failed as failed:
            try:
                group.call("Barrier")
            except Failed as after:
                return failed.fault, failed.message, after.fault
            return failed.fault, failed.message, "a barrier passed after a failure"


def leave(group: Group) -> None:
    group.close()


def reduce_once(group: Group, count: int, dtype: str, op: str) -> None:
    group.all_reduce(np.zeros(count, dtype), op)


def wait_in_barrier(group: Group) -> None:
    group.call("Barrier")


def broadcast(group: Group, count: int, root: int) -> None:
    group.call("Broadcast", pointer(np.zeros(count, np.uint8)), count, root)


def abort_later(group: Group) -> Any:
    threading.Timer(0.05, group.abort).start()
    return reduce_for_ever(group, 1 << 20)


def failures_of(group: Ranks, survivors: list[int]) -> list[Any]:
    return [group.result(rank) for rank in survivors]


@pytest.mark.parametrize("count", [1, 1 << 20])
@pytest.mark.parametrize("size", [2, 4])
def test_a_killed_rank_is_an_error_with_its_name_on_every_survivor(
    tmp_path: Path, size: int, count: int
) -> None:
    with ranks(tmp_path, size) as group:
        victim = group.processes[1]
        for rank in range(size):
            group.start(rank, reduce_for_ever, count)
        time.sleep(0.1)
        victim.kill()
        for fault, message, after in failures_of(group, [rank for rank in range(size) if rank != 1]):
            assert (fault, after) == ("remote", "remote")
            assert message.startswith(f"rank 1 (pid {victim.pid}): its process has ended")


def test_a_frozen_rank_is_a_timeout_that_names_it(tmp_path: Path) -> None:
    with ranks(tmp_path, 3, timeout_s=1.0) as group:
        for rank in range(3):
            group.start(rank, reduce_for_ever, 1000)
        time.sleep(0.1)
        os.kill(group.processes[2].pid, signal.SIGSTOP)
        outcomes = failures_of(group, [0, 1])
        assert {fault for fault, _, _ in outcomes} <= {"timeout", "remote"}
        assert "timeout" in {fault for fault, _, _ in outcomes}
        assert all("rank 2 (pid" in message and "in time" in message for _, message, _ in outcomes)


def test_abort_from_another_thread_ends_the_operation_on_every_rank(tmp_path: Path) -> None:
    with ranks(tmp_path, 3) as group:
        group.start(1, abort_later)
        for rank in (0, 2):
            group.start(rank, reduce_for_ever, 1 << 20)
        aborted, first, last = group.result(1), group.result(0), group.result(2)
    assert aborted[0] == "aborted"
    assert first[0] == last[0] == "remote"
    assert "rank 1 (pid" in first[1] and "aborted the shared-memory group" in first[1]


def test_a_rank_that_leaves_does_not_keep_the_others_waiting(tmp_path: Path) -> None:
    with ranks(tmp_path, 2) as group:
        group.start(0, wait_in_barrier)
        group.start(1, leave)
        assert group.result(1) is None
        failed = group.result(0)
    assert failed.fault == "remote" and "has left" in failed.message


@pytest.mark.parametrize(
    ("calls", "says"),
    [
        ([(reduce_once, 100, "float32", "sum"), (reduce_once, 101, "float32", "sum")], "SUM of 101 fp32"),
        ([(reduce_once, 100, "float32", "sum"), (reduce_once, 100, "int32", "sum")], "SUM of 100 int32"),
        ([(reduce_once, 100, "float32", "sum"), (reduce_once, 100, "float32", "max")], "MAX of 100 fp32"),
        ([(reduce_once, 1 << 20, "float32", "sum"), (reduce_once, 1, "float32", "sum")], "SUM of 1 fp32"),
        ([(reduce_once, 100, "float32", "sum"), (wait_in_barrier,)], "barrier"),
        ([(broadcast, 10, 0), (broadcast, 10, 1)], "from/to rank 1"),
    ],
)
def test_calls_that_do_not_match_are_an_error_on_every_rank(
    tmp_path: Path, calls: list[Any], says: str
) -> None:
    with ranks(tmp_path, 3) as group:
        for rank, call in enumerate([calls[0], calls[0], calls[1]]):
            group.start(rank, *call)
        outcomes = [group.result(rank) for rank in range(3)]
    assert [outcome.fault for outcome in outcomes] == ["usage"] * 3
    assert all("rank 2 (pid" in outcome.message for outcome in outcomes)
    assert any(says in outcome.message for outcome in outcomes), outcomes[0].message


def cpu_of_waiting(group: Group) -> float:
    before = resource.getrusage(resource.RUSAGE_SELF)
    group.call("Barrier")
    after = resource.getrusage(resource.RUSAGE_SELF)
    return (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime)


def test_a_waiting_rank_sleeps(tmp_path: Path) -> None:
    with ranks(tmp_path, 2) as group:
        group.start(0, cpu_of_waiting)
        time.sleep(1.0)
        group.start(1, wait_in_barrier)
        # Spinning would cost a second. The true figure, far smaller, is the benchmark's matter.
        assert group.result(0) < 0.1


def recreate(group: Group, folder: str, size: int, times: int) -> tuple[int, int, int]:
    def facts() -> tuple[int, int, int]:
        maps = Path("/proc/self/maps").read_text().count("memfd:baguarun")
        return len(os.listdir("/proc/self/fd")), maps, len(os.listdir("/proc/self/task"))

    before = facts()
    for number in range(times):
        again = Group(Path(folder), group.rank, size, nonce=f"again-{number}", arena_bytes=1 << 20)
        again.allocate(1000)
        again.all_reduce(np.ones(100, np.float32))
        again.close()
    after = facts()
    return tuple(late - early for late, early in zip(after, before, strict=True))  # type: ignore[return-value]


def test_fifty_groups_leave_nothing_behind(tmp_path: Path) -> None:
    names = set(os.listdir("/dev/shm"))
    with ranks(tmp_path, 2) as group:
        # A killed rank, too: nothing has a name that could stay.
        assert group.run(recreate, str(tmp_path), 2, 50) == [(0, 0, 0)] * 2
    pids = tuple(f"-{process.pid}" for process in group.processes)
    assert not {name for name in set(os.listdir("/dev/shm")) - names if "baguarun" in name}
    sockets = Path("/proc/net/unix").read_text().splitlines()
    assert not [line for line in sockets if "baguarun-shm" in line and line.endswith(pids)]


def test_ranks_that_disagree_about_the_group_are_told_so(tmp_path: Path) -> None:
    outcomes: dict[int, str] = {}

    def join(rank: int, arena_bytes: int) -> None:
        try:
            Group(tmp_path, rank, 2, nonce="sizes", arena_bytes=arena_bytes)
        except Failed as failed:
            outcomes[rank] = failed.message

    threads = [threading.Thread(target=join, args=(0, 0)), threading.Thread(target=join, args=(1, 4096))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert [outcomes[rank].startswith("rank 1: shared memory: its group is 'sizes'") for rank in (0, 1)] == [
        True,
        True,
    ]
