"""How long a contestant's turn is, and what is beside it."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import step_worker

_STEP_S = 0.1


@pytest.mark.parametrize("lead_s", [0.0, 1.5])
@pytest.mark.parametrize("end_s", [0.0, 0.1, 0.3])
def test_a_turn_is_as_long_as_asked_however_long_its_end_takes(
    monkeypatch: pytest.MonkeyPatch, lead_s: float, end_s: float
) -> None:
    def timed(_: Any, steps: int) -> float:
        """Steps that are waited for at their end."""
        return _STEP_S + end_s / steps

    monkeypatch.setattr(step_worker, "timed", timed)
    training: Any = None
    length = step_worker._length("low_precision_decentralized", training, 2.5, lead_s)
    assert 0.75 * 2.5 <= length.counted * _STEP_S + end_s <= 1.25 * 2.5


def test_who_is_held_against_training_alone_has_it_before_and_after_each_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = []
    alone_s = iter([0.1, 0.3, 0.5])
    steps_s = iter([0.4, 0.4, 0.6])

    def timed(training: Any, steps: int) -> float:
        assert steps == 7
        taken.append(training)
        return next(alone_s)

    def block(case: str, number: int, length: step_worker.Length, training: Any) -> step_worker.Block:
        taken.append(training)
        return step_worker.Block(case, number, length.counted, next(steps_s), 0.0)

    monkeypatch.setattr(step_worker.dist, "new_group", lambda **_: None)
    monkeypatch.setattr(step_worker.dist, "barrier", lambda: None)
    monkeypatch.setattr(step_worker, "make_training", lambda case, *_: case)
    monkeypatch.setattr(
        step_worker, "_length", lambda case, *_: step_worker.Length(0, 9 if case == "alone" else 7)
    )
    monkeypatch.setattr(step_worker, "_STEPS_BESIDE", 14)
    monkeypatch.setattr(step_worker, "timed", timed)
    monkeypatch.setattr(step_worker, "_block", block)
    blocks = step_worker.compete(["ddp", "alone", "async_model_average"], "mlp", 1, 1.0, 0.0, None)
    assert taken == ["ddp", "alone", "async_model_average", "alone", "async_model_average", "alone"]
    assert [(each.case, each.steps, each.step_s, each.beside_s) for each in blocks] == [
        ("ddp", 7, 0.4, 0.0),
        ("async_model_average", 14, 0.5, pytest.approx(0.3)),
    ]
