"""All ranks leave a World at one commit, soon after one of them has heard of the next one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from baguarun.elastic.training import switching
from baguarun.elastic.training.switching import News, SwitchBoundary
from tests.comm.ranks import run_ranks

TOLD_AT = 37
COMMITS = 100


def _left_at(in_step: bool, ask_every_s: float) -> tuple[int, int, int]:
    """The commit at which this rank leaves, for which generation, and how often ranks were asked."""
    switching._ASK_EVERY_S = switching._ASK_RELAXED_EVERY_S = ask_every_s
    boundary = SwitchBoundary(1, in_step=in_step)
    asked = set()
    for commit in range(1, COMMITS):
        if in_step:
            dist.all_reduce(torch.zeros(1))
        newest = boundary.at_commit(News(2 if dist.get_rank() == 1 and commit >= TOLD_AT else 1))
        asked.add(boundary.asked_at)
        if newest is not None:
            boundary.farewell()
            return commit, newest.generation, len(asked)
    return COMMITS, 0, len(asked)


@pytest.mark.parametrize(("in_step", "ask_every_s"), [(True, 1e6), (True, 0.01), (False, 0.0)])
def test_all_leave_at_one_commit_soon_after_one_was_told(in_step: bool, ask_every_s: float) -> None:
    (commit, newest, asked), *others = run_ranks(_left_at, 3, in_step, ask_every_s)
    assert others == [(commit, newest, asked)] * 2
    assert newest == 2
    # Told just after a question: the next one is 16 commits later at most, and looked at after that.
    assert TOLD_AT <= commit <= TOLD_AT + 17


def test_ranks_are_asked_as_seldom_as_all_of_them_allow() -> None:
    # At the commits 1, 17, 33 and 49.
    assert run_ranks(_left_at, 2, True, 1e6) == [(50, 2, 4)] * 2
    # At every one: no step is as short as that.
    assert run_ranks(_left_at, 2, True, 0.0) == [(TOLD_AT, 2, TOLD_AT)] * 2


def _asked_at_when_steps_become_long() -> list[int]:
    switching._ASK_EVERY_S = 1e6
    boundary = SwitchBoundary(1, in_step=True)
    asked = []
    for commit in range(1, 40):
        if commit == 30:
            switching._ASK_EVERY_S = 0.0
        boundary.before_step(News(1))
        boundary.at_commit(News(1))
        asked.append(boundary.asked_at)
    return sorted(set(asked))


def test_ranks_are_asked_at_every_commit_once_steps_are_long() -> None:
    # What they wish at commit 33 they all know at 34.
    wanted = [1, 17, 33, 35, 36, 37, 38, 39]
    assert run_ranks(_asked_at_when_steps_become_long, 2) == [wanted] * 2


def _asked_at_with_newcomers_on_their_way(in_step: bool) -> list[int]:
    """The commits at which ranks are asked, where one rank knows between the commits 20 and 40."""
    switching._ASK_EVERY_S = switching._ASK_RELAXED_EVERY_S = 1e6
    commits = [0]
    boundary = SwitchBoundary(
        1, in_step=in_step, is_change_near=lambda: dist.get_rank() == 1 and 20 < commits[-1] < 40
    )
    asked = []
    for commit in range(1, 60):
        commits.append(commit)
        boundary.before_step(News(1))
        boundary.at_commit(News(1))
        asked.append(boundary.asked_at)
    return sorted(set(asked))


def test_ranks_are_asked_as_often_as_can_be_while_one_of_them_expects_newcomers() -> None:
    in_step = [1, 17, 33, 35, 36, 37, 38, 39, 40, 56]
    assert run_ranks(_asked_at_with_newcomers_on_their_way, 2, True) == [in_step] * 2
    relaxed = [1, 3, 11, 19, 27, 36, 37, 38, 39, 40, 48, 50, 58]
    assert run_ranks(_asked_at_with_newcomers_on_their_way, 2, False) == [relaxed] * 2


def _told_within_a_step(told_before: int, told_after: int) -> list[int | None]:
    """What is found at two commits by ranks of which one is told before or after its optimizer steps."""
    switching._ASK_EVERY_S = 0.0
    boundary = SwitchBoundary(1, in_step=True)
    found = []
    for told in ((told_before, told_after), (told_after, told_after)):
        before, after = told if dist.get_rank() == 1 else (1, 1)
        # As with two optimizers: the question is asked once.
        boundary.before_step(News(before))
        boundary.before_step(News(after))
        newest = boundary.at_commit(News(after))
        found.append(newest and newest.generation)
        if newest is not None:
            boundary.farewell()
            break
    return found


@pytest.mark.parametrize(("before", "after", "found"), [(2, 2, [2]), (1, 2, [None, 2])])
def test_who_is_told_before_its_optimizer_steps_leaves_with_all_others_at_that_commit(
    before: int, after: int, found: list[int | None]
) -> None:
    assert run_ranks(_told_within_a_step, 3, before, after) == [found] * 3


def _end_of_training(told: News) -> News | None:
    boundary = SwitchBoundary(1, in_step=True)
    for _ in range(5):
        boundary.at_commit(News(1))
    return boundary.at_end(told if dist.get_rank() == 0 else News(1))


@pytest.mark.parametrize(
    ("told", "newest"), [(News(1), None), (News(2), News(2)), (News(2, True), News(2, True))]
)
def test_ranks_at_the_end_go_on_if_one_was_told(told: News, newest: News | None) -> None:
    assert run_ranks(_end_of_training, 2, told) == [newest] * 2


def _halting(told: dict[int, News]) -> list[News | None]:
    switching._ASK_EVERY_S = 0.0
    boundary = SwitchBoundary(1, in_step=True)
    return [boundary.at_commit(News(1)), boundary.at_commit(told.get(dist.get_rank(), News(1)))]


def test_all_know_that_the_job_halts_if_one_was_told() -> None:
    halts = News(2, halts=True)
    assert run_ranks(_halting, 3, {1: halts}) == [[None, halts]] * 3
    # A World that is to follow was announced to some before: they do not wait for it.
    assert run_ranks(_halting, 3, {0: News(2), 1: halts}) == [[None, halts]] * 3
    assert run_ranks(_halting, 3, {0: News(3), 1: halts}) == [[None, News(3)]] * 3
