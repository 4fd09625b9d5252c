"""Ranks that are killed, frozen and cut off in the middle of collectives: the others know in time, and go on.

`python -m tests.faults --rounds 200` plays more rounds; docs/results/faults.json has what came of them.
"""

from __future__ import annotations

import pytest

from tests.faults.plan import ONE_HOST, THREE_HOSTS, Fault, Layout, draw
from tests.faults.report import run

PATIENCE_S = 3.0
"""Beyond the promised bounds: other tests may keep the machine busy."""


@pytest.mark.parametrize(
    ("layout", "rounds"),
    [(ONE_HOST, 6), pytest.param(THREE_HOSTS, 9, marks=pytest.mark.root)],
    ids=["one host", "three hosts"],
)
def test_survivors_name_who_was_lost_in_time_and_form_a_new_group(layout: Layout, rounds: int) -> None:
    report = run(layout, rounds, seed=7, patience_s=PATIENCE_S)
    assert report.failures == []
    assert len(report.played) == sum(report.reformed.values()) == rounds


def test_every_fault_hits_every_rank_and_every_collective_sooner_or_later() -> None:
    rounds = draw(1, 200, THREE_HOSTS)
    assert {rank for each in rounds for rank in each.lost} == {0, 1, 2, 3}
    assert len({(each.fault, each.collective) for each in rounds}) == 30
    assert {each.lost for each in rounds if each.fault is Fault.CUT} == {(0, 2), (1,), (3,)}
    assert draw(1, 200, THREE_HOSTS) == rounds
