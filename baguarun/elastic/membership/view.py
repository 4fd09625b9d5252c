"""What the leader knows at one moment: all that `decide` may look at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from baguarun.contract import Failure
from baguarun.elastic.membership.job import JobSpec
from baguarun.elastic.membership.records import BrokenLink, Member, NodeRecord, StopRequest
from baguarun.elastic.membership.streak import Streak
from baguarun.elastic.membership.suspicion import Complaint


@dataclass(frozen=True)
class Node:
    """One registered node."""

    node_id: str
    create_revision: int
    record: NodeRecord


@dataclass(frozen=True)
class Report:
    """A failure in the current generation. `revision` orders reports across the cluster."""

    node_id: str
    failure: Failure
    retry_free: bool
    revision: int
    seen_s: float


@dataclass(frozen=True, kw_only=True)
class CurrentWorld:
    """The newest published World."""

    generation: int
    token: str
    members: tuple[Member, ...]
    live: bool
    acked: int
    """How many members have acknowledged; counted until the World is live."""
    checked: int | None
    """How many members have shown a sign of life since the leader asked; None: it has not asked."""
    restart_count: int
    charged: bool
    free_retries: int
    in_place: bool = False
    polite: bool = False
    halted: bool = False
    """In place: its workers have been told to stop at one commit."""
    streak: Streak = field(default_factory=Streak)
    broken: tuple[BrokenLink, ...] = ()


_NEVER = float("-inf")


@dataclass(frozen=True, kw_only=True)
class View:
    """Times are the leader's monotonic clock; revisions are the store's."""

    spec: JobSpec
    nodes: Mapping[str, Node] = field(default_factory=dict)
    """All registered nodes by id, oldest first."""
    strangers: frozenset[str] = frozenset()
    """Of those, the ones that belong to another job under the same id."""
    told: frozenset[str] = frozenset()
    """Nodes without a place that have been told why."""
    world: CurrentWorld | None = None
    reports: tuple[Report, ...] = ()
    time_s: float = 0.0
    """Unix time of this moment, by the leader's clock; for what outlives a leader."""
    complaints: tuple[Complaint, ...] = ()
    """Of workers whose communication broke, in the current generation."""
    silent: frozenset[str] = frozenset()
    """Members whose agents do not answer probes: accused, or found to be lost and gone."""
    unheard: frozenset[str] = frozenset()
    """Members that are alive by the store, but whose agents do not answer probes."""
    done: frozenset[str] = frozenset()
    """Members whose workers of the current generation have all exited 0; they may have vanished since."""
    left: frozenset[str] = frozenset()
    """Nodes that left politely."""
    desired: int | None = None
    """How many nodes the job shall have, if anybody has said so."""
    dismissed: frozenset[str] = frozenset()
    """Nodes that have been asked to leave, as long as they are here."""
    invited: frozenset[str] = frozenset()
    """Nodes that have been asked to start newcomers, as long as they are here."""
    stop: StopRequest | None = None
    ended_revision: int | None = None
    """Store revision of the outcome, if the job has one."""
    inherited: bool = False
    """Nobody was registered when the leader came, and the job's keys are older than that."""
    newcomer_s: float = _NEVER
    """When the last node registered."""
    loss_s: float = _NEVER
    """When the last member vanished."""
    first_loss_s: float = _NEVER
    """When the first of the members vanished that are missing now."""
    short_s: float = _NEVER
    """Since when fewer than `min_nodes` nodes are registered."""
    gap_s: float = _NEVER
    """When the last gap ended: the store, or the leader itself, had been away."""
    took_over_s: float = _NEVER
    """When this leader began."""

    @property
    def steps(self) -> int:
        """Committed steps known so far."""
        known = max((node.record.state.steps for node in self.nodes.values()), default=0)
        return max(known, self.world.streak.steps if self.world else 0)

    @property
    def has_stepped(self) -> bool:
        """Whether a step was committed in the current World."""
        newest = max((node.record.state.stepped for node in self.nodes.values()), default=0)
        return self.world is not None and newest >= self.world.generation

    @property
    def places(self) -> int:
        """How many nodes a World may have: what the job allows, less if it was scaled down."""
        if self.desired is None:
            return self.spec.max_nodes
        return max(self.spec.min_nodes, min(self.desired, self.spec.max_nodes))
