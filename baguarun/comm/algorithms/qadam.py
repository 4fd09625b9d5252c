"""Adam with momentum of 8 bits or 1 bit on the wire, after a warm-up."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from baguarun.comm.algorithms.base import (
    WIRE_OF_DTYPE,
    Algorithm,
    Operation,
    OperationKind,
    Wire,
    full_precision,
)
from baguarun.comm.algorithms.qadam_optimizer import QAdamOptimizer
from baguarun.comm.algorithms.stages import GradientStages, Momentum
from baguarun.comm.rails import Hierarchical, require_hierarchical
from baguarun.errors import UsageError

_WIRES = {8: Wire.MINMAX8, 1: Wire.SIGN1}


@dataclass(frozen=True, kw_only=True)
class QAdam(Algorithm):
    """Bagua's QAdam (arXiv 2107.01499) with 8 bits, 1-bit Adam (arXiv 2102.02888) with one.

    Wants `optimizers=[QAdamOptimizer(...)]`, which says how long the warm-up is. Until its end gradients are
    averaged in full. From then on each rank mixes its gradient into the momentum that all have in common, and
    the average of the results, sent in few bits, is everybody's next momentum and is found in `grad`.

    With several optimizers the warm-up lasts until each has taken its steps. One that left a step out, as its
    gradients were not finite, needs one more; the others go on with plain Adam meanwhile. Then all variances
    are frozen at once: compressed noise never enters one, and none is older than the momentum that travels.
    Gradients that travelled whole and are still to be stepped with then are mixed in by their optimizer.
    """

    name: ClassVar[str] = "qadam"

    bits: int = 8
    """Per number of momentum: 8, on a grid between the least and the greatest of each block of 2048; or 1,
    the signs and a mean magnitude per block, with error feedback, which costs 4 bytes per number."""
    hierarchical: Hierarchical = "auto"
    """Sum up inside the node, and compress between nodes only. "auto": where several nodes have several
    workers."""

    def __post_init__(self) -> None:
        if self.bits not in _WIRES:
            raise UsageError(f"qadam: bits={self.bits}; want 8 or 1")
        require_hierarchical(self.name, self.hierarchical)

    def operation(self, dtype: torch.dtype, device: torch.device) -> Operation:
        return full_precision(dtype, device, average=True)

    def make_stages(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> GradientStages:
        return _Stages(self, parameters, optimizers)

    def hierarchy(self) -> Hierarchical:
        return self.hierarchical


class _Stages(GradientStages):
    """Stage 0 is the warm-up, stage 1 sends momentum."""

    def __init__(
        self,
        settings: QAdam,
        parameters: Sequence[tuple[str, nn.Parameter]],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        self._settings = settings
        self._optimizers = _require_ours(optimizers)
        self._parameters = [parameter for _, parameter in parameters]
        self._ids = {id(parameter) for parameter in self._parameters}
        self._engine: Any = None
        self._require_all(parameters)
        for optimizer in self._optimizers:
            optimizer._stages = weakref.ref(self)
            optimizer._together = [weakref.ref(each) for each in self._optimizers]

    def due(self) -> int:
        found = {optimizer.in_warmup for optimizer in self._optimizers}
        if len(found) > 1:
            taken = ", ".join(str(optimizer.steps) for optimizer in self._optimizers)
            raise UsageError(
                f"qadam: of optimizers that have taken {taken} steps some have ended the warm-up, which all "
                "end at once; want the states of all of them, from one checkpoint"
            )
        return 0 if found.pop() else 1

    def operation(self, dtype: torch.dtype, device: torch.device) -> Operation:
        if self.due() == 0 or dtype not in WIRE_OF_DTYPE:
            return self._settings.operation(dtype, device)
        return Operation(
            kind=OperationKind.SCATTER_REDUCE_GATHER,
            wire=_WIRES[self._settings.bits],
            error_feedback=self._settings.bits == 1,
        )

    def momentum(self) -> Momentum | None:
        if self.due() == 0:
            return None
        mixed = {
            id(parameter): (average, beta)
            for optimizer in self._optimizers
            for parameter, average, beta in optimizer.averages(self._ids)
        }
        found = [mixed[id(parameter)] for parameter in self._parameters]
        scalers = [optimizer.grad_scaler for optimizer in self._optimizers if optimizer.grad_scaler]
        return Momentum(
            averages=tuple(average for average, _ in found),
            betas=tuple(beta for _, beta in found),
            loss_scale=scalers[0].get_scale() if scalers else 1.0,
        )

    def follow(self, engine: Any) -> None:
        self._engine = engine

    def are_known_finite(self, parameters: Sequence[nn.Parameter]) -> bool:
        """As the engine has found: it looks at momentum that has come while some is still under way."""
        return (
            self.entered > 0
            and self._ids.issuperset(id(parameter) for parameter in parameters)
            and bool(self._engine.momentum_is_known_finite())
        )

    def require_exchanged(self, parameters: Sequence[torch.Tensor]) -> None:
        """Raise `UsageError` for gradients that were not."""
        if self._engine is None:
            return
        foreign = [tuple(parameter.shape) for parameter in parameters if id(parameter) not in self._ids]
        if foreign:
            raise UsageError(
                f"qadam: {len(foreign)} parameters, of shape {', '.join(map(str, foreign[:10]))}, were "
                "frozen when the model was wrapped: their gradients are this rank's; wrap the model again"
            )

    def describe(self) -> str:
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        kept = ("warmup_steps", "betas", "variance_floor")
        return repr([{key: group[key] for key in kept} for group in groups])

    def _require_all(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        stepped = {
            id(parameter)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        foreign = [
            tuple(parameter.shape)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad and id(parameter) not in self._ids
        ]
        if foreign:
            raise UsageError(
                f"qadam: {len(foreign)} parameters of QAdamOptimizer, of shape "
                f"{', '.join(map(str, foreign[:10]))}, are not of this model: their gradients would be taken "
                "for momentum; want an optimizer of their own for them"
            )
        left = [name for name, parameter in parameters if id(parameter) not in stepped]
        if left:
            raise UsageError(
                f"qadam: no QAdamOptimizer has {', '.join(left[:10])}; want each parameter that is trained "
                "in one of the optimizers"
            )


def _require_ours(optimizers: Sequence[torch.optim.Optimizer]) -> list[QAdamOptimizer]:
    ours = [optimizer for optimizer in optimizers if isinstance(optimizer, QAdamOptimizer)]
    if not ours or len(ours) < len(optimizers):
        others = [type(optimizer).__name__ for optimizer in optimizers if optimizer not in ours]
        raise UsageError(
            f"qadam: found optimizers=[{', '.join(others)}]; want optimizers=[QAdamOptimizer(...)] from "
            "baguarun.comm.algorithms"
        )
    if len({optimizer.warmup_steps for optimizer in ours}) > 1:
        raise UsageError("qadam: warmup_steps differs between the optimizers; want one for all")
    if len({id(optimizer.grad_scaler) for optimizer in ours}) > 1:
        raise UsageError("qadam: the optimizers have different grad_scalers; want one for all")
    return ours
