from dataclasses import dataclass
from typing import ClassVar

import torch

from baguarun.comm.algorithms import Algorithm, PendingExchange, StepContext, Stepper, require_range


@dataclass(frozen=True, kw_only=True)
class Ring(Algorithm):
    """Each rank mixes its weights with its left neighbour's (directed ring, as in arXiv 1811.10792)."""

    name: ClassVar[str] = "ring"
    exchanges_weights: ClassVar[bool] = True
    share: float = 0.5  # How much of the mixture is the neighbour's.

    def __post_init__(self) -> None:
        require_range(self.name, "share", self.share, 0, 1)

    def operation(self, dtype: torch.dtype, device: torch.device) -> None:
        """Gradients stay where they are."""

    def make_stepper(self, context: StepContext) -> Stepper:
        return RingStepper(context, self.share)


class RingStepper(Stepper):
    def __init__(self, context: StepContext, share: float) -> None:
        super().__init__(context)
        self.share = share
        self.pending: PendingExchange | None = None
        self.incoming = [torch.empty_like(own) for own in context.weights.buffers]

    def before_forward(self) -> None:
        if self.pending is None:  # Sets out at the first forward of a step: forward and backward hide it.
            right, left = ((self.context.rank + distance) % self.context.world_size for distance in (1, -1))
            weights = self.context.weights.buffers
            self.pending = self.exchange(weights, self.incoming, to_rank=right, from_rank=left)

    def before_step(self) -> None:
        if self.pending is not None:
            for own, other in zip(self.context.weights.buffers, self.pending.wait(), strict=True):
                own.lerp_(other, self.share)
            self.pending = None

    def drop(self) -> None:
        if self.pending is not None:
            self.pending.wait()
            self.pending = None
