"""What one node brings to a job, and what the job asks of every node."""

from __future__ import annotations

from dataclasses import dataclass

from baguarun.errors import UsageError

UNLIMITED_RESTARTS = 2**31 - 1
"""`JobSpec.max_restarts` where only failing without progress ends a job."""


@dataclass(frozen=True, kw_only=True)
class NodeOffer:
    """One node as its agent registers it."""

    node_id: str
    """Unique among the living nodes of the job; no slash. The same id after a restart is a newcomer."""
    name: str
    """What people call the node; node ranks of the first World follow its natural order (n2 before n10)."""
    address: str
    """Where the other nodes reach this one: becomes `World.master_addr` if it is node 0."""
    slots: int
    """Workers it will start (nodes may differ)."""
    node_rank: int | None = None
    """Node rank the user asked for, if any; counts in the first World."""

    def __post_init__(self) -> None:
        _check_key_part("node_id", self.node_id)
        if self.slots < 1:
            raise UsageError(f"slots={self.slots} on node {self.name}: want at least 1 worker per node")


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """What must be equal on every node of a job."""

    job_id: str
    min_nodes: int
    max_nodes: int
    max_restarts: int
    """Restarts that failing workers may cost the whole job; membership changes are free."""
    digest: str
    """Digest of the command and of all settings that must agree; another digest is another job."""
    summary: str
    """The same for people, e.g. `train.py --lr 0.1 (nnodes 2, 4 workers each)`; shown when digests differ."""
    in_place: bool = False
    """Workers go on in the next World; else they are started anew with each."""

    def __post_init__(self) -> None:
        _check_key_part("job_id", self.job_id)
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise UsageError(f"min_nodes={self.min_nodes}: want 1 <= min_nodes <= max_nodes={self.max_nodes}")
        if self.max_restarts < 0:
            raise UsageError(f"max_restarts={self.max_restarts}: want 0 or more")


def _check_key_part(name: str, value: str) -> None:
    if not value or "/" in value:
        raise UsageError(
            f"{name}={value!r}: want a name without a slash, it becomes part of a key in the store"
        )
