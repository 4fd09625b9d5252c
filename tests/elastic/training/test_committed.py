"""What goes back to the last commit when a step is done again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from baguarun.elastic.training.committed import CommittedCopies
from baguarun.elastic.training.learning_rates import scale_learning_rates


class Average:
    """Follows a weight, and takes over the very tensor that it is given."""

    def __init__(self) -> None:
        self.value = torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_an_object_goes_back_as_often_as_the_step_is_done_again() -> None:
    average = Average()
    captured: dict[str, Any] = {"average": average}
    copies = CommittedCopies(captured)
    average.value.fill_(3)
    copies.commit(captured)
    for _ in range(3):
        average.value.add_(1)
        copies.roll_back(captured)
        assert average.value.tolist() == [3, 3]


@pytest.mark.parametrize("cut_short", ["in the step", "before update"])
def test_a_scaler_begins_the_step_again(cut_short: str) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    captured: dict[str, Any] = {"optimizer": optimizer, "scaler": scaler}
    copies = CommittedCopies(captured)
    copies.commit(captured)
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer) if cut_short == "in the step" else scaler.step(optimizer)
    copies.roll_back(captured)
    before = weight.detach().clone()
    optimizer.zero_grad()
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert (before - weight).tolist() == [1.0, 1.0, 1.0]


def test_a_learning_rate_that_was_scaled_for_a_broken_step_does_not_come_back() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    factor, is_broken = 2.0, True
    scale_learning_rates([optimizer], lambda: factor)

    def break_once(*_call: object) -> None:
        if is_broken:
            raise ConnectionError

    optimizer.register_step_pre_hook(break_once)
    with pytest.raises(ConnectionError):
        optimizer.step()
    factor, is_broken = 1.0, False
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
