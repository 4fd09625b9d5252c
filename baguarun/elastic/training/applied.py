"""Counts the optimizer steps since the last commit, and leaves out those that are applied already."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from baguarun.comm import timeline
from baguarun.comm.ddp import DistributedDataParallel
from baguarun.elastic.training.group_settings import GroupSettings, Settings, changed
from baguarun.errors import UsageError

Optimizer = torch.optim.Optimizer


class AppliedSteps:
    """Watches `optimizers`. Threads: the one that trains."""

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        models: Sequence[DistributedDataParallel] = (),
        scalers: Sequence[torch.amp.GradScaler] = (),
        before_step: Callable[[], None] = lambda: None,
    ) -> None:
        """No optimizer steps before all that the gradients of `models` are made of has arrived; `before_step`
        is called then."""
        self._before_step = before_step
        self._per_commit = [1] * len(optimizers)
        # By optimizer: since the last commit, or since the step is done again. The first `_skip` do nothing.
        self._taken = [0] * len(optimizers)
        self._skip = [0] * len(optimizers)
        self._scalers = list(scalers)
        self._scales: list[float] = []
        self._models = list(models)
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._optimizers = list(optimizers)
        self._settings = [GroupSettings(optimizer) for optimizer in optimizers]
        # As they were at the last commit, and before the step under way.
        self._committed: list[list[Settings]] = []
        self._before: list[Settings] = []
        for index, optimizer in enumerate(optimizers):
            self._watch(index, optimizer)
        self.begin()

    @property
    def counts(self) -> list[int]:
        """By optimizer: steps since the last commit that are in its weights. One that a GradScaler leaves out
        for its gradients is none."""
        return list(map(max, self._taken, self._skip))

    @property
    def count(self) -> int:
        """Of all optimizers."""
        return sum(self.counts)

    @property
    def is_whole(self) -> bool:
        """Whether these are all steps that the optimizers take between two commits, as they did before the
        last one at which no scaler had left any out."""
        return any(self.counts) and self.counts == self._per_commit

    def before_commit(self) -> None:
        """A commit comes next. Raises `CommunicationError` where no optimizer has stepped, since a GradScaler
        found infinities, and gradients may be those of an exchange that broke: nobody has looked yet.

        On CPU backward has, by waiting: what it found stands, whatever has been heard since. For a GPU the
        host waits here; if `State` holds no optimizer it does so in every step.
        """
        if not any(self._taken):
            for model in self._models:
                if not all(parameter.is_cpu for parameter in model.parameters()):
                    model.require_complete()

    def commit(self) -> None:
        """A step ends, and the next one begins."""
        scales = [scaler.get_scale() for scaler in self._scalers]
        has_overflowed = any(now < then for now, then in zip(scales, self._scales, strict=True))
        if any(self._taken) and not has_overflowed:
            self._per_commit = self._taken
        self._begin_with(scales)

    def begin(self) -> None:
        """Count from zero, and keep the optimizers' settings (learning rates) as they are."""
        self._begin_with([scaler.get_scale() for scaler in self._scalers])

    def _begin_with(self, scales: list[float]) -> None:
        self._scales = scales
        self._taken = [0] * len(self._optimizers)
        self._skip = [0] * len(self._optimizers)
        self._committed = [settings.read() for settings in self._settings]

    def redo(self, skip: Sequence[int]) -> None:
        """The step is done again, and of each optimizer the first `skip` steps change nothing.

        What the script or a scheduler has set since the last commit is as it was then; what steps themselves
        have changed stays.
        """
        self._skip = list(skip)
        self._taken = [0] * len(self._optimizers)
        for settings, committed in zip(self._settings, self._committed, strict=True):
            settings.put_back(committed)

    def _watch(self, index: int, optimizer: Optimizer) -> None:
        this = weakref.ref(self)

        def before(_optimizer: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if any(callable(argument) for argument in [*args, *kwargs.values()]):
                raise UsageError(
                    f"{type(optimizer).__name__}.step(closure): a step that a loss cut short could not be "
                    "done again under `--elastic in-place`; want forward and backward before step()"
                )
            if (applied := this()) is not None:
                with timeline.span("before a step that may be lost", "elastic"):
                    applied._begin(index)

        def after(*_call: object) -> None:
            if (applied := this()) is not None:
                with timeline.span("after a step that may be lost", "elastic"):
                    applied._end(index)

        optimizer.register_step_pre_hook(before)
        handle = optimizer.register_step_post_hook(after)
        # The first of them: what communicates after a step may fail, and the step is applied all the same.
        hooks = optimizer._optimizer_step_post_hooks
        assert isinstance(hooks, OrderedDict)
        hooks.move_to_end(handle.id, last=False)

    def _begin(self, index: int) -> None:
        optimizer = self._optimizers[index]
        _require_outside_backward(optimizer)
        for model in self._models:
            model.require_complete(again=any(self._taken))
        self._before_step()
        if self._taken[index] < self._skip[index]:
            # Optimizers pass over parameters without a gradient.
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._hidden.append((parameter, parameter.grad))
                        parameter.grad = None
        self._before = self._settings[index].read()

    def _end(self, index: int) -> None:
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden.clear()
        is_left_out = self._taken[index] < self._skip[index]
        self._taken[index] += 1
        if is_left_out:
            # Some count a step that had no gradients.
            self._settings[index].put_back(self._before)
            return
        now = self._settings[index].read()
        if now is not self._before:
            # Of optimizers that keep counters or estimates in their groups.
            found = map(changed, self._before, now)
            self._committed[index] = [
                {**kept, **each} for kept, each in zip(self._committed[index], found, strict=True)
            ]


def _require_outside_backward(optimizer: Optimizer) -> None:
    if torch._C._current_graph_task_id() != -1:
        raise UsageError(
            f"{type(optimizer).__name__}.step() inside backward: a step that a loss cut short could not be "
            "done again under `--elastic in-place`; want step() after backward"
        )
