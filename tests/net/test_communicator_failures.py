"""What ranks of one host and of several learn when one ends, freezes, aborts, leaves or calls otherwise."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.net.communicator_peer import ANY, Member, library_path, members
from tests.net.shm_peer import DTYPES, OPS, Failed, Ranks, pointer

layouts = pytest.mark.parametrize("hosts", ["aaa", "abc", "aab", "abb", "aabb"])


def outcome_of(member: Member, act: Callable[[], Any]) -> tuple[str, str, str]:
    """The fault and message that `act` ends with, and what the next call says."""
    try:
        while True:
            act()
    except Failed as failed:
        try:
            member.barrier()
        except Failed as after:
            same = "the same" if (after.fault, after.message) == (failed.fault, failed.message) else "other"
            assert member.failure() == failed.message
            return failed.fault, failed.message, same
        return failed.fault, failed.message, "a barrier passed after a failure"


def reduce_for_ever(member: Member, count: int) -> tuple[str, str, str]:
    data = np.zeros(count, np.float32)
    return outcome_of(member, lambda: member.all_reduce(data))


def drive_for_ever(member: Member) -> tuple[str, str, str]:
    """In no collective, waiting for nothing."""

    def drive() -> None:
        if not member.progress():
            member.sleep(30)

    return outcome_of(member, drive)


def receive_for_ever(member: Member, source: int) -> tuple[str, str, str]:
    message = member.recv(np.zeros(10, np.uint8), source, 77)
    return outcome_of(member, lambda: member.wait(message))


def named(rank: int, message: str) -> bool:
    return message.startswith(f"rank {rank} (")


@layouts
@pytest.mark.parametrize("count", [1, 1 << 20])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_rank_is_an_error_with_its_name_on_every_survivor(
    tmp_path: Path, hosts: str, victim: int, count: int
) -> None:
    with members(tmp_path, len(hosts), list(hosts)) as group:
        for rank in range(len(hosts)):
            group.start(rank, reduce_for_ever, count)
        time.sleep(0.1)
        group.processes[victim].kill()
        for rank in range(len(hosts)):
            if rank != victim:
                fault, message, after = group.result(rank)
                assert (fault, after) == ("remote", "the same"), message
                assert named(victim, message), message


@layouts
def test_who_only_drives_or_waits_for_a_message_learns_of_a_death_too(tmp_path: Path, hosts: str) -> None:
    with members(tmp_path, len(hosts), list(hosts)) as group:
        group.start(0, drive_for_ever)
        group.start(1, receive_for_ever, 0)
        for rank in range(3, len(hosts)):
            group.start(rank, receive_for_ever, ANY)
        time.sleep(0.1)
        group.processes[2].kill()
        for rank in set(range(len(hosts))) - {2}:
            fault, message, after = group.result(rank)
            assert (fault, after) == ("remote", "the same") and named(2, message), message


@pytest.mark.parametrize("hosts", ["aaa", "abc", "abb", "aabb"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_frozen_rank_is_a_timeout_that_names_it(tmp_path: Path, hosts: str, victim: int) -> None:
    with members(tmp_path, len(hosts), list(hosts), deadline_s=1.2) as group:
        for rank in range(len(hosts)):
            group.start(rank, reduce_for_ever, 100_000)
        time.sleep(0.1)
        os.kill(group.processes[victim].pid, signal.SIGSTOP)
        outcomes = [group.result(rank) for rank in range(len(hosts)) if rank != victim]
        assert "timeout" in {fault for fault, _, _ in outcomes}
        for fault, message, after in outcomes:
            assert fault in ("timeout", "remote") and after == "the same"
            assert named(victim, message) and "in time" in message, message


@pytest.mark.parametrize(("hosts", "victim"), [("abc", 0), ("abc", 2), ("aabb", 3)])
def test_a_rank_without_signs_of_life_is_found_before_any_deadline_though_nobody_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: str, victim: int
) -> None:
    monkeypatch.setenv("BAGUA_NET_BEAT_TIMEOUT_S", "1.5")
    with members(tmp_path, len(hosts), list(hosts), deadline_s=60) as group:
        for rank in range(len(hosts)):
            group.start(rank, drive_for_ever)
        # Who has never given a sign of life is not missed.
        time.sleep(1.0)
        os.kill(group.processes[victim].pid, signal.SIGSTOP)
        for rank in range(len(hosts)):
            if rank != victim:
                fault, message, after = group.result(rank)
                assert (fault, after) == ("remote", "the same"), message
                assert named(victim, message) and "no sign of life" in message, message


def test_ranks_that_only_give_signs_of_life_stay_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BAGUA_NET_BEAT_TIMEOUT_S", "0.6")
    with members(tmp_path, 3, list("abc")) as group:
        for rank in range(3):
            group.start(rank, idle_then_reduce, 3.0)
        assert [group.result(rank) for rank in range(3)] == [3.0, 3.0, 3.0]


def idle_then_reduce(member: Member, seconds: float) -> float:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not member.progress():
            member.sleep(0.05)
    data = np.ones(10, np.float32)
    member.all_reduce(data)
    return float(data[0])


def send_for_ever(member: Member, to: int) -> tuple[str, str, str]:
    message = member.send(np.zeros(10, np.uint8), to)
    return outcome_of(member, lambda: member.wait(message))


@pytest.mark.parametrize("first", [0, 1])
def test_who_dies_before_its_first_link_is_made_is_said_to_have_died(tmp_path: Path, first: int) -> None:
    with members(tmp_path, 3, list("abc")) as group:
        os.kill(group.processes[2].pid, signal.SIGSTOP)
        # The kernel of a stopped process takes connections, which wait for it.
        group.start(first, send_for_ever, 2)
        time.sleep(1.0)
        group.processes[2].kill()
        fault, message, _ = group.result(first)
        assert fault == "remote" and named(2, message) and "died" in message, message
        assert "turned us away" not in message


def reduce_once(member: Member, count: int = 100, dtype: str = "float32", op: str = "sum") -> None:
    member.all_reduce(np.zeros(count, dtype), op)


def compute(member: Member, seconds: float) -> None:
    """Does nothing for the group."""
    time.sleep(seconds)


@pytest.mark.parametrize("hosts", ["abc", "aab", "abb"])
def test_ranks_that_do_not_come_are_named_with_the_call(tmp_path: Path, hosts: str) -> None:
    with members(tmp_path, 3, list(hosts), deadline_s=0.7) as group:
        group.start(0, reduce_once)
        group.start(1, compute, 1.8)
        group.start(2, compute, 1.8)
        failed = group.result(0)
        assert failed.fault == "timeout"
        assert named(1, failed.message) and "rank 2 (" in failed.message, failed.message
        assert "all-reduce SUM of 100 fp32 as call 1" in failed.message


def abort_later(member: Member, count: int) -> Any:
    threading.Timer(0.1, member.abort, ["out of memory"]).start()
    return reduce_for_ever(member, count)


@layouts
@pytest.mark.parametrize("count", [1, 1 << 20])
@pytest.mark.parametrize("aborter", [0, 1])
def test_abort_from_another_thread_ends_the_operation_on_every_rank(
    tmp_path: Path, hosts: str, count: int, aborter: int
) -> None:
    with members(tmp_path, len(hosts), list(hosts)) as group:
        for rank in range(len(hosts)):
            group.start(rank, abort_later if rank == aborter else reduce_for_ever, count)
        for rank in range(len(hosts)):
            fault, message, after = group.result(rank)
            assert after == "the same"
            assert fault == ("aborted" if rank == aborter else "remote")
            assert "out of memory" in message
            assert rank == aborter or named(aborter, message), message


def abort_alone(member: Member, count: int) -> tuple[tuple[str, str, str], bool]:
    """The others are not in the collective: only the abort can end it."""
    aborted_at = 0.0

    def abort() -> None:
        nonlocal aborted_at
        aborted_at = time.monotonic()
        member.abort("enough")

    threading.Timer(0.3, abort).start()
    outcome = reduce_for_ever(member, count)
    # A tenth of a second is promised; more is left to a busy machine. The deadline is at 30 s.
    return outcome, time.monotonic() - aborted_at < 2


@pytest.mark.parametrize("hosts", ["aa", "ab"])
@pytest.mark.parametrize("count", [1, 1 << 20])
def test_abort_ends_a_wait_for_ranks_that_do_not_come(tmp_path: Path, hosts: str, count: int) -> None:
    with members(tmp_path, 2, list(hosts)) as group:
        group.start(1, abort_alone, count)
        outcome, was_quick = group.result(1)
        assert outcome[0] == "aborted" and "enough" in outcome[1] and was_quick


def leave(member: Member) -> None:
    member.close()


@pytest.mark.parametrize("hosts", ["aab", "abc", "abb"])
@pytest.mark.parametrize("leaver", [0, 1, 2])
def test_a_rank_that_leaves_does_not_keep_the_others_waiting(tmp_path: Path, hosts: str, leaver: int) -> None:
    with members(tmp_path, 3, list(hosts)) as group:
        group.run(reduce_once)
        for rank in range(3):
            group.start(rank, leave if rank == leaver else reduce_for_ever, *([] if rank == leaver else [10]))
        for rank in range(3):
            if rank != leaver:
                fault, message, _ = group.result(rank)
                assert fault == "remote" and named(leaver, message), message


@pytest.mark.parametrize("hosts", ["aa", "ab"])
@pytest.mark.parametrize("waiter", [0, 1])
def test_a_message_of_a_rank_that_leaves_is_an_error(tmp_path: Path, hosts: str, waiter: int) -> None:
    with members(tmp_path, 2, list(hosts)) as group:
        group.start(waiter, receive_for_ever, 1 - waiter)
        group.start(1 - waiter, leave)
        assert group.result(1 - waiter) is None
        fault, message, _ = group.result(waiter)
        assert fault == "remote" and named(1 - waiter, message) and "has left" in message, message


def test_ranks_that_leave_in_turn_disturb_nobody(tmp_path: Path) -> None:
    with members(tmp_path, 3, list("aab")) as group:
        group.run(reduce_once)
        for rank in range(3):
            group.start(rank, leave)
            assert group.result(rank) is None


def drive_for(member: Member, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        member.progress()


@pytest.mark.parametrize("source", [2, ANY])
@pytest.mark.parametrize("dies", [False, True], ids=["leaves", "dies"])
def test_who_goes_when_rank_0_has_left_keeps_nobody_waiting(tmp_path: Path, source: int, dies: bool) -> None:
    """Rank 0 would have told."""
    with members(tmp_path, 3, list("abc")) as group:
        for rank in (0, 2):
            if rank == 2 and dies:
                group.processes[rank].kill()
                continue
            group.start(rank, leave)
            assert group.result(rank) is None
        group.start(1, receive_for_ever, source)
        fault, message, after = group.result(1)
        assert (fault, after) == ("remote", "the same"), message
        assert named(2, message) or (source == ANY and message.startswith("every other rank")), message


def test_a_message_of_one_who_comes_late_is_waited_for_when_rank_0_has_left(tmp_path: Path) -> None:
    with members(tmp_path, 3, list("abc")) as group:
        group.start(0, leave)
        assert group.result(0) is None
        group.start(1, receive_one, 2)
        time.sleep(0.5)
        group.start(2, send_one, 1)
        assert [group.result(rank) for rank in (2, 1)] == [None, None]


def send_one(member: Member, to: int) -> None:
    member.wait(member.send(np.zeros(10, np.uint8), to))
    while member.library.baguaHasUnsent(member.handle):
        member.progress()


def receive_one(member: Member, source: int) -> None:
    member.wait(member.recv(np.zeros(10, np.uint8), source))


def test_members_of_a_large_group_are_not_taken_for_a_crowd_of_strangers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many connections as two ranks with 64 streams may make, all of them slow with their hello."""
    monkeypatch.setenv("BAGUA_NET_NSTREAMS", "64")
    with members(tmp_path, 2, list("ab")) as group:
        cards = [file.read_bytes() for file in tmp_path.iterdir() if file.name.endswith("-0-0")]
        found = re.search(rb"([0-9.]+):([0-9]+)\n[0-9a-f]{32}", b"".join(cards))
        assert found is not None
        address = (found[1].decode(), int(found[2]))
        slow = [socket.create_connection(address) for _ in range(200)]
        group.start(0, drive_for, 0.5)
        assert group.result(0) is None
        held = 0
        for connection in slow:
            connection.setblocking(False)
            try:
                connection.recv(1)
            except BlockingIOError:
                held += 1
            connection.close()
    assert held == len(slow)


