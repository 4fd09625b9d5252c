from __future__ import annotations

import pytest

from baguarun.comm.algorithms.step_times import StepTimes


def noted(steps: list[tuple[float, bool]]) -> StepTimes:
    times = StepTimes()
    for seconds, is_beside in steps:
        times.note(seconds, is_beside=is_beside)
    return times


def test_nothing_is_known_of_no_steps_and_no_cost_of_few_or_of_one_kind() -> None:
    assert (StepTimes().typical_s(), StepTimes().cost_beside()) == (0.0, 0.0)
    assert noted([(1.0, False)] * 100 + [(2.0, True)] * 63).cost_beside() == 0.0
    assert noted([(1.0, False)] * 100 + [(2.0, True)] * 64).cost_beside() == pytest.approx(1.0)
    assert noted([(2.0, True)] * 100).cost_beside() == 0.0
    assert noted([(0.0, False), (0.0, True)] * 100).cost_beside() == 0.0


def test_the_cost_is_how_much_longer_the_mean_step_is_beside_an_exchange() -> None:
    steps = [(0.9, False), (1.1, False), (1.0, True), (1.2, True)]
    assert noted(steps * 50).cost_beside() == pytest.approx(0.1)
    assert noted([(1.0, False)] * 100 + [(6.0, True)] * 100).cost_beside() == pytest.approx(5.0)
    # Shorter ones cost nothing.
    assert noted([(seconds, not is_beside) for seconds, is_beside in steps * 50]).cost_beside() == 0.0


@pytest.mark.parametrize("took_s", [3.0, 1000.0])
@pytest.mark.parametrize("is_beside", [False, True])
def test_a_checkpoint_between_two_steps_counts_for_nothing(took_s: float, is_beside: bool) -> None:
    times = noted([*[(1.0, False), (1.1, True)] * 100, (took_s, is_beside)])
    assert times.typical_s() == pytest.approx(1.05, abs=0.051)
    assert times.cost_beside() == pytest.approx(0.1)


def test_only_the_last_steps_count() -> None:
    early = [(1.0, False), (1.9, True)] * 256
    assert noted(early).cost_beside() == pytest.approx(0.9)
    assert noted([*early, *[(1.0, False), (1.5, True)] * 256]).cost_beside() == pytest.approx(0.5)
    assert noted([*early, *[(2.0, False)] * 32]).typical_s() == 2.0
