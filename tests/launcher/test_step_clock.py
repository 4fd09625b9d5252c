"""When a step is judged to hang, on a clock that the tests turn."""

from __future__ import annotations

from baguarun.launcher.step_clock import HangLimit, StepClock


def running(step_s: float, limit: HangLimit | None = None, steps: int = 20) -> tuple[StepClock, float]:
    clock = StepClock(limit or HangLimit())
    clock.begin(0.0, 0)
    for step in range(1, steps + 1):
        clock.progressed(step * step_s, step)
    return clock, steps * step_s


def test_a_step_ten_times_as_long_as_the_slowest_hangs() -> None:
    clock, now_s = running(30.0)
    assert clock.overdue_s(now_s + 300.0) is None
    assert clock.overdue_s(now_s + 301.0) == 301.0


def test_short_steps_get_a_minute() -> None:
    clock, now_s = running(0.01)
    assert clock.overdue_s(now_s + 59.0) is None
    assert clock.overdue_s(now_s + 61.0) is not None


def test_nothing_is_known_before_the_first_step_is_done() -> None:
    clock = StepClock(HangLimit())
    clock.begin(0.0, 0)
    assert clock.overdue_s(1e6) is None


def test_a_limit_that_was_asked_for_holds_from_the_first_step_on() -> None:
    clock = StepClock(HangLimit(fixed_s=5.0))
    clock.begin(0.0, 0)
    assert clock.overdue_s(5.0) is None
    assert clock.overdue_s(5.5) == 5.5


def test_waiting_for_a_world_is_no_step() -> None:
    clock, now_s = running(0.1)
    clock.pause()
    assert clock.overdue_s(now_s + 1000.0) is None
    clock.begin(now_s + 1000.0, 20)
    assert clock.overdue_s(now_s + 1001.0) is None


def test_several_steps_in_one_message_are_counted_one_by_one() -> None:
    clock = StepClock(HangLimit())
    clock.begin(0.0, 0)
    clock.progressed(100.0, 10)
    assert clock.usual_s == 10.0
    assert clock.overdue_s(100.0 + 101.0) == 101.0


def test_a_slow_step_of_long_ago_is_forgotten() -> None:
    clock = StepClock(HangLimit())
    clock.begin(0.0, 0)
    clock.progressed(1000.0, 1)
    for step in range(2, 60):
        clock.progressed(1000.0 + step, step)
    assert clock.overdue_s(1059.0 + 61.0) is not None
