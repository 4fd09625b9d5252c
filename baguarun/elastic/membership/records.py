"""What lies under the keys: small frozen records, JSON on the wire."""

from __future__ import annotations

import enum
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from baguarun.contract import Failure
from baguarun.elastic.membership.job import JobSpec, NodeOffer
from baguarun.elastic.membership.streak import Streak


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


@dataclass(frozen=True, kw_only=True)
class Past:
    """The World whose workers a registering node still runs."""

    generation: int
    token: str
    node_rank: int
    num_nodes: int
    restart_count: int
    net_secret: str = field(repr=False)


@dataclass(frozen=True, order=True)
class Process:
    """One worker process of a node, told from any other that has the same local rank."""

    local_rank: int
    generation: int
    """Of the World that it was started for; 0 for a newcomer, which is started for none."""
    number: int = 0
    """Counts the newcomers of one agent, from 1."""


def _processes(fields: Sequence[Sequence[int]]) -> tuple[Process, ...]:
    return tuple(Process(*process) for process in fields)


def _numbers(processes: Sequence[Process]) -> list[list[int]]:
    return [[process.local_rank, process.generation, process.number] for process in processes]


@dataclass(frozen=True, kw_only=True)
class InPlaceState:
    """What an agent tells of its workers where they are resized in place; the rest of the node's record."""

    workers: tuple[Process, ...] = ()
    """Alive and in `baguarun.elastic.run`: all that a World in place may consist of; at most `slots`."""
    waiting: tuple[Process, ...] = ()
    """Those of `workers` that have been in no World yet."""
    arriving: int = 0
    """So many more will be offered in a moment: they have come to `baguarun.elastic.run`."""
    lost: tuple[Process, ...] = ()
    """Workers of the newest World that have failed."""
    failure: FailureReport | None = None
    """The first failure in that World. Said here, not under `errors/`: both must be seen at one moment."""
    steps: int = 0
    """Committed steps that this agent knows of."""
    stepped: int = 0
    """Newest generation in which a step was committed, as far as this agent knows."""
    leaving: bool = False
    """The node goes as soon as there is a World without it."""


@dataclass(frozen=True, kw_only=True)
class NodeRecord:
    """`nodes/<id>`: one registration of one node."""

    name: str
    address: str
    slots: int
    node_rank: int | None
    """Node rank the user asked for."""
    digest: str
    summary: str
    token: str
    """Tells this registration from any other under the same id."""
    registered_s: float
    """Unix time of this registration, by the node's clock; for people only."""
    seen: int
    """Newest generation this agent has seen; the next one is above it, even if the store lost its data."""
    past: Past | None
    probe_port: int = 0
    """UDP port at which the node answers probes; 0: it does not."""
    probe_key: str = field(default="", repr=False)
    """What those know who may probe it."""
    state: InPlaceState = field(default_factory=InPlaceState)
    """Rewritten while the registration lasts."""

    @classmethod
    def of(
        cls,
        offer: NodeOffer,
        spec: JobSpec,
        token: str,
        seen: int,
        past: Past | None,
        state: InPlaceState,
        probe: tuple[int, str] = (0, ""),
    ) -> NodeRecord:
        return cls(
            probe_port=probe[0],
            probe_key=probe[1],
            name=offer.name,
            address=offer.address,
            slots=offer.slots,
            node_rank=offer.node_rank,
            digest=spec.digest,
            summary=spec.summary,
            token=token,
            registered_s=time.time(),
            seen=seen,
            past=past,
            state=state,
        )

    def to_json(self) -> bytes:
        state = {
            **vars(self.state),
            "workers": _numbers(self.state.workers),
            "waiting": _numbers(self.state.waiting),
            "lost": _numbers(self.state.lost),
            "failure": self.state.failure and self.state.failure.to_json().decode(),
        }
        return _dump({**asdict(self), "state": state})

    @classmethod
    def from_json(cls, data: bytes) -> NodeRecord:
        fields = json.loads(data)
        if fields["past"] is not None:
            fields["past"] = Past(**fields["past"])
        state = fields["state"]
        for name in ("workers", "waiting", "lost"):
            state[name] = _processes(state[name])
        if state["failure"] is not None:
            state["failure"] = FailureReport.from_json(state["failure"])
        return cls(**{**fields, "state": InPlaceState(**state)})


