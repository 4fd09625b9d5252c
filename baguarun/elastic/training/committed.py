"""What a step touches besides trained parameters and optimizers, as it was at the last commit.

Trained parameters and optimizers never go back: a step that is applied stays applied. Everything else that
forward, backward and the script change goes back when a step is done again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
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
        self._buffers_of_all = _Buffers(self._models)
        self._buffers_of_wrapped = _Buffers(self._wrapped)
        self._followers = [
            parameter
            for model in self._models
            if not isinstance(model, DistributedDataParallel)
            for parameter in self._untrained(model)
        ]
        self._seldom_changed = [parameter for model in self._wrapped for parameter in self._untrained(model)]
        self._objects = {
            name: value
            for name, value in captured.items()
            if values.is_stateful(value)
            and not isinstance(value, (nn.Module, torch.optim.Optimizer))
            and not values.is_usual_scaler(value)
        }
        # Their state_dict reads one tensor after the other.
        self._scalers = [value for value in captured.values() if values.is_usual_scaler(value)]
        self._settings_of_scalers: list[tuple[float, float, int]] = []
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
        self._settings_of_scalers = [values.settings_of(scaler) for scaler in self._scalers]
        self._kept = [values.capture(name, value) for name, value in self._objects.items()]
        self._values = {name: values.capture(name, captured[name]) for name in self._plain}
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
        for value, kept in zip(self._objects.values(), self._kept, strict=True):
            # Of a copy: many take over what they are given, and change it in the next step.
            values.restore(value, copy.deepcopy(kept))
        for scaler, settings in zip(self._scalers, self._settings_of_scalers, strict=True):
            values.set_settings(scaler, settings)
            values.end_step(scaler)
        for name, kept in self._values.items():
            captured[name] = values.restore(captured[name], kept)
        self._random.put_back()
        for model in self._wrapped:
            model.roll_back()

    def begin_second_pass(self) -> None:
        """What models and algorithms have now is what they have at the next `commit`."""
        self._after_step = load_extension().TensorCopies()
        self._after_step.take(self._buffers_of_wrapped.now())
        self._random_after_step.take()
        for model in self._wrapped:
            model.commit()

    def _forget_second_pass(self) -> None:
        if self._after_step is None:
            return
        self._after_step.put_back(self._buffers_of_wrapped.now())
        self._after_step = None
        self._random_after_step.put_back()
        for model in self._wrapped:
            model.roll_back()

    def _often_changed(self) -> list[torch.Tensor]:
        """Buffers, scales of losses, and the parameters of models that follow another one (averages of
        weights)."""
        scales = [tensor for scaler in self._scalers for tensor in values.tensors_of(scaler)]
        return [*self._buffers_of_all.now(), *scales, *self._followers]

    def _copy_frozen(self) -> None:
        """Parameters of wrapped models that no optimizer trains: seldom changed, and maybe most of them."""
        versions = [(parameter.data_ptr(), parameter._version) for parameter in self._seldom_changed]
        if versions != self._frozen_versions:
            self._frozen.take(self._seldom_changed)
            self._frozen_versions = versions

    def _untrained(self, model: nn.Module) -> Iterator[nn.Parameter]:
        return (parameter for parameter in model.parameters() if id(parameter) not in self._trained)


class _Buffers:
    """Of all modules of `models`."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        buffers = [part._buffers for model in models for part in model.modules() if part._buffers]
        self._dicts = [each for each in buffers if isinstance(each, dict)]
        # TorchScript's.
        self._others = [each for each in buffers if not isinstance(each, dict)]

    def now(self) -> list[torch.Tensor]:
        """As they are: modules may put another tensor in a buffer's place."""
        found: list[torch.Tensor] = load_extension().values_in(self._dicts)
        for each in self._others:
            found += [buffer for buffer in each.values() if buffer is not None]
        return found
