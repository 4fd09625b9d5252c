"""What is kept of what workers tell about their steps."""

from __future__ import annotations

from baguarun.elastic.membership.records import Process
from baguarun.elastic.membership.stragglers import Pace
from baguarun.launcher.paces import Paces

A = Process(0, 1)


def test_a_pace_is_the_median_per_step_once_there_are_enough_and_begins_anew_in_each_world() -> None:
    paces = Paces()
    assert paces.of(A, 3, 1) is None
    paces.progressed(A, {"steps": 10, "begins": True})
    for steps, busy_s in [(12, 0.4), (14, 0.4), (16, 9.0), (18, 0.4)]:
        paces.progressed(A, {"steps": steps, "busy_s": busy_s})
    assert paces.of(A, 3, 1) == Pace(3, 1, 18, None)
    paces.progressed(A, {"steps": 20, "busy_s": 0.4})
    assert paces.of(A, 3, 1) == Pace(3, 1, 20, 0.2)
    paces.progressed(A, {"steps": 20, "begins": True})
    assert paces.of(A, 2, 2) == Pace(2, 2, 20, None)


def test_a_straggler_is_named_once_in_a_world() -> None:
    paces = Paces()
    slow = Pace(1, 4, 90, 0.4)
    assert paces.new_stragglers((Pace(0, 4, 90, 0.1), slow)) == [slow]
    assert paces.new_stragglers((Pace(0, 4, 95, 0.1), slow)) == []
    assert [pace.rank for pace in paces.new_stragglers((Pace(0, 5, 99, 0.1), Pace(1, 5, 99, 0.4)))] == [1]