@dataclass(frozen=True, kw_only=True)
class WorldRecord:
    """`all/world/<g>`: what is the same for all members."""

    generation: int
    token: str
    """Tells this World from one that another leader prepared under the same number but did not publish."""
    num_nodes: int
    world_size: int
    master_addr: str
    restart_count: int
    charged: bool
    """This World cost a restart; refunded if it turns out that a lost member was the cause."""
    free_retries: int
    """Worlds in a row that were tried again without a charge."""
    reason: str
    formed_s: float
    """Unix time at which it was published, by the leader's clock; for people only."""
    net_secret: str = field(repr=False)
    """`World.net_secret`: made by the job's first leader, handed on from World to World."""
    in_place: bool = False
    """`World.in_place`"""
    polite: bool = False
    """Nobody of the World before is lost: its workers go on to a step boundary that they agree on."""
    is_short: bool = False
    """Some of its nodes have fewer workers than they shall have: others are being started."""
    streak: Streak = field(default_factory=Streak)
    broken: tuple[BrokenLink, ...] = ()
    """Links that broke lately, in this job; handed on, too."""

    def to_json(self) -> bytes:
        return _dump(asdict(self))

    @classmethod
    def from_json(cls, data: bytes) -> WorldRecord:
        fields = json.loads(data)
        fields["streak"] = Streak.of(fields["streak"])
        fields["broken"] = tuple(BrokenLink(**link) for link in fields["broken"])
        return cls(**fields)


@dataclass(frozen=True, kw_only=True)
class Row:
    """`row/<id>/…` of a member: its place in World (generation, token)."""

    generation: int
    token: str
    node_rank: int
    first_rank: int
    slots: int
    """Workers of this node in that World."""
    workers: tuple[Process, ...] = ()
    """Where workers are resized in place: who they are, in the order of their ranks."""
    leaving: bool = False
    """The node's workers leave at the boundary at which the others switch."""

    def to_json(self) -> bytes:
        return _dump({**vars(self), "workers": _numbers(self.workers)})


class Order(enum.Enum):
    """What a node is to do that gets a word instead of a place."""

    STAND_BY = "stand by"
    LEAVE = "leave"
    """Its place is not wanted any more: a polite leave."""
    START_NEWCOMERS = "start newcomers"
    """There is room: start workers that wait to be taken in."""
    REFUSED = "refused"
    """It does not belong here."""
    ANSWER = "answer"
    """It is suspected to be dead: it is to write the text back."""


@dataclass(frozen=True, kw_only=True)
class Word:
    """`row/<id>/word`: what the leader has to say to a node without a place, or to lose it."""

    text: str
    order: Order
    generation: int = 0
    """Of the World that runs."""
    net_secret: str = field(default="", repr=False)
    """Of the job, for workers that are started before their node has a place."""

    def to_json(self) -> bytes:
        return _dump({**vars(self), "order": self.order.value})


def parse_row(data: bytes) -> Row | Word:
    fields = json.loads(data)
    if "text" in fields:
        return Word(**{**fields, "order": Order(fields["order"])})
    return Row(**{**fields, "workers": _processes(fields["workers"])})


@dataclass(frozen=True)
class Member:
    """One member of a World, as the next leader needs to know it."""

    node_id: str
    name: str
    slots: int
    """Its workers in that World."""
    create_revision: int
    """Of the registration that was taken in; a later one under the same id is a newcomer."""
    workers: tuple[Process, ...] = ()
    """`Row.workers`"""


def members_to_json(members: Sequence[Member]) -> bytes:
    return _dump([[m.node_id, m.name, m.slots, m.create_revision, _numbers(m.workers)] for m in members])


def members_from_json(data: bytes) -> tuple[Member, ...]:
    return tuple(
        Member(node_id, name, slots, create_revision, _processes(workers))
        for node_id, name, slots, create_revision, workers in json.loads(data)
    )


@dataclass(frozen=True, kw_only=True)
class FailureReport:
    """`errors/<id>`: the first failure on one node in one generation."""

    failure: Failure
    retry_free: bool

    def to_json(self) -> bytes:
        return _dump({"failure": asdict(self.failure), "retry_free": self.retry_free})

    @classmethod
    def from_json(cls, data: bytes | str) -> FailureReport:
        fields = json.loads(data)
        return cls(failure=Failure(**fields["failure"]), retry_free=fields["retry_free"])


