"""Two minutes in the life of a job that is hit every ten seconds."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, stdev

import pytest

from tests.lab.chaos import LEADER_KILLED
from tests.lab.chaos_run import Plan, undergo, undisturbed

_USUAL_SPREAD = 0.05
"""Standard deviation of the loss over the seeds of undisturbed runs."""


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_that_is_hit_every_ten_seconds_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    plan = Plan(seed=1, seconds=120.0, epochs=12, leader_kills=1)
    outcome = undergo(plan, tmp_path)
    print(outcome.logs, outcome.descriptors, sep="\n")
    assert set(outcome.exit_codes.values()) == {0}
    assert outcome.problems == []
    assert [what for _, what, _ in outcome.history].count(LEADER_KILLED) == plan.leader_kills
    calm = undisturbed(plan, range(2), tmp_path)
    # Two seeds may agree by chance, more so than runs do; what goes wrong here goes wrong by far.
    assert abs(outcome.loss - mean(calm)) <= 3 * max(stdev(calm), _USUAL_SPREAD)
