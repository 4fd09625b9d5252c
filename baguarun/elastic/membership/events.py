"""What a `Session` tells the launcher, in the order in which it must be acted on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from baguarun.contract import Failure, World
from baguarun.elastic.membership.records import Process


@dataclass(frozen=True)
class Prepare:
    """Stop the workers of every older generation, then call `Session.acknowledge(generation, port)`.

    In place: have `workers` leave their World, and acknowledge when they are ready for the next one.
    """

    generation: int
    reason: str
    in_place: bool = False
    polite: bool = False
    """`WorldRecord.polite`"""
    workers: tuple[Process, ...] = ()
    """This node's workers in the new World; without any there is nothing to acknowledge."""
    leaving: bool = False
    """This node's workers leave at the boundary at which the others switch."""
    net_secret: str = field(default="", repr=False)
    """The job's, for workers to be started."""


@dataclass(frozen=True)
class Start:
    """All members have acknowledged: start the workers of this World."""

    world: World


@dataclass(frozen=True)
class Halted:
    """In place: have the workers stop at a commit that all agree on, and leave a checkpoint there."""

    generation: int
    """Above that of the World that runs; what follows, if anything does, may have the same number."""
    reason: str


@dataclass(frozen=True)
class Finished:
    """The job is over, on every node alike; `Session.run` returns next."""

    success: bool
    failure: Failure | None
    """The first failure in the cluster, if a worker's failure ended the job."""
    reason: str
    exit_code: int
    """What every agent exits with: 0, the failed worker's code, or what `control.stop_job` was given."""
    stopped: bool = False
    """Somebody ended the job on purpose; `reason` says who."""
    at_once: bool = False
    """Workers get no time to save their work."""


@dataclass(frozen=True)
class Waiting:
    """Why nothing happens at the moment, for people; sent only when it has changed."""

    reason: str


@dataclass(frozen=True)
class StoreLost:
    """The store does not answer: membership is paused, workers go on."""


@dataclass(frozen=True)
class StoreBack:
    """The store answers again."""


@dataclass(frozen=True)
class Expelled:
    """Our place in the World is gone: stop all workers now. The session registers again by itself."""

    reason: str


@dataclass(frozen=True)
class Dismissed:
    """The job was scaled down and goes on without this node: call `Session.leave`."""

    reason: str


@dataclass(frozen=True)
class Invited:
    """The job has room: start workers that wait to be taken in, and tell of those that are ready."""

    generation: int
    """Of the World that runs."""
    net_secret: str = field(repr=False)


MembershipEvent: TypeAlias = (
    Prepare | Start | Halted | Finished | Waiting | StoreLost | StoreBack | Expelled | Dismissed | Invited
)
