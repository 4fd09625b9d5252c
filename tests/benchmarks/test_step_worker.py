"""How long a contestant's turn is."""

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
