"""Who is found to hang among the workers of a node, on a clock that the tests turn."""

from __future__ import annotations

from baguarun.elastic.membership.records import Process
from baguarun.launcher.hang_guard import Finding, HangGuard, Verdict, describe
from baguarun.launcher.step_clock import HangLimit

A, B = Process(0, 1), Process(1, 1)


def standing(*, removes: bool = True) -> HangGuard:
    """Both have come to step 3 at 2.0, and may take ten seconds for the next."""
    guard = HangGuard(HangLimit(fixed_s=10.0), removes=removes)
    for worker in (A, B):
        guard.begin(worker, 0.0, 0)
        guard.progressed(worker, 2.0, 3)
    return guard


def ask(guard: HangGuard, answers: dict[Process, bool | None], now_s: float) -> list[tuple[Process, Verdict]]:
    for worker, waits in answers.items():
        guard.answered(worker, waits)
    return [(finding.worker, finding.verdict) for finding in guard.judge(now_s)]


def ask_often(
    guard: HangGuard, answers: dict[Process, bool | None], now_s: float
) -> list[tuple[Process, Verdict]]:
    return [found for each in range(6) for found in ask(guard, answers, now_s + each)]


def test_only_the_one_that_waits_for_nobody_is_removed_after_its_stacks_are_written() -> None:
    found = ask_often(standing(), {A: True, B: False}, 13.0)
    assert found == [(B, Verdict.HANGS), (B, Verdict.REMOVE)]


def test_when_none_waits_it_may_be_their_storage_and_they_get_longer() -> None:
    guard = standing()
    assert ask_often(guard, {A: False, B: False}, 13.0) == [(A, Verdict.HANGS), (B, Verdict.HANGS)]
    assert ask_often(guard, {A: False, B: False}, 46.0) == []
    assert ask(guard, {A: False, B: False}, 53.0) == [(A, Verdict.REMOVE), (B, Verdict.REMOVE)]


def test_what_is_said_before_a_world_has_begun_is_no_step() -> None:
    guard = HangGuard(HangLimit(fixed_s=10.0), removes=True)
    guard.progressed(A, 0.0, 0)
    assert ask_often(guard, {A: False}, 100.0) == []


def test_where_nobody_is_to_be_removed_it_is_only_spoken_of() -> None:
    assert ask_often(standing(removes=False), {A: True, B: False}, 13.0) == [(B, Verdict.HANGS)]


def test_a_moment_between_two_waits_is_no_hang() -> None:
    guard = standing()
    for each in range(8):
        assert ask(guard, {A: True, B: each % 3 == 0}, 13.0 + each / 10) == []


def test_who_cannot_tell_whether_it_waits_is_never_removed() -> None:
    assert ask_often(standing(), {A: None, B: None}, 13.0) == [(A, Verdict.UNKNOWN), (B, Verdict.UNKNOWN)]


def test_when_all_wait_for_twice_the_limit_that_is_said_once() -> None:
    guard = standing()
    assert ask_often(guard, {A: True, B: True}, 13.0) == []
    assert ask_often(guard, {A: True, B: True}, 23.0) == [(A, Verdict.ALL_WAIT), (B, Verdict.ALL_WAIT)]


def test_a_step_done_after_all_begins_anew() -> None:
    guard = standing()
    assert ask_often(guard, {B: False}, 12.5)[0] == (B, Verdict.HANGS)
    guard.progressed(B, 20.0, 4)
    assert ask_often(guard, {B: False}, 22.0) == []
    assert ask_often(guard, {B: False}, 31.0)[0] == (B, Verdict.HANGS)


def test_who_waits_for_a_world_or_has_ended_does_not_hang() -> None:
    guard = standing()
    guard.pause(A)
    guard.forget(B)
    assert ask_often(guard, {A: False, B: False}, 100.0) == []


def test_time_in_which_the_agent_itself_stood_does_not_count() -> None:
    guard = standing()
    guard.slept(100.0)
    assert ask_often(guard, {A: False}, 105.0) == []


def test_people_are_told_who_how_long_and_where_the_stacks_are() -> None:
    line = describe(Finding(B, Verdict.HANGS, 61.4, 0.2512), "rank 1", "/logs/x", removes=True)
    assert line == (
        "rank 1 has been in one step for 61 s (usually 0.251 s) and waits for no other worker; "
        "it is removed, its threads' stacks are in /logs/x"
    )
