"""Every rank trains on its own weights while their average is computed in the background."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from baguarun.comm.algorithms.base import Algorithm, Operation, full_precision
from baguarun.comm.algorithms.pending import Pending, PendingReduction
from baguarun.comm.algorithms.step_times import StepTimes
from baguarun.comm.algorithms.stepper import StepContext, Stepper, finish_at_exit, require_range
from baguarun.comm.rails import Hierarchical, require_hierarchical
from baguarun.comm.weights import FlatWeights
from baguarun.errors import UsageError

_LEAST_SLACK, _MOST_SLACK = 2, 4
"""Rounds start at least and at most this many times the length of a round apart: they need cores, too. Much
further apart, replicas learn little of each other."""
_COST = 0.02
"""What rounds may take from training. Where steps beside one are more than twice that longer, rounds start
further apart, until they cost that or as far as they may."""


@dataclass(frozen=True, kw_only=True)
class AsyncModelAverage(Algorithm):
    """Asynchronous model averaging (Bagua, arXiv 2107.01499, section 3), with bounded staleness.

    A round takes a snapshot s of the weights at a step boundary and averages it in the background; the
    average a is applied at a later boundary as x += a - s. Rounds start after the same number of steps on
    every rank, agreed in the round before (in the first one while it is under way), and a rank waits for the
    round under way before it starts the next. So a rank is never more than one period ahead, no rank is left
    waiting if all take the same number of steps, and nothing has to be stopped for evaluation or at the end.
    With more steps than another one, which Bagua allows, a rank comes to wait for a round that the other
    never starts. Replicas differ.

    Under `--elastic in-place` ranks go in step while newcomers are expected (docs/elastic.md).

    When the World changes, the round under way is dropped: every rank keeps its own weights, and the next
    round begins with its next step.
    """

    name: ClassVar[str] = "async_model_average"
    exchanges_weights: ClassVar[bool] = True

    sync_interval_ms: int = 500
    """Milliseconds of training from one round's start to the next; twice a round's length where that is more,
    and up to four times where training is slower while a round is under way."""
    warmup_steps: int = 0
    """Steps at the start in which gradients are averaged instead."""
    max_staleness_steps: int = 500
    """No average is applied more steps than this after its snapshot: then ranks wait for it. Rounds do not
    start further apart, either."""
    hierarchical: Hierarchical = "auto"
    """Average inside the node before anything leaves it. baguanet does so whatever is asked."""

    def __post_init__(self) -> None:
        require_hierarchical(self.name, self.hierarchical)
        require_range(self.name, "sync_interval_ms", self.sync_interval_ms, 0)
        require_range(self.name, "warmup_steps", self.warmup_steps, 0)
        require_range(self.name, "max_staleness_steps", self.max_staleness_steps, 1)

    def hierarchy(self) -> Hierarchical:
        return self.hierarchical

    def operation(self, dtype: torch.dtype, device: torch.device) -> Operation | None:
        return full_precision(dtype, device, average=True) if self.warmup_steps > 0 else None

    def prepare(self, weights: FlatWeights) -> None:
        weights.keep_spare(2)

    def make_stepper(self, context: StepContext) -> AsyncStepper:
        return AsyncStepper(context, self)


def choose_period(interval_steps: float, round_steps: float, cost_beside: float, max_steps: int) -> int:
    """Steps between the starts of two rounds: what was asked for, or more if a round takes longer or costs
    much. `cost_beside`: by what share steps are longer while one is under way."""
    slack = min(max(cost_beside / _COST, _LEAST_SLACK), _MOST_SLACK)
    return max(math.ceil(min(max(interval_steps, slack * round_steps), max_steps)), 1)


_UNKNOWN = (-1.0, -1.0, 0.0)
"""The vote of a rank that has not seen the end of a round yet: less than any other."""


@dataclass(frozen=True, kw_only=True)
class _Round:
    average: Pending
    steps: int
    """What snapshots were taken after."""
    period_vote: PendingReduction | None
    """None in the first round, which is asked about while it is under way."""
    started_at: float


@dataclass(kw_only=True)
class _FirstPeriod:
    """Ranks ask each other 1, 2, 4, ... steps after the start of the first round how far away the next is."""

    start: int
    """Steps taken when the round started."""
    ask_at: int
    question: PendingReduction | None = None
    """The last one; the answer is read when the next one would be asked."""


class AsyncStepper(Stepper):
    """The rounds of one model. Keeps two copies of the weights."""

    def __init__(
        self, context: StepContext, settings: AsyncModelAverage, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(context)
        self._settings = settings
        self._clock = clock
        self._paused = False
        self._round: _Round | None = None
        # From a checkpoint: what the round under way would have added to the weights.
        self._resumed_change: list[torch.Tensor] | None = None
        self._snapshot = context.weights.empty_copy()
        self._averages = context.weights.empty_copy()
        # Steps after which the next round starts, and how far apart rounds are at present; None: not known.
        self._next_start: int | None = settings.warmup_steps + 1
        self._period: int | None = None
        self._first: _FirstPeriod | None = None
        # What a round takes, as far as is known.
        self._round_s: float | None = None
        # Waits for rounds left out.
        self._step_times = StepTimes()
        self._boundary_ended_at = clock()
        finish_at_exit(self, AsyncStepper.finish)

    def sends_gradients(self) -> bool:
        return self.steps < self._settings.warmup_steps

    def shares_buffers(self) -> bool:
        """As long as ranks go in step anyway; later they would have to wait for each other."""
        return self.steps <= self._settings.warmup_steps

    def after_step(self) -> None:
        self.steps += 1
        if self.steps <= self._settings.warmup_steps:
            self.shared_steps = self.steps
        else:
            took_s = self._clock() - self._boundary_ended_at
            self._step_times.note(took_s, is_beside=self._round is not None)
        self._apply_resumed_change()
        if self._round is not None and self._is_done(self._round):
            self._apply(self._round)
        if self._first is not None and self.steps == self._first.ask_at:
            self._agree_on_first_period(self._first)
        if self.steps == self._next_start and not self._paused:
            if self._round is not None:
                self._apply(self._round)
            self._start()
        self._boundary_ended_at = self._clock()

    def pause(self) -> None:
        """Wait for the round under way, apply it, and start no other. On all ranks after the same step."""
        self._paused = True
        asked_at = self._clock()
        self._apply_resumed_change()
        if self._round is not None:
            self._apply(self._round)
        self._end_first_period()
        self._leave_out_since(asked_at)

    def finish(self) -> None:
        self.pause()

    def resume(self) -> None:
        """After `pause`: start rounds again with the next step. On all ranks after the same step."""
        if not self._paused:
            return
        self._paused = False
        self._next_start = max(self.steps, self._settings.warmup_steps) + 1

    def state_dict(self) -> dict[str, Any]:
        """Waits for the round under way: what it will add to this rank's weights is part of the state."""
        change = self._resumed_change
        if self._round is not None:
            asked_at = self._clock()
            averages = self._round.average.wait()
            self._leave_out_since(asked_at)
            change = [average - mine for average, mine in zip(averages, self._snapshot, strict=True)]
        kept = None if change is None else [tensor.clone() for tensor in change]
        return {**super().state_dict(), "change": kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        change = state["change"]
        buffers = self.context.weights.buffers
        here = [buffer.numel() for buffer in buffers]
        there = here if change is None else [tensor.numel() for tensor in change]
        if here != there:
            raise UsageError(
                f"{AsyncModelAverage.name}: the state is of a model with {there} weights, this one has "
                f"{here}; want the state of the same model"
            )
        super().load_state_dict(state)
        self._next_start = max(self.steps, self._settings.warmup_steps) + 1
        self._resumed_change = (
            None
            if change is None
            else [tensor.to(mine.device, copy=True) for tensor, mine in zip(change, buffers, strict=True)]
        )

    def drop(self) -> None:
        if self._round is not None:
            self._round.average.wait()
            self._round = None
        self._end_first_period()

    def begin_anew(self) -> None:
        self.load_state_dict({"steps": 0, "change": None})

    def hand_over(self) -> dict[str, Any]:
        """The round under way is dropped, and with it no work of this rank's."""
        return {**super().hand_over(), "paused": self._paused, "change": self._resumed_change}

    def take_over(self, left: dict[str, Any] | None) -> None:
        super().take_over(left)
        if left is not None:
            self._paused, self._resumed_change = left["paused"], left["change"]
        self._next_start = max(self.steps, self._settings.warmup_steps) + 1

    def _leave_out_since(self, asked_at: float) -> None:
        """A wait between two boundaries is no part of a step."""
        self._boundary_ended_at += self._clock() - asked_at

    def _apply_resumed_change(self) -> None:
        if self._resumed_change is not None:
            torch._foreach_add_(self.context.weights.buffers, self._resumed_change)
            self._resumed_change = None

    def _is_done(self, running: _Round) -> bool:
        return running.average.is_done() and (running.period_vote is None or running.period_vote.is_done())

    def _start(self) -> None:
        torch._foreach_copy_(self._snapshot, self.context.weights.buffers)
        average = self.average(self._averages, self._snapshot)
        if self._period is None:
            vote, self._next_start = None, None
            self._first = _FirstPeriod(start=self.steps, ask_at=self.steps + 1)
        else:
            vote = self._vote(self._wanted())
            # The round under way is bound by the period agreed before it: it must end before the next starts.
            self._next_start = self.steps + self._period
        self._round = _Round(average=average, steps=self.steps, period_vote=vote, started_at=self._clock())

    def _wanted(self) -> tuple[float, float, float]:
        """This rank's vote: steps from one round's start to the next as asked for, steps that a round takes,
        and, less than zero, what it costs."""
        step_s = self._step_times.typical_s()
        if step_s <= 0:
            return math.inf, math.inf, 0.0
        interval_s = self._settings.sync_interval_ms / 1000
        return interval_s / step_s, (self._round_s or 0.0) / step_s, -self._step_times.cost_beside()

    def _vote(self, wanted: tuple[float, float, float]) -> PendingReduction:
        """The least of each. So steps are the slowest rank's: the others' rounds last longer because they
        wait for it. And the cost is that of the rank which loses most."""
        vote = torch.tensor(wanted, dtype=torch.float64, device=self._averages[0].device)
        return PendingReduction([vote], self.context.lanes, least=True)

    def _agreed_period(self, vote: PendingReduction) -> int | None:
        """None: some rank has not seen the end of a round yet."""
        interval_steps, round_steps, cost = vote.wait()[0].tolist()
        if interval_steps < 0:
            return None
        return choose_period(interval_steps, round_steps, -cost, self._settings.max_staleness_steps)

    def _agree_on_first_period(self, first: _FirstPeriod) -> None:
        """At the same steps on all ranks. Nobody has to wait for an end that is not there yet."""
        offset = self.steps - first.start
        agreed = None if first.question is None else self._agreed_period(first.question)
        if agreed is None and offset < self._settings.max_staleness_steps:
            first.question = self._vote(_UNKNOWN if self._round is not None else self._wanted())
            first.ask_at = first.start + min(2 * offset, self._settings.max_staleness_steps)
            return
        self._first = None
        self._period = max(agreed or 1, offset)
        self._next_start = first.start + self._period

    def _end_first_period(self) -> None:
        """Forget what is asked: the others have the question, too, and do the same."""
        if self._first is not None and self._first.question is not None:
            self._first.question.wait()
        self._first = None

    def _apply(self, running: _Round) -> None:
        asked_at = self._clock()
        averages = running.average.wait()
        if running.period_vote is not None:
            self._period = self._agreed_period(running.period_vote)
        # Nobody trains in an evaluation, but the round goes on: it took something between these two.
        most_s = self._clock() - running.started_at
        least_s = (self.steps - running.steps) * self._step_times.typical_s() + self._clock() - asked_at
        self._round_s = most_s if self._round_s is None else min(max(self._round_s, least_s), most_s)
        self.shared_steps = running.steps
        self._round = None
        for mine, average, snapshot in zip(
            self.context.weights.buffers, averages, self._snapshot, strict=True
        ):
            mine.add_(average.sub_(snapshot))