def wait_in_barrier(member: Member) -> None:
    member.barrier()


def broadcast(member: Member, count: int, root: int) -> None:
    member.call("Broadcast", pointer(np.zeros(count, np.uint8)), count, root)


def gather(member: Member, count: int, root: int) -> None:
    out = np.zeros(count * member.size, np.uint8)
    member.call("Gather", pointer(np.zeros(count, np.uint8)), pointer(out), count, root)


def scatter_reduced(member: Member, count: int) -> None:
    blocks, out = np.zeros(count * member.size, np.float32), np.zeros(count, np.float32)
    code = DTYPES.index("float32")
    member.call("ReduceScatter", pointer(blocks), pointer(out), count, code, OPS.index("sum"))


def all_to_all(member: Member, each: int) -> None:
    sizes = np.full(member.size, each, np.uint64)
    data, out = np.zeros(each * member.size, np.uint8), np.zeros(each * member.size, np.uint8)
    member.call("AllToAllV", pointer(data), pointer(sizes), pointer(out), pointer(sizes))


MISMATCHES: list[tuple[Sequence[Any], Sequence[Any], str]] = [
    ((reduce_once, 100), (reduce_once, 101), "SUM of 101 fp32"),
    ((reduce_once, 100), (reduce_once, 100, "int32"), "SUM of 100 int32"),
    ((reduce_once, 100), (reduce_once, 100, "float32", "max"), "MAX of 100 fp32"),
    ((reduce_once, 1 << 20), (reduce_once, 1), "SUM of 1 fp32"),
    ((reduce_once, 100), (wait_in_barrier,), "barrier"),
    ((broadcast, 10, 0), (broadcast, 10, 1), "from/to rank 1"),
    ((broadcast, 10, 0), (gather, 10, 0), "gather of 10 bytes"),
    ((scatter_reduced, 50_000), (gather, 10, 2), "gather of 10 bytes"),
    ((reduce_once, 1 << 18), (all_to_all, 9), "all-to-all"),
    ((all_to_all, 8), (all_to_all, 9), "sends 9 bytes"),
]


