"""Only the largest gradients travel; the rest is kept and added to the next step's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from baguarun.comm.algorithms.base import (
    WIRE_OF_DTYPE,
    Algorithm,
    Operation,
    OperationKind,
    Wire,
    full_precision,
)
from baguarun.comm.algorithms.stepper import require_range
from baguarun.comm.rails import Hierarchical, require_hierarchical

_BLOCK = 2048
_MOST_KEPT = 256


@dataclass(frozen=True, kw_only=True)
class Sparse(Algorithm):
    """Top-k with error feedback (Stich et al., arXiv 1809.07599; of the family of Deep Gradient Compression).

    Each rank sends the numbers of greatest magnitude of each block of 2048, and keeps the others for the next
    step. Whoever reduces a chunk does the same with the sum. So all ranks get equal gradients, of which
    `density` is not zero, and in the long run nothing is lost. Deep Gradient Compression's own additions
    (arXiv 1712.01887: momentum correction, clipping, a density that falls during warm-up) are not there.

    Residuals are in the units of gradients: where GradScaler changes its scale, what was left out before
    counts by the ratio of the scales too much or too little, once.
    """

    name: ClassVar[str] = "sparse"

    density: float = 0.01
    """How much of each block travels: rounded to a multiple of 1/2048, from 1/2048 to 1/8. A number that
    travels takes 6 bytes."""
    average: bool = True
    """Divide the sum by the number of ranks."""
    hierarchical: Hierarchical = "auto"
    """Sum up inside the node, and leave out between nodes only. "auto": where several nodes have several
    workers."""

    def __post_init__(self) -> None:
        require_hierarchical(self.name, self.hierarchical)
        require_range(self.name, "density", self.density, 1 / _BLOCK, _MOST_KEPT / _BLOCK)

    def operation(self, dtype: torch.dtype, device: torch.device) -> Operation:
        if dtype not in WIRE_OF_DTYPE:
            return full_precision(dtype, device, self.average)
        return Operation(
            kind=OperationKind.SCATTER_REDUCE_GATHER,
            wire=Wire.TOPK,
            average=self.average,
            keep=round(self.density * _BLOCK),
            error_feedback=True,
        )

    def hierarchy(self) -> Hierarchical:
        return self.hierarchical
