"""What the leader may do: the results of `decide` and `decide_in_place`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from baguarun.contract import Failure
from baguarun.elastic.membership.records import BrokenLink, Process, StopRequest
from baguarun.elastic.membership.streak import Streak
from baguarun.elastic.membership.view import Node


@dataclass(frozen=True)
class Wait:
    """Nothing, until something changes or the clock reads `until_s`."""

    until_s: float | None = None
    announce: bool = False
    """People on all nodes should know why."""


@dataclass(frozen=True, kw_only=True)
class InPlace:
    """The workers of a new World, by node id; those of a fresh one are started for it."""

    workers: Mapping[str, tuple[Process, ...]]
    fresh: bool
    polite: bool
    leaving: frozenset[str] = frozenset()
    """Nodes whose workers leave at the boundary."""
    streak: Streak = field(default_factory=Streak)


@dataclass(frozen=True)
class Publish:
    """A new World of these nodes, in this order."""

    generation: int
    nodes: tuple[Node, ...]
    restart_count: int
    charged: bool = False
    free_retries: int = 0
    broken: tuple[BrokenLink, ...] = ()
    """Links that the next leader has to remember."""
    in_place: InPlace | None = None
    """What else there is to say where workers are resized in place."""


@dataclass(frozen=True)
class GoLive:
    """All members have acknowledged: workers may start."""

    generation: int


@dataclass(frozen=True)
class Halt:
    """Have all workers stop at one commit, with a checkpoint: too few nodes stay to form another World."""

    generation: int
    """Of the World that runs."""


@dataclass(frozen=True)
class Check:
    """Ask every member for a sign of life: was a lost node the cause of the failure?"""

    generation: int


@dataclass(frozen=True)
class Tell:
    """Let nodes without a place know why; the `refused` must go."""

    node_ids: tuple[str, ...]
    refused: bool


@dataclass(frozen=True)
class Dismiss:
    """Ask members to leave politely: the job shall have fewer nodes."""

    node_ids: tuple[str, ...]


@dataclass(frozen=True)
class Invite:
    """Ask nodes without a place to start newcomers."""

    node_ids: tuple[str, ...]


@dataclass(frozen=True)
class Reset:
    """What lies in the store belongs to nodes that are all gone: clear it and begin afresh."""


@dataclass(frozen=True)
class Finish:
    """The job is over."""

    success: bool
    failure: Failure | None
    exit_code: int
    stop: StopRequest | None = None
    """Whose wish that was, if somebody's."""


Action: TypeAlias = Wait | Publish | GoLive | Halt | Check | Tell | Dismiss | Invite | Reset | Finish


@dataclass(frozen=True)
class Decision:
    action: Action
    reason: str