@pytest.mark.parametrize("hosts", ["abc", "aab", "abb", "abab"])
@pytest.mark.parametrize("number", range(len(MISMATCHES)))
def test_calls_that_do_not_match_are_an_error_on_every_rank(tmp_path: Path, hosts: str, number: int) -> None:
    usual, other, says = MISMATCHES[number]
    with members(tmp_path, len(hosts), list(hosts)) as group:
        for rank in range(len(hosts)):
            group.start(rank, then_barrier, *(other if rank == 2 else usual))
        outcomes = [group.result(rank) for rank in range(len(hosts))]
    assert [outcome.fault for outcome in outcomes] == ["usage"] * len(hosts), outcomes
    assert all("rank 2 (" in outcome.message for outcome in outcomes), outcomes
    if number + 1 < len(MISMATCHES):
        assert any(says in outcome.message for outcome in outcomes), outcomes


def reduce_twice(member: Member, second: int) -> None:
    """The next call is known, and is what it was said to be."""
    first, following = np.ones(1 << 20, np.float32), np.ones(second, np.float32)
    member.look_ahead(following)
    member.all_reduce(first)
    member.look_ahead(np.zeros(0, np.float32))
    member.all_reduce(following)
    member.barrier()


def reduce_then_wait(member: Member) -> None:
    member.all_reduce(np.ones(1 << 20, np.float32))
    member.barrier()


