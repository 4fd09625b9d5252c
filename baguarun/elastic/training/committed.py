"""What a step touches besides trained parameters and optimizers, as it was at the last commit.

Trained parameters and optimizers never go back: a step that is applied stays applied. Everything else that
forward, backward and the script change goes back when a step is done again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from baguarun.comm.ddp import DistributedDataParallel
from baguarun.comm.extension import load_extension
from baguarun.elastic.training import values
from baguarun.elastic.training.random_state import RandomState


class CommittedCopies:
    """Copies of `captured`'s buffers, small objects and plain values. Threads: the one that trains."""

    def __init__(self, captured: Mapping[str, Any]) -> None:
        self._models = [value for value in captured.values() if isinstance(value, nn.Module)]
        self._wrapped = [value for value in self._models if isinstance(value, DistributedDataParallel)]
        optimizers = [value for value in captured.values() if isinstance(value, torch.optim.Optimizer)]
        self._trained = {
            id(parameter)
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        # Found once: to walk through all modules at every commit would cost more than the copies.
        self._buffers_of_all = [
            part._buffers for model in self._models for part in model.modules() if part._buffers
        ]
        self._buffers_of_wrapped = [
            part._buffers for model in self._wrapped for part in model.modules() if part._buffers
        ]
        self._followers = [
            parameter
            for model in self._models
            if not isinstance(model, DistributedDataParallel)
            for parameter in self._untrained(model)
        ]
        self._seldom_changed = [parameter for model in self._wrapped for parameter in self._untrained(model)]
        self._objects = [
            value
            for value in captured.values()
            if values.is_stateful(value)
            and not isinstance(value, (nn.Module, torch.optim.Optimizer, torch.amp.GradScaler))
        ]
        # Of these the tensors, as their state_dict reads one number after the other.
        scalers = [value for value in captured.values() if isinstance(value, torch.amp.GradScaler)]
        self._scalers = [scaler for scaler in scalers if scaler.is_enabled()]
        self._plain = [name for name, value in captured.items() if not values.is_stateful(value)]
        self._kept: list[Any] = []
        self._values: dict[str, Any] = {}
        self._tensors = load_extension().TensorCopies()
        self._frozen = load_extension().TensorCopies()
        self._frozen_versions: list[tuple[int, int]] = []
        self._random = RandomState()
        # As the step that is only gone through once more has left them.
        self._after_step: Any = None
        self._random_after_step = RandomState()

    @property
    def is_second_pass(self) -> bool:
        """Whether a step that is applied is being gone through once more."""
        return self._after_step is not None

    def commit(self, captured: Mapping[str, Any]) -> None:
        """Remember everything as it is now, residuals of error feedback included."""
        self._forget_second_pass()
        self._tensors.take(self._often_changed())
        self._copy_frozen()
        self._kept = [values.capture(value) for value in self._objects]
        self._values = {name: values.capture(captured[name]) for name in self._plain}
        self._random.take()
        for model in self._wrapped:
            model.commit()

    def roll_back(self, captured: dict[str, Any], *, is_applied: bool = False) -> None:
        """Make everything as it was at the last `commit`.

        With `is_applied`, all optimizer steps of the step have been taken: it is gone through once more for
        what the script does besides, and what its first forward and backward have left counts: buffers,
        random numbers and residuals are as they are now again at the next `commit`.
        """
        if is_applied and self._after_step is None:
            self.begin_second_pass()
        self._tensors.put_back(self._often_changed())
        self._frozen.put_back(self._seldom_changed)
        for value, kept in zip(self._objects, self._kept, strict=True):
            # Of a copy: many take over what they are given, and change it in the next step.
            values.restore(value, copy.deepcopy(kept))
        for scaler in self._scalers:
            values.end_step(scaler)
        for name, kept in self._values.items():
            captured[name] = values.restore(captured[name], kept)
        self._random.put_back()
        for model in self._wrapped:
            model.roll_back()

    def begin_second_pass(self) -> None:
        """What models and algorithms have now is what they have at the next `commit`."""
        self._after_step = load_extension().TensorCopies()
        self._after_step.take(_tensors_in(self._buffers_of_wrapped))
        self._random_after_step.take()
        for model in self._wrapped:
            model.commit()

    def _forget_second_pass(self) -> None:
        if self._after_step is None:
            return
        self._after_step.put_back(_tensors_in(self._buffers_of_wrapped))
        self._after_step = None
        self._random_after_step.put_back()
        for model in self._wrapped:
            model.roll_back()

    def _often_changed(self) -> list[torch.Tensor]:
        """Buffers, scales of losses, and the parameters of models that follow another one (averages of
        weights)."""
        scales = [tensor for scaler in self._scalers for tensor in values.tensors_of(scaler)]
        return [*_tensors_in(self._buffers_of_all), *scales, *self._followers]

    def _copy_frozen(self) -> None:
        """Parameters of wrapped models that no optimizer trains: seldom changed, and maybe most of them."""
        versions = [(parameter.data_ptr(), parameter._version) for parameter in self._seldom_changed]
        if versions != self._frozen_versions:
            self._frozen.take(self._seldom_changed)
            self._frozen_versions = versions

    def _untrained(self, model: nn.Module) -> Iterator[nn.Parameter]:
        return (parameter for parameter in model.parameters() if id(parameter) not in self._trained)


def _tensors_in(buffers: list[dict[str, torch.Tensor | None]]) -> list[torch.Tensor]:
    """As they are now: modules may put another tensor in a buffer's place."""
    found: list[torch.Tensor] = load_extension().values_in(buffers)
    return found
