"""Gradient averaging with 8 bits per number on the wire."""

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
from baguarun.comm.rails import Hierarchical, require_hierarchical


@dataclass(frozen=True, kw_only=True)
class ByteGrad(Algorithm):
    """8-bit scatter-reduce-gather (Bagua, arXiv 2107.01499): each block of 2048 numbers has its own range."""

    name: ClassVar[str] = "bytegrad"

    average: bool = True
    """Divide the sum by the number of ranks. Where not, accumulate under `no_sync()`: in several backwards
    outside of it, what is a sum already is summed up once more."""
    error_feedback: bool = False
    """Add what 8 bits lose in one step to the gradients of the next. Costs 4 bytes per number."""
    hierarchical: Hierarchical = "auto"
    """Sum up inside the node, and compress between nodes only. "auto": where several nodes have several
    workers."""

    def __post_init__(self) -> None:
        require_hierarchical(self.name, self.hierarchical)

    def operation(self, dtype: torch.dtype, device: torch.device) -> Operation:
        if dtype not in WIRE_OF_DTYPE:
            return full_precision(dtype, device, self.average)
        return Operation(
            kind=OperationKind.SCATTER_REDUCE_GATHER,
            wire=Wire.MINMAX8,
            average=self.average,
            error_feedback=self.error_feedback,
        )

    def hierarchy(self) -> Hierarchical:
        return self.hierarchical