@pytest.mark.parametrize("way", ["ring", "direct"])
@pytest.mark.parametrize("other", [(reduce_twice, (1 << 19) + 1), (reduce_then_wait,)])
@pytest.mark.parametrize("hosts", ["abc", "abab"])
def test_calls_that_set_out_ahead_and_do_not_match_are_an_error_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: str, other: Sequence[Any], way: str
) -> None:
    monkeypatch.setenv("BAGUA_NET_ALL_REDUCE", way)
    with members(tmp_path, len(hosts), list(hosts)) as group:
        for rank in range(len(hosts)):
            group.start(rank, *(other if rank == 2 else (reduce_twice, 1 << 19)))
        outcomes = [group.result(rank) for rank in range(len(hosts))]
    assert [outcome.fault for outcome in outcomes] == ["usage"] * len(hosts), outcomes
    assert all("rank 2 (" in outcome.message for outcome in outcomes), outcomes


def go_another_way(folder: Path, rank: int, size: int, way: str, **options: Any) -> Member:
    os.environ["BAGUA_NET_ALL_REDUCE"] = way
    return Member(folder, rank, size, **options)


@pytest.mark.parametrize("ways", ["rdr", "rdrrr", "ddrdd", "aaarraaa"])
def test_ranks_that_were_told_different_ways_say_so(tmp_path: Path, ways: str) -> None:
    library_path()
    words = {"r": "ring", "d": "direct", "a": "auto"}
    each = [{"host": f"host {rank}", "way": words[way]} for rank, way in enumerate(ways)]
    group = Ranks(tmp_path, len(ways), go_another_way, each)
    try:
        outcomes = group.run(reduce_then_wait)
    finally:
        group.close()
    if "a" in ways:
        assert outcomes == [None] * len(ways), "who sees no reason takes the ring"
    else:
        assert [outcome.fault for outcome in outcomes] == ["usage"] * len(ways), outcomes
        wants = "want the same BAGUA_NET_ALL_REDUCE on all ranks"
        assert all(wants in outcome.message for outcome in outcomes), outcomes


