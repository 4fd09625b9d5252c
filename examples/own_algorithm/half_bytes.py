from dataclasses import dataclass
from typing import ClassVar

import torch

from baguarun.comm.algorithms import Algorithm, Operation, OperationKind, Wire


@dataclass(frozen=True, kw_only=True)
class HalfBytes(Algorithm):
    """Averages gradients with 4 bits per number on the wire; types without a codec in full."""

    name: ClassVar[str] = "half_bytes"

    def operation(self, dtype: torch.dtype, device: torch.device) -> Operation:
        if dtype is torch.float32:
            return Operation(kind=OperationKind.SCATTER_REDUCE_GATHER, wire=Wire.MINMAX4)
        return Operation(kind=OperationKind.ALL_REDUCE)
