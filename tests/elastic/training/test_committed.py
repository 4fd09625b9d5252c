"""What goes back to the last commit when a step is done again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from baguarun.comm.extension import load_extension
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


class Remembering(torch.amp.GradScaler):
    """Keeps something of its own."""

    overflows = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "overflows": self.overflows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.overflows = state["overflows"]


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, Remembering])
def test_whatever_a_scaler_keeps_goes_back(kind: type[torch.amp.GradScaler]) -> None:
    scaler = kind("cpu", init_scale=1024.0, growth_interval=10)
    captured: dict[str, Any] = {"scaler": scaler}
    copies = CommittedCopies(captured)
    copies.commit(captured)
    before = scaler.state_dict()
    for _ in range(2):
        scaler.scale(torch.ones(()))
        scaler.set_growth_interval(2 * scaler.get_growth_interval())
        scaler.set_growth_factor(8.0)
        scaler.set_backoff_factor(0.25)
        assert scaler._scale is not None and scaler._growth_tracker is not None
        scaler._scale.mul_(2)
        scaler._growth_tracker.add_(1)
        scaler.overflows = 5
        copies.roll_back(captured)
        assert scaler.state_dict() == before


def test_a_scaler_that_is_off_is_left_alone() -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    captured: dict[str, Any] = {"scaler": scaler}
    copies = CommittedCopies(captured)
    copies.commit(captured)
    copies.roll_back(captured)
    assert scaler.state_dict() == {}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_buffers_of_scripted_modules_go_back_too() -> None:
    # In between, something with a bias: a mean that is 0 already would stay so.
    model = nn.Sequential(torch.jit.script(nn.BatchNorm1d(3)), nn.Linear(3, 3), nn.BatchNorm1d(3))
    captured: dict[str, Any] = {"model": model}
    copies = CommittedCopies(captured)
    copies.commit(captured)
    before = [buffer.clone() for buffer in model.buffers()]
    model(torch.randn(4, 3))
    assert not any(torch.equal(buffer, kept) for buffer, kept in zip(model.buffers(), before, strict=True))
    copies.roll_back(captured)
    assert all(torch.equal(buffer, kept) for buffer, kept in zip(model.buffers(), before, strict=True))


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


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "in a row": lambda: torch.randn(3, 4),
    "a number": lambda: torch.tensor(7),
    "empty": lambda: torch.empty(0, 3),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "part of another": lambda: torch.randn(4, 6)[1:3, ::2],
    "a negative view": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
    "bfloat16": lambda: torch.randn(9).bfloat16(),
    "sparse": lambda: torch.eye(3).to_sparse(),
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_a_tensor_of_any_kind_is_put_back(make: Callable[[], torch.Tensor]) -> None:
    live = make()
    copies = load_extension().TensorCopies()
    copies.take([live])
    live.mul_(2)
    # Into the memory of the first copy.
    copies.take([live])
    taken, before = live.clone(), live._version
    live.mul_(3)
    copies.put_back([live])
    assert torch.equal(live.to_dense(), taken.to_dense())
    # As autograd wants to know.
    assert live._version > before + 1


def test_other_tensors_and_other_sizes_are_copied_anew() -> None:
    copies = load_extension().TensorCopies()
    first, second = torch.zeros(3), torch.ones(3)
    copies.take([first])
    copies.take([second])
    second.data = torch.full((5,), 2.0)
    copies.take([second])
    second.zero_()
    copies.put_back([second])
    assert second.tolist() == [2.0] * 5
    assert first.tolist() == [0.0] * 3
    second.data = torch.full((5,), 0.5, dtype=torch.float64)
    copies.take([second])
    second.zero_()
    copies.put_back([second])
    assert second.tolist() == [0.5] * 5
    with pytest.raises(ValueError, match="1 tensors were taken, 2 are to be put back"):
        copies.put_back([first, second])