def scatter(member: Member, count: int, root: int) -> None:
    blocks, out = np.zeros(count * member.size, np.uint8), np.zeros(count, np.uint8)
    member.call("Scatter", pointer(blocks), pointer(out), count, root)


@pytest.mark.parametrize("hosts", ["abcdef", "abcdeaf"])
def test_calls_that_do_not_match_are_found_though_nobody_looks_at_the_link_between_them(
    tmp_path: Path, hosts: str
) -> None:
    """In a barrier of six, those three apart exchange nothing."""
    with members(tmp_path, len(hosts), list(hosts)) as group:
        for rank in range(len(hosts)):
            group.start(rank, then_barrier, gather if rank == 3 else scatter, 10, 0)
        outcomes = [group.result(rank) for rank in range(len(hosts))]
    assert [outcome.fault for outcome in outcomes] == ["usage"] * len(hosts), outcomes
    assert all("rank 3 (" in outcome.message for outcome in outcomes), outcomes
    assert all("gather of 10 bytes" in outcome.message for outcome in outcomes), outcomes


def then_barrier(member: Member, task: Callable[..., None], *arguments: Any) -> None:
    """Who needs nothing of the others in a call learns of the mistake in the next."""
    task(member, *arguments)
    member.barrier()


def cpu_of(act: Callable[[], Any]) -> float:
    before = resource.getrusage(resource.RUSAGE_SELF)
    act()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime)


