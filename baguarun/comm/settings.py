"""What the wrapper's constructor can be asked for."""

from __future__ import annotations

from dataclasses import dataclass

from baguarun.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class SessionSettings:
    """What the constructor of the wrapper was asked for."""

    bucket_cap_mb: float | None = None
    """A bucket closes when it has reached this many MiB; None: what measured best."""
    find_unused_parameters: bool = False
    """Walk the graph of each forward, so that parameters may be left out of the loss."""
    static_graph: bool = False
    """The graph never changes: learn from the first step which parameters get gradients, and how often."""
    broadcast_buffers: bool = True
    """Overwrite the buffers by rank 0's before forward, as often as the algorithm has ranks in step."""
    evaluates_alone: bool = False
    """A forward in evaluation mode communicates nothing, gradients enabled or not: one rank may run it alone.
    If all train on it nevertheless, what it would have begun begins before the optimizer's step."""
    init_sync: bool = True
    """Overwrite parameters, buffers and optimizer state by rank 0's at the start."""
    share_memory: bool = True
    """Keep full-precision gradients of CPU ranks of one host in memory that they share, reduced in place."""

    def __post_init__(self) -> None:
        if self.bucket_cap_mb is not None and not self.bucket_cap_mb > 0:
            raise UsageError(f"bucket_cap_mb={self.bucket_cap_mb}: want more than 0")
