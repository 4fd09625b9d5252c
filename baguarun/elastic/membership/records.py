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

    @classmethod
    def of(cls, offer: NodeOffer, spec: JobSpec, token: str, seen: int, past: Past | None) -> NodeRecord:
        return cls(
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
        )

    def to_json(self) -> bytes:
        return _dump(asdict(self))

    @classmethod
    def from_json(cls, data: bytes) -> NodeRecord:
        fields = json.loads(data)
        if fields["past"] is not None:
            fields["past"] = Past(**fields["past"])
        return cls(**fields)


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

    def to_json(self) -> bytes:
        return _dump(vars(self))

    @classmethod
    def from_json(cls, data: bytes) -> WorldRecord:
        return cls(**json.loads(data))


@dataclass(frozen=True, kw_only=True)
class Row:
    """`row/<id>/…` of a member: its place in World (generation, token)."""

    generation: int
    token: str
    node_rank: int
    first_rank: int
    slots: int

    def to_json(self) -> bytes:
        return _dump(vars(self))


class Order(enum.Enum):
    """What a node is to do that gets a word instead of a place."""

    STAND_BY = "stand by"
    LEAVE = "leave"
    """Its place is not wanted any more: a polite leave."""
    REFUSED = "refused"
    """It does not belong here."""


@dataclass(frozen=True, kw_only=True)
class Word:
    """`row/<id>/word`: what the leader has to say to a node without a place, or to lose it."""

    text: str
    order: Order

    def to_json(self) -> bytes:
        return _dump({"text": self.text, "order": self.order.value})


def parse_row(data: bytes) -> Row | Word:
    fields = json.loads(data)
    if "text" in fields:
        return Word(text=fields["text"], order=Order(fields["order"]))
    return Row(**fields)


@dataclass(frozen=True)
class Member:
    """One member of a World, as the next leader needs to know it."""

    node_id: str
    name: str
    slots: int
    create_revision: int
    """Of the registration that was taken in; a later one under the same id is a newcomer."""


def members_to_json(members: Sequence[Member]) -> bytes:
    return _dump([[m.node_id, m.name, m.slots, m.create_revision] for m in members])


def members_from_json(data: bytes) -> tuple[Member, ...]:
    return tuple(Member(*fields) for fields in json.loads(data))


@dataclass(frozen=True, kw_only=True)
class FailureReport:
    """`errors/<id>`: the first failure on one node in one generation."""

    failure: Failure
    retry_free: bool

    def to_json(self) -> bytes:
        return _dump({"failure": asdict(self.failure), "retry_free": self.retry_free})

    @classmethod
    def from_json(cls, data: bytes) -> FailureReport:
        fields = json.loads(data)
        return cls(failure=Failure(**fields["failure"]), retry_free=fields["retry_free"])


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
