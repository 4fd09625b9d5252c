"""Averages of whole tensors through the codecs, for algorithms that exchange weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from baguarun.comm.algorithms.base import Operation, OperationKind, Wire
from baguarun.comm.algorithms.stepper import Stepper
from baguarun.comm.arrival import require_arrived
from baguarun.comm.extension import load_extension, operation_spec
from baguarun.comm.rail_groups import RailGroups


def start_coded_average(stepper: Stepper, tensors: Sequence[torch.Tensor], wire: Wire) -> CodedReduction:
    """Start to replace `tensors` by their averages over the ranks, coded; else as `stepper.average`."""
    stepper.rounds += 1
    context = stepper.context
    reduction = CodedReduction(tensors, context.group, wire, stepper.rounds, context.rails)
    stepper.bytes_sent += reduction.bytes_sent
    return reduction


class CodedReduction:
    """Tensors of 16 or 32 bits on the way to the ranks' averages; do not touch until `wait`.

    Contributions and results are coded, sums are fp32; all ranks get the same bits. May raise
    `CommunicationError`.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        group: dist.ProcessGroup,
        wire: Wire,
        number: int,
        rails: RailGroups | None = None,
    ) -> None:
        """`number` is another one for each reduction of the group that is under way. With `rails`, only what
        leaves the node is coded."""
        self._tensors = list(tensors)
        extension = load_extension()
        operation = operation_spec(Operation(kind=OperationKind.SCATTER_REDUCE_GATHER, wire=wire))
        if rails is not None:
            operation.exchange_by_rail(rails.for_engine(extension))
        self._running: Any = extension.TensorReduction(group, self._tensors, operation, number)
        self.bytes_sent: int = self._running.bytes()

    def wait(self) -> list[torch.Tensor]:
        """The results: on CPU they are there, on an accelerator its current stream waits for them."""
        if self._running is not None:
            self._running.wait()
            require_arrived(self._tensors[0].device)
            # Its threads and buffers go.
            self._running = None
        return self._tensors
