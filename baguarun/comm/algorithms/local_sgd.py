"""Every rank trains alone for some steps, then all take the average of their weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from baguarun.comm.algorithms.base import Algorithm, Operation, full_precision
from baguarun.comm.algorithms.stepper import StepContext, Stepper, require_range
from baguarun.comm.rails import Hierarchical, require_hierarchical
from baguarun.comm.weights import FlatWeights, replace_as_they_come


@dataclass(frozen=True, kw_only=True)
class LocalSGD(Algorithm):
    """Local SGD (Stich, arXiv 1805.09767), post-local SGD with a warm-up (Lin et al., arXiv 1808.07217).

    Replicas are equal after every `local_steps` steps. Each rank's optimizer state stays its own.

    When the World changes, an average under way is dropped; every rank keeps its own weights until the next
    one, which all take after the same step.
    """

    name: ClassVar[str] = "local_sgd"
    exchanges_weights: ClassVar[bool] = True

    local_steps: int = 8
    """Steps from one average to the next."""
    warmup_steps: int = 0
    """Steps at the start in which gradients are averaged instead."""
    hierarchical: Hierarchical = "auto"
    """Average inside the node before anything leaves it. baguanet does so whatever is asked."""

    def __post_init__(self) -> None:
        require_hierarchical(self.name, self.hierarchical)
        require_range(self.name, "local_steps", self.local_steps, 1)
        require_range(self.name, "warmup_steps", self.warmup_steps, 0)

    def hierarchy(self) -> Hierarchical:
        return self.hierarchical

    def operation(self, dtype: torch.dtype, device: torch.device) -> Operation | None:
        return full_precision(dtype, device, average=True) if self.warmup_steps > 0 else None

    def prepare(self, weights: FlatWeights) -> None:
        weights.keep_spare(1)

    def make_stepper(self, context: StepContext) -> Stepper:
        return _Averager(context, self)


class _Averager(Stepper):
    def __init__(self, context: StepContext, settings: LocalSGD) -> None:
        super().__init__(context)
        self._settings = settings
        self._averages = context.weights.empty_copy()

    def sends_gradients(self) -> bool:
        return self.steps < self._settings.warmup_steps

    def shares_buffers(self) -> bool:
        return self._replicas_are_equal()

    def after_step(self) -> None:
        self.steps += 1
        if self.steps > self._settings.warmup_steps and self._replicas_are_equal():
            mine = self.context.weights.buffers
            # Into copies: one that fails half-way must leave the weights whole.
            pending = self.average(self._averages, mine)
            replace_as_they_come(mine, pending.arrivals(), pending.is_done)
        if self._replicas_are_equal():
            self.shared_steps = self.steps

    def _replicas_are_equal(self) -> bool:
        local = self.steps - self._settings.warmup_steps
        return local < 0 or local % self._settings.local_steps == 0