class Witness(enum.Enum):
    """Who noticed that something is wrong."""

    PROBE = "probe"
    """An agent, which no longer hears its neighbour's."""
    WORKER = "worker"
    """A worker, whose communication broke."""


@dataclass(frozen=True, kw_only=True)
class Suspicion:
    """`suspect/<g>/<id>` (a worker's) and `suspect/<g>/<id>/<blamed>` (a probe's)."""

    blamed: tuple[str, ...]
    """Node ids; empty where the transport names nobody."""
    by: Witness
    reason: str
    silence: bool = False
    """A worker's: nothing was heard from whom it blames, rather than that a connection broke."""

    def to_json(self) -> bytes:
        fields = {"blamed": self.blamed, "by": self.by.value, "reason": self.reason}
        return _dump({**fields, "silence": self.silence})

    @classmethod
    def from_json(cls, data: bytes) -> Suspicion:
        fields = json.loads(data)
        fields |= {"blamed": tuple(fields["blamed"]), "by": Witness(fields["by"])}
        return cls(**fields)


@dataclass(frozen=True)
class BrokenLink:
    """Two nodes between which the workers' communication broke while both were members."""

    first: str
    second: str
    time_s: float
    """When, in Unix time by the leader's clock."""
    held_off_s: float = 60.0
    """So long one end stays out where the other is."""


@dataclass(frozen=True, kw_only=True)
class StopRequest:
    """`stop`: somebody ends the job on purpose."""

    reason: str
    exit_code: int
    at_once: bool = False
    """Workers get no time to save their work."""

    def to_json(self) -> bytes:
        return _dump(vars(self))

    @classmethod
    def from_json(cls, data: bytes) -> StopRequest:
        return cls(**json.loads(data))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """`all/outcome`: how the job ended."""

    success: bool
    failure: Failure | None
    reason: str
    exit_code: int
    stopped: bool = False
    """Somebody ended it on purpose (`StopRequest`)."""
    at_once: bool = False
    """`StopRequest.at_once`"""

    def to_json(self) -> bytes:
        return _dump(asdict(self))

    @classmethod
    def from_json(cls, data: bytes) -> Outcome:
        fields = json.loads(data)
        if fields["failure"] is not None:
            fields["failure"] = Failure(**fields["failure"])
        return cls(**fields)


@dataclass(frozen=True, kw_only=True)
class Live:
    """`all/live/<g>`: all members of that World have acknowledged it."""

    token: str
    """Of the World; a number alone may come again after the job began afresh."""
    master_port: int | None

    def to_json(self) -> bytes:
        return _dump(vars(self))

    @classmethod
    def from_json(cls, data: bytes) -> Live:
        return cls(**json.loads(data))


@dataclass(frozen=True, kw_only=True)
class HaltRecord:
    """`all/halt/<g>`: the workers of that World stop at one commit; too few nodes stay to form another."""

    token: str
    """Of the World, as in `Live`."""
    reason: str

    def to_json(self) -> bytes:
        return _dump(vars(self))

    @classmethod
    def from_json(cls, data: bytes) -> HaltRecord:
        return cls(**json.loads(data))


@dataclass(frozen=True)
class Happening:
    """One line of `events`, for people: the time is Unix time by the leader's clock."""

    time_s: float
    generation: int
    text: str


def events_to_json(events: Sequence[Happening]) -> bytes:
    return _dump([[event.time_s, event.generation, event.text] for event in events])


def events_from_json(data: bytes) -> tuple[Happening, ...]:
    return tuple(Happening(*fields) for fields in json.loads(data))


def desired_to_json(num_nodes: int) -> bytes:
    """`desired`: how many nodes the job shall have."""
    return _dump(num_nodes)


def desired_from_json(data: bytes) -> int:
    return int(json.loads(data))


def port_to_json(master_port: int | None) -> bytes:
    """`ack/<g>/<id>`: the port that this node proposes."""
    return _dump(master_port)


def port_from_json(data: bytes) -> int | None:
    port: int | None = json.loads(data)
    return port


def generation_to_json(generation: int) -> bytes:
    """`done/<id>`: the generation that is done."""
    return _dump(generation)


def generation_from_json(data: bytes) -> int:
    return int(json.loads(data))


def spec_to_json(spec: JobSpec) -> bytes:
    return _dump(asdict(spec))


def spec_from_json(data: bytes) -> JobSpec:
    return JobSpec(**json.loads(data))
