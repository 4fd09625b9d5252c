"""Gradients travel as matrices of low rank, with error feedback."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from baguarun.comm.algorithms.base import (
    WIRE_OF_DTYPE,
    Algorithm,
    Operation,
    OperationKind,
    full_precision,
)
from baguarun.comm.algorithms.stepper import require_range
from baguarun.comm.legacy import share, source_of
from baguarun.comm.rails import Hierarchical, require_hierarchical
from baguarun.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class PowerSGD(Algorithm):
    """PowerSGD (Vogels et al., arXiv 1905.13727, algorithms 1 and 2), in the engine.

    A gradient of m x k numbers (a tensor of more dimensions: its outermost one, and all others) becomes P Q',
    of m x rank and k x rank, averaged over the ranks one after the other. What that lacks is added to the
    next step's gradient; Q is where the next step begins. Vectors, and matrices that would gain nothing,
    travel as they are, and so does float64. NaN and Inf become NaN in the whole matrix, on all ranks.

    When the World changes, every rank keeps what it owes. Newcomers are given Q, and a step that is done
    again begins with the Q that it began with before.
    """

    name: ClassVar[str] = "power_sgd"

    rank: int = 1
    """Pairs of vectors per matrix. More of them lose less and cost more bytes; torch's default is 1, too."""
    start_step: int = 1000
    """Steps at the start in which gradients are averaged in full, as they turn fastest then. Torch's default.
    """
    hierarchical: Hierarchical = "auto"
    """Sum up P and Q inside the node before they leave it, and on the CPU gradients in full. "auto": on the
    CPU, where several nodes have several workers."""

    def __post_init__(self) -> None:
        require_hierarchical(self.name, self.hierarchical)
        require_range(self.name, "rank", self.rank, 1)
        require_range(self.name, "start_step", self.start_step, 0, 2**31)

    def operation(self, dtype: torch.dtype, device: torch.device) -> Operation:
        if dtype not in WIRE_OF_DTYPE:
            return full_precision(dtype, device, average=True)
        return Operation(kind=OperationKind.POWER_SGD, matrix_rank=self.rank)

    def hierarchy(self) -> Hierarchical:
        return self.hierarchical

    def make_memory(self, engine: Any) -> LowRankMemory:
        return LowRankMemory(engine, self)


class LowRankMemory:
    """What the engine of one model owes to gradients to come, and the steps before it compresses.

    Q and the number of steps are the same on all ranks, of which each may have come further in a step that is
    cut off. In the next World all have those of one that has come furthest, and roll back from there.
    """

    def __init__(self, engine: Any, settings: PowerSGD) -> None:
        self._engine = engine
        self._settings = settings
        self._steps_before = 0
        # At the last commit: the number of steps, and all of Q in one row. None: nobody commits.
        self._committed: tuple[int, torch.Tensor] | None = None
        generator = torch.Generator().manual_seed(0)
        for vectors in self._vectors():
            drawn = torch.empty(vectors.shape, dtype=torch.float32, device="cpu").normal_(generator=generator)
            vectors.copy_(drawn)
        engine.compress_after(settings.start_step)

    def state_dict(self) -> dict[str, Any]:
        """Each rank's own: residuals, Q and the number of steps."""
        kept = self._engine.low_rank_tensors()
        return {
            "steps": self._steps,
            "residuals": [residual.clone() for residual, _ in kept],
            "vectors": [vectors.clone() for _, vectors in kept],
            "rank": self._engine.rank(),
            "world_size": self._engine.world_size(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; between steps, on all ranks. Warns where the residuals are of another rank."""
        here = self._engine.rank(), self._engine.world_size()
        there = state.get("rank", here[0]), state.get("world_size", here[1])
        self._load(state)
        if here != there:
            for residual, _ in self._engine.low_rank_tensors():
                residual.zero_()
            warnings.warn(
                f"{self._settings.name}: the state is of rank {there[0]} of {there[1]}, this is rank "
                f"{here[0]} of {here[1]}: what it had left to send is given up",
                stacklevel=5,
            )

    def _load(self, state: dict[str, Any]) -> None:
        kept = self._engine.low_rank_tensors()
        shapes = [vectors.shape for _, vectors in kept]
        found = [vectors.shape for vectors in state["vectors"]]
        if shapes != found or len(state["residuals"]) != len(kept):
            raise UsageError(
                f"{self._settings.name}: the state has vectors of {found}, this model has {shapes}; want the "
                "state of the same model with the same rank"
            )
        for (residual, vectors), saved, saved_vectors in zip(
            kept, state["residuals"], state["vectors"], strict=True
        ):
            residual.copy_(saved)
            vectors.copy_(saved_vectors)
        self._count(int(state["steps"]))

    def commit(self) -> None:
        """Remember Q and the number of steps."""
        self._committed = self._steps, self._all_vectors()

    def roll_back(self) -> None:
        """Q and the number of steps are those of the last commit again."""
        if self._committed is not None:
            steps, vectors = self._committed
            self._put_back(vectors)
            self._count(steps)

    def common(self) -> dict[str, Any]:
        return {"steps": self._steps, "vectors": self._all_vectors()}

    def adopt_common(self, state: dict[str, Any]) -> None:
        self._put_back(state["vectors"])
        self._count(state["steps"])

    def hand_over(self) -> dict[str, Any]:
        committed = None
        if self._committed is not None:
            steps, row = self._committed
            committed = {"steps": steps, "vectors": self._as_vectors(row)}
        return {**self.state_dict(), "committed": committed}

    def take_over(self, left: dict[str, Any] | None, group: dist.ProcessGroup) -> None:
        """Collective. Residuals stay each rank's own; all else is that of a rank that has most of it."""
        if left is not None:
            self._load(left)
            if (then := left["committed"]) is not None:
                self._committed = then["steps"], in_a_row(then["vectors"])
        source, steps = source_of(0 if left is None else left["steps"], group)
        vectors = self._all_vectors()
        if vectors.numel() > 0:
            share([vectors], source, group)
            self._put_back(vectors)
        self._count(steps)

    @property
    def _steps(self) -> int:
        return self._steps_before + int(self._engine.stats().steps)

    def _count(self, steps: int) -> None:
        """So many have been taken."""
        self._steps_before = steps - self._engine.stats().steps
        self._engine.compress_after(max(0, self._settings.start_step - steps))

    def _vectors(self) -> list[torch.Tensor]:
        return [vectors for _, vectors in self._engine.low_rank_tensors()]

    def _all_vectors(self) -> torch.Tensor:
        """A copy of Q in one row."""
        return in_a_row(self._vectors())

    def _as_vectors(self, row: torch.Tensor) -> list[torch.Tensor]:
        vectors = self._vectors()
        parts = torch.split(row, [each.numel() for each in vectors])
        return [part.view_as(each) for part, each in zip(parts, vectors, strict=True)]

    def _put_back(self, row: torch.Tensor) -> None:
        for kept, saved in zip(self._vectors(), self._as_vectors(row), strict=True):
            kept.copy_(saved)


def in_a_row(vectors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([each.flatten() for each in vectors]) if vectors else torch.empty(0)
