"""Algorithms whose operations on gradients change while training goes on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from baguarun.comm.algorithms.base import EngineMemory, Operation


@dataclass(frozen=True, kw_only=True, eq=False)
class Momentum:
    """What the engine mixes into gradients before they are sent: beta * average + (1 - beta) * gradient."""

    averages: Sequence[torch.Tensor]
    """By parameter, of its shape and type. The engine reads them in each round and never writes."""
    betas: Sequence[float]
    """By parameter."""
    loss_scale: float = 1.0
    """Gradients are so many times too large (GradScaler); averages are not. The result is again as large."""

    def is_same(self, other: Momentum | None) -> bool:
        """Whether these are the same tensors with the same numbers."""
        return (
            other is not None
            and self.loss_scale == other.loss_scale
            and self.betas == other.betas
            and all(own is its for own, its in zip(self.averages, other.averages, strict=True))
        )


class GradientStages(ABC):
    """Which operations are due. Asked before each round; must answer alike on all ranks.

    Threads: the one that trains.
    """

    entered = 0
    """The stage that the engine is in: what the last round did, or the next one will do."""

    @abstractmethod
    def due(self) -> int:
        """The stage of the next round; training starts in stage 0, the algorithm's own `operation`."""

    @abstractmethod
    def operation(self, dtype: torch.dtype, device: torch.device) -> Operation:
        """The operation for buckets of `dtype` in the stage that is due."""

    @abstractmethod
    def momentum(self) -> Momentum | None:
        """For the round to come; None: gradients are sent as they are."""

    @abstractmethod
    def describe(self) -> str:
        """All that ranks must agree on besides the algorithm's settings."""

    def follow(self, engine: Any) -> None:
        """From now on `engine` enters the stages. Count rounds by its `stats().steps`, not by forwards: one
        round may follow several, and one rank may run one more that no backward follows."""
        del engine

    def are_known_finite(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether no gradient of these is infinite or NaN. False: one may be."""
        del parameters
        return False

    def require_exchanged(self, parameters: Sequence[torch.Tensor]) -> None:
        """Raise `UsageError` for parameters whose gradients are not of this model."""
        del parameters

    def memory(self) -> EngineMemory | None:
        """What a checkpoint must keep of the stages themselves; None: nothing."""
        return None


class StagedEngine:
    """Tells one engine what its stages say."""

    def __init__(
        self,
        engine: Any,
        stages: GradientStages,
        parameters: Sequence[nn.Parameter],
        make_spec: Callable[[Operation], Any],
    ) -> None:
        self._engine = engine
        self._stages = stages
        self._parameters = list(parameters)
        self._make_spec = make_spec
        self._momentum: Momentum | None = None
        stages.follow(engine)

    def enter(self) -> None:
        """Between rounds: make the next one what is due."""
        due, momentum = self._stages.due(), self._stages.momentum()
        if momentum is not None and not momentum.is_same(self._momentum):
            self._engine.set_momentum(list(momentum.averages), list(momentum.betas), momentum.loss_scale)
        elif momentum is None and self._momentum is not None:
            self._engine.set_momentum([], [], 1.0)
        self._momentum = momentum
        if due != self._stages.entered:
            specs = {
                dtype: self._make_spec(self._stages.operation(dtype, self._parameters[0].device))
                for dtype in dict.fromkeys(parameter.dtype for parameter in self._parameters)
            }
            self._engine.set_operations([specs[parameter.dtype] for parameter in self._parameters])
            self._stages.entered = due
