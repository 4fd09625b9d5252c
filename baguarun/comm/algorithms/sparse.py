"""Only the largest gradients travel; the rest is kept and added to the next step's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from baguarun.comm.algorithms.base import (
    WIRE_OF_DTYPE,
    Algorithm,
    EngineMemory,
    Operation,
    OperationKind,
    Wire,
    full_precision,
)
from baguarun.comm.algorithms.stages import GradientStages, Momentum
from baguarun.comm.algorithms.stepper import require_range
from baguarun.comm.legacy import source_of
from baguarun.comm.rails import Hierarchical, require_hierarchical
from baguarun.errors import UsageError

_BLOCK = 2048
_MOST_KEPT = 256
# By how much the density falls from one stage of the warm-up to the next (Deep Gradient Compression, 3.4).
_FALL = 4


@dataclass(frozen=True, kw_only=True)
class Sparse(Algorithm):
    """Top-k with error feedback (Stich et al., arXiv 1809.07599; of the family of Deep Gradient Compression).

    Each rank sends the numbers of greatest magnitude of each block of 2048, and keeps the others for the next
    step. Whoever reduces a chunk adds its own numbers, all of them, and does the same with the sum. So all
    ranks get equal gradients, of which `density` is not zero, and in the long run nothing is lost. At the
    start, when gradients change fastest and what comes late does most harm, the density falls by and by, as
    in Deep Gradient Compression (arXiv 1712.01887, section 3.4); its momentum correction and clipping are not
    there.

    Residuals are in the units of gradients: where GradScaler changes its scale, what was left out before
    counts by the ratio of the scales too much or too little, once.
    """

    name: ClassVar[str] = "sparse"

    density: float = 0.01
    """How much of each block travels: rounded to a multiple of 1/2048, from 1/2048 to 1/8. A number that
    travels takes 6 bytes."""
    warmup_steps: int = 100
    """Steps at the start in which the density falls to its value, by four in each of equally long parts: in
    the first one gradients travel whole, then 1/16 of them, 1/64, and so on. 0: none."""
    average: bool = True
    """Divide the sum by the number of ranks. Where not, accumulate under `no_sync()`: in several backwards
    outside of it, what is a sum already is summed up once more."""
    hierarchical: Hierarchical = "auto"
    """Sum up inside the node, and leave out between nodes only. "auto": where several nodes have several
    workers."""

    def __post_init__(self) -> None:
        require_hierarchical(self.name, self.hierarchical)
        require_range(self.name, "density", self.density, 1 / _BLOCK, _MOST_KEPT / _BLOCK)
        require_range(self.name, "warmup_steps", self.warmup_steps, 0)

    def operation(self, dtype: torch.dtype, device: torch.device) -> Operation:
        return self.operation_with(self.densities()[0], dtype, device)

    def operation_with(self, density: float, dtype: torch.dtype, device: torch.device) -> Operation:
        """Where so much of each block travels; above 1/8 gradients do as they are, which is less."""
        if dtype not in WIRE_OF_DTYPE or density > _MOST_KEPT / _BLOCK:
            return full_precision(dtype, device, self.average)
        return Operation(
            kind=OperationKind.SCATTER_REDUCE_GATHER,
            wire=Wire.TOPK,
            average=self.average,
            keep=round(density * _BLOCK),
            error_feedback=True,
        )

    def densities(self) -> list[float]:
        """Of the stages of training; all but the last one are parts of the warm-up."""
        found = []
        falling = 1 / _FALL
        while self.warmup_steps > 0 and falling > self.density:
            found.append(falling)
            falling /= _FALL
        return [*found, self.density]

    def make_stages(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> GradientStages | None:
        del parameters, optimizers
        return _Warmup(self) if self.warmup_steps > 0 else None

    def hierarchy(self) -> Hierarchical:
        return self.hierarchical


class _Warmup(GradientStages):
    """One stage per density, by the number of rounds that have ended: on all ranks the same."""

    def __init__(self, settings: Sparse) -> None:
        self._settings = settings
        self._densities = settings.densities()
        self._engine: Any = None
        # Before this engine's first one; negative where it had some that do not count.
        self._rounds_before = 0
        # At the last commit; None: nobody commits.
        self._committed: int | None = None

    def due(self) -> int:
        parts = len(self._densities) - 1
        return min(self._rounds * parts // self._settings.warmup_steps, parts)

    def operation(self, dtype: torch.dtype, device: torch.device) -> Operation:
        return self._settings.operation_with(self._densities[self.due()], dtype, device)

    def momentum(self) -> Momentum | None:
        return None

    def describe(self) -> str:
        return ""

    def follow(self, engine: Any) -> None:
        self._engine = engine

    def memory(self) -> EngineMemory:
        return self

    def state_dict(self) -> dict[str, Any]:
        return {"rounds": self._rounds}

    def commit(self) -> None:
        self._committed = self._rounds

    def roll_back(self) -> None:
        if self._committed is not None:
            self._count(self._committed)

    def common(self) -> dict[str, Any]:
        return self.state_dict()

    def adopt_common(self, state: dict[str, Any]) -> None:
        self.load_state_dict(state)

    def hand_over(self) -> dict[str, Any]:
        committed = None if self._committed is None else {"rounds": self._committed}
        return {**self.state_dict(), "committed": committed}

    def take_over(self, left: dict[str, Any] | None, group: dist.ProcessGroup) -> None:
        """Collective. All ranks count rounds as one with most of them does, and roll back from there."""
        _, rounds = source_of(0 if left is None else left["rounds"], group)
        self._count(rounds)
        then = None if left is None else left["committed"]
        self._committed = None if then is None else then["rounds"]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "rounds" not in state:
            raise UsageError(
                f"{Sparse.name}: the state is of a training without a warm-up; want warmup_steps=0 to go on"
            )
        self._count(int(state["rounds"]))

    @property
    def _rounds(self) -> int:
        return self._rounds_before + (0 if self._engine is None else int(self._engine.stats().steps))

    def _count(self, rounds: int) -> None:
        """So many have ended."""
        self._rounds_before += rounds - self._rounds
