"""All ranks leave a World at one commit, soon after one of them has heard of the next one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from baguarun.elastic.training import switching
from baguarun.elastic.training.switching import SwitchBoundary
from tests.comm.ranks import run_ranks

TOLD_AT = 37
COMMITS = 100


def _left_at(in_step: bool, ask_every_s: float) -> tuple[int, int, int]:
    """The commit at which this rank leaves, for which generation, and how often ranks were asked."""
    switching._ASK_EVERY_S = ask_every_s
    boundary = SwitchBoundary(1, in_step=in_step)
    asked = set()
    for commit in range(1, COMMITS):
        if in_step:
            dist.all_reduce(torch.zeros(1))
        newest = boundary.at_commit(2 if dist.get_rank() == 1 and commit >= TOLD_AT else 1)
        asked.add(boundary.asked_at)
        if newest is not None:
            boundary.farewell()
            return commit, newest, len(asked)
    return COMMITS, 0, len(asked)


@pytest.mark.parametrize(("in_step", "ask_every_s"), [(True, 1e6), (True, 0.01), (False, 0.0)])
def test_all_leave_at_one_commit_soon_after_one_was_told(in_step: bool, ask_every_s: float) -> None:
    (commit, newest, asked), *others = run_ranks(_left_at, 3, in_step, ask_every_s)
    assert others == [(commit, newest, asked)] * 2
    assert newest == 2
    # Told just after a question: the next one is 16 commits later at most, its answer is read after it.
    assert TOLD_AT < commit <= TOLD_AT + 17


def test_ranks_are_asked_as_seldom_as_all_of_them_allow() -> None:
    # At the commits 1, 17, 33 and 49.
    assert run_ranks(_left_at, 2, True, 1e6) == [(50, 2, 4)] * 2
    # At every one: no step is as short as that.
    assert run_ranks(_left_at, 2, True, 0.0) == [(TOLD_AT + 1, 2, TOLD_AT)] * 2


def _end_of_training(told: int) -> int | None:
    boundary = SwitchBoundary(1, in_step=True)
    for _ in range(5):
        boundary.at_commit(1)
    return boundary.at_end(told if dist.get_rank() == 0 else 1)


@pytest.mark.parametrize(("told", "newest"), [(1, None), (2, 2)])
def test_ranks_at_the_end_go_on_if_one_was_told(told: int, newest: int | None) -> None:
    assert run_ranks(_end_of_training, 2, told) == [newest] * 2
