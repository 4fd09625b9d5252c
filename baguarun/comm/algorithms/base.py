"""What an algorithm is: which operation each bucket gets. The operations themselves are C++."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import nn

from baguarun.comm.algorithms.stepper import StepContext, Stepper
from baguarun.comm.rails import Hierarchical
from baguarun.comm.weights import FlatWeights
from baguarun.contract import WorkerEnv

if TYPE_CHECKING:
    from baguarun.comm.algorithms.stages import GradientStages


class OperationKind(enum.Enum):
    """The ways in which the engine can combine a bucket over the ranks."""

    ALL_REDUCE = "ALL_REDUCE"
    """The backend's own all-reduce, in the gradient's type."""
    SCATTER_REDUCE_GATHER = "SCATTER_REDUCE_GATHER"
    """Each rank reduces its chunk in fp32, in rank order (with error feedback, its own part first), and sends
    the result to all."""
    POWER_SGD = "POWER_SGD"
    """Matrices as products of `matrix_rank` pairs of vectors, averaged, with error feedback."""


class Wire(enum.Enum):
    """What travels between ranks in SCATTER_REDUCE_GATHER."""

    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"
    MINMAX8 = "MINMAX8"
    """One byte per number on a grid between the least and the greatest of each block of 2048."""
    MINMAX4 = "MINMAX4"
    """As MINMAX8 with half a byte per number."""
    SIGN1 = "SIGN1"
    """The sign of each number, and the mean magnitude of each block of 2048. Biased: wants error feedback."""
    TOPK = "TOPK"
    """The `keep` numbers of greatest magnitude of each block of 2048. Biased: wants error feedback."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """What happens to the buckets of one dtype."""

    kind: OperationKind
    wire: Wire = Wire.F32
    """Read by SCATTER_REDUCE_GATHER only."""
    average: bool = True
    """Divide the sum by the number of ranks."""
    keep: int = 20
    """Read by Wire.TOPK only: how many of each 2048 numbers travel, 1 to 256."""
    error_feedback: bool = False
    """What an encoding loses, of contributions and of results, is added to the next step's numbers. Wants a
    wire that loses something."""
    matrix_rank: int = 0
    """Read by POWER_SGD only."""


class EngineMemory(Protocol):
    """What an engine keeps between steps for one algorithm, for checkpoints."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def commit(self) -> None:
        """Between steps: a World that ends in the middle of the next one is gone on from here."""

    def roll_back(self) -> None:
        """Between steps, also in the next World: come back to the last commit. What is owed by error feedback
        is the engine's own affair."""

    def common(self) -> dict[str, Any]:
        """What all ranks have alike, for one that is sent the state."""

    def adopt_common(self, state: dict[str, Any]) -> None:
        """Between steps: take over what `common` gave on another rank."""

    def hand_over(self) -> dict[str, Any]:
        """What `take_over` is given in the next World. The group is gone: waits for nobody."""

    def take_over(self, left: dict[str, Any] | None, group: dist.ProcessGroup) -> None:
        """Go on from what `hand_over` gave in the World before, None on a rank that is new. Collective."""


@dataclass(frozen=True, kw_only=True)
class Algorithm(ABC):
    """How ranks are kept together. Subclasses are frozen dataclasses whose fields are the settings."""

    name: ClassVar[str]
    """What the user writes for it."""
    exchanges_weights: ClassVar[bool] = False
    """Whether there is something to do around optimizer steps, which `make_stepper` knows."""

    @abstractmethod
    def operation(self, dtype: torch.dtype, device: torch.device) -> Operation | None:
        """The operation for buckets of `dtype` on `device`; None: such gradients stay where they are."""

    def make_stepper(self, context: StepContext) -> Stepper:
        """What works around the steps of one model. Asked for if the algorithm `exchanges_weights`."""
        raise NotImplementedError(f"{self.name} exchanges no weights")

    def prepare(self, weights: FlatWeights) -> None:
        """In a World of one: have the memory that a stepper of `weights` will take among other ranks."""
        del weights

    def make_memory(self, engine: Any) -> EngineMemory | None:
        """What the new `engine` keeps between steps; None: nothing. Not for one that `exchanges_weights`."""
        del engine
        return None

    def own_optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """Those that it was made with: they step the model where no others are named."""
        return ()

    def exchanges_with_few(self) -> bool:
        """Whether an exchange of weights is with some other ranks, and others hear of it by and by."""
        return False

    def hierarchy(self) -> Hierarchical:
        """Whether exchanges go by rail between nodes; False unless the algorithm has the setting."""
        return False

    def make_stages(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> GradientStages | None:
        """What changes the operations while `parameters` are trained by `optimizers`; None: nothing does.

        May raise `UsageError` for optimizers that the algorithm cannot work with.
        """
        del parameters, optimizers
        return None

    def check(self, env: WorkerEnv) -> None:
        """Raise `UsageError` if the algorithm cannot do what is asked in this place; any will do here."""
        del env


WIRE_OF_DTYPE = {torch.float32: Wire.F32, torch.float16: Wire.F16, torch.bfloat16: Wire.BF16}
"""Types that the codecs read and write; others (float64, integers) are all-reduced in their own type."""

BLOCK_WIRES = frozenset({Wire.MINMAX8, Wire.MINMAX4, Wire.SIGN1, Wire.TOPK})
"""Wires in which a number's neighbours in the bucket matter."""


def full_precision(dtype: torch.dtype, device: torch.device, average: bool) -> Operation:
    """The operation that sends each gradient in its own type."""
    wire = WIRE_OF_DTYPE.get(dtype)
    if wire is None or device.type != "cpu":
        return Operation(kind=OperationKind.ALL_REDUCE, average=average)
    return Operation(kind=OperationKind.SCATTER_REDUCE_GATHER, wire=wire, average=average)
