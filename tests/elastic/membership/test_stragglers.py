"""Who is named a straggler."""

from __future__ import annotations

from baguarun.elastic.membership.stragglers import (
    Pace,
    paces_from_json,
    paces_to_json,
    stragglers,
    straggling,
)


def test_who_takes_more_than_one_and_a_half_times_as_long_as_most_is_named_slowest_first() -> None:
    assert stragglers({0: 0.20, 1: 0.34, 2: 0.21, 3: 0.50, 4: 0.19}) == (3, 1)
    assert stragglers({0: 0.20, 1: 0.29, 2: 0.21, 3: 0.19}) == ()


def test_of_two_workers_the_slower_may_be_one_and_one_alone_is_none() -> None:
    assert stragglers({0: 0.1, 1: 0.2}) == (1,)
    assert stragglers({0: 7.0}) == ()


def test_milliseconds_are_not_worth_a_word() -> None:
    assert stragglers({0: 0.001, 1: 0.004}) == ()


def test_only_workers_of_the_newest_world_that_can_tell_are_compared() -> None:
    slow = Pace(2, 5, 90, 0.4)
    paces = (Pace(0, 5, 90, 0.1), Pace(1, 5, 90, 0.1), slow, Pace(3, 5, 90, None), Pace(1, 4, 80, 9.0))
    assert straggling(paces) == (slow,)
    assert paces_from_json(paces_to_json(paces)) == paces
