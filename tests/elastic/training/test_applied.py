"""Which optimizers have stepped since the last commit, where a scaler leaves out the step of one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from baguarun.elastic.training.applied import AppliedSteps
from baguarun.errors import CommunicationError, UsageError


class Training:
    """Two weights of one, each with an optimizer that takes away the gradient, and a scaler for both."""

    def __init__(self, models: Sequence[Any] = ()) -> None:
        self.weights = [nn.Parameter(torch.ones(1)) for _ in range(2)]
        self.optimizers = [torch.optim.SGD([weight], lr=1.0) for weight in self.weights]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        self.applied = AppliedSteps(self.optimizers, models, scalers=[self.scaler])

    def step(self, *gradients: float, commits: bool = True) -> list[float]:
        """The weights after it. The gradients are of the first optimizers, and those after them do not
        step."""
        taking_part = list(zip(self.weights, self.optimizers, gradients, strict=False))
        for weight, optimizer, gradient in taking_part:
            optimizer.zero_grad()
            self.scaler.scale((weight * gradient).sum()).backward()
        for _, optimizer, _ in taking_part:
            self.scaler.step(optimizer)
        self.scaler.update()
        if commits:
            self.applied.commit()
        return [weight.item() for weight in self.weights]


OVERFLOW = float("inf")


def test_a_step_that_was_left_out_is_not_taken_for_another_one_s() -> None:
    """Of the first the scaler leaves it out; done again by others, it overflows no more."""
    training = Training()
    assert training.step(OVERFLOW, 0.25, commits=False) == [1.0, 0.75]
    training.applied.redo(training.applied.counts)
    assert training.step(0.5, 0.25) == [0.5, 0.75]


def test_an_optimizer_steps_where_another_one_is_left_out_in_its_place() -> None:
    """The first has stepped; done again, its gradient overflows before it comes to that."""
    training = Training()
    assert training.step(0.5, commits=False) == [0.5, 1.0]
    training.applied.redo(training.applied.counts)
    assert training.step(OVERFLOW, 0.25) == [0.5, 0.75]


@pytest.mark.parametrize("gradients", [(OVERFLOW, 0.25), (0.25, OVERFLOW)])
def test_a_step_is_whole_when_all_have_stepped_also_after_one_was_left_out(
    gradients: tuple[float, float],
) -> None:
    training = Training()
    training.step(*gradients)
    training.step(0.5, commits=False)
    assert not training.applied.is_whole
    training.applied.redo(training.applied.counts)
    training.step(0.5, 0.5, commits=False)
    assert training.applied.is_whole


def test_what_is_applied_stays_so_when_the_step_is_cut_off_a_second_time() -> None:
    training = Training()
    training.step(0.5, 0.5, commits=False)
    for _ in range(2):
        training.applied.redo(training.applied.counts)
        assert training.applied.is_whole
    assert training.step(0.5, 0.5) == [0.5, 0.5]


def test_an_optimizer_that_steps_inside_backward_is_refused_and_has_changed_nothing() -> None:
    training = Training()
    weight, optimizer = training.weights[0], training.optimizers[0]
    weight.register_post_accumulate_grad_hook(lambda _weight: optimizer.step())
    with pytest.raises(UsageError, match=r"^SGD\.step\(\) inside backward: .* want step\(\) after backward$"):
        (weight * 0.5).sum().backward()
    assert weight.item() == 1.0
    assert training.applied.counts == [0, 0]


class Incomplete(nn.Module):
    """A model whose exchange may be broken after backward, where backward waits for none."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, device=device))
        self.broken = False

    def require_complete(self, *, again: bool = False) -> None:
        if self.broken and not again:
            raise CommunicationError("broken")


def test_a_step_that_a_scaler_left_out_is_not_committed_where_its_gradients_did_not_come() -> None:
    model = Incomplete("meta")
    training = Training([model])
    assert training.step(OVERFLOW, OVERFLOW, commits=False) == [1.0, 1.0]
    training.applied.before_commit()
    model.broken = True
    with pytest.raises(CommunicationError, match="broken"):
        training.applied.before_commit()


def test_a_step_that_is_applied_is_committed_whatever_breaks_after_it() -> None:
    model = Incomplete("meta")
    training = Training([model])
    training.step(0.5, 0.5, commits=False)
    model.broken = True
    training.applied.before_commit()


def test_on_cpu_what_backward_has_waited_for_stands() -> None:
    model = Incomplete("cpu")
    training = Training([model])
    training.step(OVERFLOW, OVERFLOW, commits=False)
    model.broken = True
    training.applied.before_commit()
