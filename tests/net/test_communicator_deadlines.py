"""What ranks learn at a deadline: all of them then, whom to blame, and nothing where all come in time."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from tests.net.communicator_peer import Member, members
from tests.net.shm_peer import Failed

SLACK_S = 0.5
"""Granted to a loaded machine; asking around only once the deadline has passed takes longer."""


def reduce_until(member: Member, deadline_s: float, leaves: bool = False) -> tuple[float, str, str]:
    """How long the call took that failed, its fault and message."""
    member.deadline_s = deadline_s
    data = np.zeros(100_000, np.float32)
    while True:
        begun = time.monotonic()
        try:
            member.all_reduce(data)
        except Failed as failed:
            took_s = time.monotonic() - begun
            if leaves:
                member.close()
            return took_s, failed.fault, failed.message


def freeze(process_id: int | None) -> None:
    assert process_id is not None
    os.kill(process_id, signal.SIGSTOP)


def named(rank: int, message: str) -> bool:
    return message.startswith(f"rank {rank} (")


@pytest.mark.parametrize("hosts", ["aaa", "abc", "aab", "abb", "aabb"])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_all_know_who_froze_when_the_deadline_passes(tmp_path: Path, hosts: str, victim: int) -> None:
    with members(tmp_path, len(hosts), list(hosts)) as group:
        survivors = set(range(len(hosts))) - {victim}
        for rank in range(len(hosts)):
            group.start(rank, reduce_until, 1.2)
        time.sleep(0.1)
        freeze(group.processes[victim].pid)
        for rank in survivors:
            took_s, _, message = group.result(rank)
            assert named(victim, message) and "in time" in message, message
            assert took_s < 1.2 + SLACK_S


@pytest.mark.parametrize("hosts", ["abc", "aab", "abb", "aabb"])
def test_all_say_the_same_of_a_frozen_rank_unless_it_is_the_one_that_all_ask(
    tmp_path: Path, hosts: str
) -> None:
    with members(tmp_path, len(hosts), list(hosts)) as group:
        survivors = set(range(len(hosts))) - {2}
        for rank in range(len(hosts)):
            group.start(rank, reduce_until, 1.2)
        time.sleep(0.1)
        freeze(group.processes[2].pid)
        outcomes = {group.result(rank)[1:] for rank in survivors}
    assert len(outcomes) == 1 and {fault for fault, _ in outcomes} == {"timeout"}, outcomes


def reduce_late(member: Member, delays_s: list[float], deadline_s: float) -> list[float]:
    """The sums of calls, each begun so long after the last one."""
    member.deadline_s = deadline_s
    sums = []
    for delay_s in delays_s:
        time.sleep(delay_s)
        data = np.full(10, member.rank + 1, np.float32)
        member.all_reduce(data)
        sums.append(float(data[0]))
    return sums


@pytest.mark.parametrize("hosts", ["abc", "abb", "aab"])
@pytest.mark.parametrize("late", [0, 2])
def test_who_is_late_but_comes_before_the_deadline_is_no_error(tmp_path: Path, hosts: str, late: int) -> None:
    # It comes when the others have asked already who is late.
    with members(tmp_path, 3, list(hosts)) as group:
        # Links are made in the first call, which takes its time.
        group.run(reduce_late, [0.0], 30)
        for rank in range(3):
            delays_s = [1.2, 0.0, 1.2] if rank == late else [0.0] * 3
            group.start(rank, reduce_late, delays_s, 1.6)
        assert [group.result(rank) for rank in range(3)] == [[6.0] * 3] * 3


def test_a_rank_that_is_late_in_one_call_is_not_blamed_for_another(tmp_path: Path) -> None:
    with members(tmp_path, 3, list("abc")) as group:
        group.run(reduce_late, [0.0], 30)
        for rank in range(3):
            group.start(rank, reduce_late, [0.9 if rank == 1 else 0.0, 0.0], 1.2)
        assert [group.result(rank) for rank in range(3)] == [[6.0] * 2] * 3
        group.start(0, reduce_until, 1.2)
        group.start(1, reduce_until, 1.2)
        for rank in (0, 1):
            _, _, message = group.result(rank)
            assert named(2, message) and "as call 4" in message, message


@pytest.mark.parametrize("hosts", ["abc", "abb"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_goes_at_its_deadline_is_not_blamed_by_one_with_a_later_one(
    tmp_path: Path, hosts: str, victim: int
) -> None:
    first, last = ({0, 1, 2} - {victim}) if victim == 0 else (1, 0)
    with members(tmp_path, 3, list(hosts)) as group:
        group.start(first, reduce_until, 1.0, True)
        group.start(last, reduce_until, 1.3)
        group.start(victim, reduce_until, 1.0)
        time.sleep(0.1)
        freeze(group.processes[victim].pid)
        for rank in (first, last):
            _, _, message = group.result(rank)
            assert named(victim, message), (rank, message)
