"""Every rank gets the average of all gradients: what torch's DDP computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from baguarun.comm.algorithms.base import Algorithm, Operation, OperationKind, Wire, full_precision
from baguarun.comm.rails import Hierarchical, require_hierarchical
from baguarun.errors import UsageError

_WIRES = {"fp32": Wire.F32, "fp16": Wire.F16, "bf16": Wire.BF16}


@dataclass(frozen=True, kw_only=True)
class GradientAllReduce(Algorithm):
    """Synchronous gradient averaging, optionally with 16-bit numbers on the wire."""

    name: ClassVar[str] = "gradient_allreduce"

    wire: str = "fp32"
    """What float32 gradients travel as: fp32, fp16 or bf16. Sums are fp32 in any case. Gradients of other
    types travel as they are."""
    average: bool = True
    """Divide the sum by the number of ranks. Where not, accumulate under `no_sync()`: in several backwards
    outside of it, what is a sum already is summed up once more."""
    hierarchical: Hierarchical = False
    """Sum up inside the node before anything leaves it. float32 on baguanet always does, whatever is asked;
    types that have no codec (float64), and on CUDA all that travel as they are, are the backend's to
    reduce."""

    def __post_init__(self) -> None:
        if self.wire not in _WIRES:
            raise UsageError(f"gradient_allreduce: wire={self.wire!r}; want one of {', '.join(_WIRES)}")
        require_hierarchical(self.name, self.hierarchical)

    def hierarchy(self) -> Hierarchical:
        return self.hierarchical

    def operation(self, dtype: torch.dtype, device: torch.device) -> Operation:
        wire = _WIRES[self.wire]
        if dtype == torch.float32 and wire is not Wire.F32:
            return Operation(kind=OperationKind.SCATTER_REDUCE_GATHER, wire=wire, average=self.average)
        return full_precision(dtype, device, self.average)