def cpu_of_barrier(member: Member) -> float:
    return cpu_of(member.barrier)


def cpu_of_sleep(member: Member) -> float:
    def doze() -> None:
        end = time.monotonic() + 1
        while (left := end - time.monotonic()) > 0:
            member.progress()
            member.sleep(left)

    message = member.recv(np.zeros(1, np.uint8), 1 - member.rank)
    used = cpu_of(doze)
    member.wait(member.send(np.zeros(1, np.uint8), 1 - member.rank), message)
    return used


@pytest.mark.parametrize("hosts", ["aa", "ab", "aab"])
def test_a_waiting_rank_sleeps(tmp_path: Path, hosts: str) -> None:
    with members(tmp_path, len(hosts), list(hosts)) as group:
        group.start(0, cpu_of_barrier)
        time.sleep(1.0)
        for rank in range(1, len(hosts)):
            group.start(rank, wait_in_barrier)
        # Spinning would cost a second. The true figure, far smaller, is the benchmark's matter.
        assert group.result(0) < 0.1


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_a_rank_that_drives_sleeps_too(tmp_path: Path, hosts: str) -> None:
    with members(tmp_path, 2, list(hosts)) as group:
        assert all(used < 0.1 for used in group.run(cpu_of_sleep))


def fail_and_again(member: Member, folder: str, hosts: str, times: int) -> tuple[int, ...]:
    def facts() -> tuple[int, int, int]:
        maps = Path("/proc/self/maps").read_text().count("memfd:baguarun")
        return len(os.listdir("/proc/self/fd")), maps, len(os.listdir("/proc/self/task"))

    before = facts()
    for number in range(times):
        options: dict[str, Any] = {"nonce": f"fail-{hosts}-{number}", "host": hosts[member.rank]}
        again = Member(Path(folder), member.rank, member.size, **options)
        if member.rank == number % member.size:
            again.abort("a test")
        reduce_for_ever(again, 100_000)
        again.close()
    return tuple(late - early for late, early in zip(facts(), before, strict=True))


@pytest.mark.parametrize("hosts", ["aa", "ab", "aab"])
def test_communicators_that_failed_leave_nothing_behind(tmp_path: Path, hosts: str) -> None:
    with members(tmp_path, len(hosts), list(hosts)) as group:
        assert group.run(fail_and_again, str(tmp_path), hosts, 10) == [(0, 0, 0)] * len(hosts)


def joined(folder: Path, group: list[dict[str, Any]]) -> list[str]:
    """What ranks as threads hear when they join with these options."""
    outcomes = [""] * len(group)

    def join(rank: int) -> None:
        try:
            Member(folder, rank, len(group), **group[rank])
        except Failed as failed:
            outcomes[rank] = failed.message

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(len(group))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return outcomes


def test_ranks_that_disagree_about_the_group_are_told_so(tmp_path: Path) -> None:
    options = {"nonce": "sizes", "share": False}
    outcomes = joined(tmp_path, [{**options, "arena_bytes": 0}, {**options, "arena_bytes": 4096}])
    assert all(message.startswith("rank 1: its group is") for message in outcomes), outcomes


def make_with_a_secret(folder: Path, rank: int, size: int, **options: Any) -> str:
    os.environ["BAGUA_NET_SECRET"] = "mine" if rank == 0 else "yours"
    try:
        Member(folder, rank, size, **options)
    except Failed as failed:
        return failed.message
    return "joined"


def hear(message: str) -> str:
    return message


def test_who_has_another_secret_does_not_join(tmp_path: Path) -> None:
    library_path()
    group = Ranks(tmp_path, 2, make_with_a_secret, share=False, timeout_s=1.0)
    first, second = group.run(hear)
    group.close()
    assert named(1, first) and "no connection within" in first, first
    assert named(0, second) and "BAGUA_NET_SECRET" in second, second
