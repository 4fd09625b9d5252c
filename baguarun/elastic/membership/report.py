"""What the store says about a job, for people: read in one go, decided nothing by, never written."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from baguarun.elastic.membership.job import JobSpec
from baguarun.elastic.membership.keys import JOBS, JobKeys
from baguarun.elastic.membership.records import (
    FailureReport,
    Happening,
    Live,
    Member,
    NodeRecord,
    Order,
    Outcome,
    Word,
    WorldRecord,
    desired_from_json,
    events_from_json,
    generation_from_json,
    members_from_json,
    parse_row,
    spec_from_json,
)
from baguarun.elastic.membership.store import Entry, Snapshot, Store
from baguarun.elastic.membership.stragglers import Pace, paces_from_json


class JobState(enum.Enum):
    """Where a job is in its life."""

    WAITING = "waiting"
    """Too few nodes so far: no World yet."""
    FORMING = "forming"
    """A World is agreed on, not all of its nodes are ready."""
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    ABANDONED = "abandoned"
    """No node is registered, and it has no outcome: all died, or all have lost the store."""

    @property
    def is_over(self) -> bool:
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.STOPPED)


class NodeState(enum.Enum):
    """What one node of a job does."""

    PREPARING = "preparing"
    """Ends the workers of an older World."""
    READY = "ready"
    """Waits for the other members."""
    RUNNING = "running"
    DONE = "done"
    """All its workers exited with 0."""
    FAILED = "failed"
    """One of its workers failed; the job is about to start again or to end."""
    IDLE = "idle"
    """In place: its workers are being replaced."""
    STARTING = "starting"
    """In place: it has no place yet, and starts the workers that are to join."""
    LEAVING = "leaving"
    """Asked to go: the job was scaled down."""
    LEFT = "left"
    LOST = "lost"
    """A member that is not registered any more."""
    GONE = "gone"
    """As it should be: the job is over."""
    WAITING = "waiting"
    """Not in a World yet."""
    STANDBY = "standby"
    """There is no place for it."""
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """One member of the newest World, or one registered node without a place."""

    node_id: str
    name: str
    slots: int
    state: NodeState
    leads: bool = False
    node_rank: int | None = None
    """Place in the newest World, None for a node that has none."""
    first_rank: int | None = None
    """Rank of its first worker."""
    address: str = ""
    """Empty for a node that is not registered any more, as `registered_s` is None then."""
    registered_s: float | None = None
    """Unix time by the node's own clock."""


@dataclass(frozen=True, kw_only=True)
class JobSummary:
    """One job in a list of jobs."""

    spec: JobSpec
    state: JobState
    num_registered: int
    """Nodes that are there, with a place or without."""
    world: WorldRecord | None
    outcome: Outcome | None


@dataclass(frozen=True, kw_only=True)
class JobReport:
    """All about one job."""

    summary: JobSummary
    desired: int | None
    """What `scale` asked for last."""
    nodes: tuple[NodeReport, ...]
    """Members in rank order, then the others, oldest first."""
    note: str
    """Why nothing happens at the moment, if somebody waits."""
    events: tuple[Happening, ...]
    paces: tuple[Pace, ...] = ()
    """In place: of the newest World's workers, by rank; one that has done no step there has none."""


async def read_job(store: Store, job_id: str) -> JobReport | None:
    """What the store knows of a job; None if it knows no such job."""
    return report(job_id, await store.list(JobKeys(job_id).root))


async def known_jobs(store: Store) -> list[str]:
    """Ids of all jobs, running or not, the oldest first."""
    return [entry.key.removeprefix(JOBS) for entry in (await store.list(JOBS)).entries]


async def list_jobs(store: Store) -> list[JobSummary]:
    """All jobs, running or not, the oldest first. Three small requests per job, whatever its size."""
    found = await asyncio.gather(*(_read_summary(store, job_id) for job_id in await known_jobs(store)))
    return [summary for summary in found if summary is not None]


async def _read_summary(store: Store, job_id: str) -> JobSummary | None:
    keys = JobKeys(job_id)
    spec, shared, num_registered = await asyncio.gather(
        store.get(keys.spec), store.list(keys.all), store.count(keys.nodes)
    )
    return None if spec is None else _summary(spec, _Shared(keys, shared.entries), num_registered)


def report(job_id: str, snapshot: Snapshot) -> JobReport | None:
    """The report from all keys of the job."""
    keys = JobKeys(job_id)
    by_key = {entry.key: entry for entry in snapshot.entries}
    if keys.spec not in by_key:
        return None
    shared = _Shared(keys, snapshot.entries)
    nodes = _Nodes(keys, snapshot.entries, shared)
    return JobReport(
        summary=_summary(by_key[keys.spec], shared, len(nodes.registered)),
        desired=desired_from_json(by_key[keys.desired].value) if keys.desired in by_key else None,
        nodes=(*nodes.members(by_key), *nodes.others()),
        note=shared.note,
        events=events_from_json(by_key[keys.events].value) if keys.events in by_key else (),
        paces=_paces(keys, snapshot.entries, shared.world),
    )


def _paces(keys: JobKeys, entries: Iterable[Entry], world: WorldRecord | None) -> tuple[Pace, ...]:
    all_paces = [
        pace for entry in entries if entry.key.startswith(keys.paces) for pace in paces_from_json(entry.value)
    ]
    newest = [pace for pace in all_paces if world is not None and pace.generation == world.generation]
    return tuple(sorted(newest, key=lambda pace: pace.rank))


class _Shared:
    """What lies under `all/`."""

    def __init__(self, keys: JobKeys, entries: Iterable[Entry]) -> None:
        by_key = {entry.key: entry for entry in entries if entry.key.startswith(keys.all)}
        self.leader_token = by_key[keys.leader].value.decode() if keys.leader in by_key else ""
        self.outcome = Outcome.from_json(by_key[keys.outcome].value) if keys.outcome in by_key else None
        worlds = [
            (WorldRecord.from_json(entry.value), entry.mod_revision)
            for entry in by_key.values()
            if entry.key.startswith(keys.worlds)
        ]
        self.world: WorldRecord | None = None
        self.live = False
        formed = 0
        if worlds:
            self.world, formed = max(worlds, key=lambda item: item[0].generation)
            live = by_key.get(f"{keys.lives}{self.world.generation}")
            self.live = live is not None and Live.from_json(live.value).token == self.world.token
        note = by_key.get(keys.note)
        # One from before the newest World is no news.
        self.note = note.value.decode() if note is not None and note.mod_revision > formed else ""

    def state(self, num_registered: int) -> JobState:
        if self.outcome is not None:
            if self.outcome.stopped:
                return JobState.STOPPED
            return JobState.SUCCEEDED if self.outcome.success else JobState.FAILED
        if num_registered == 0:
            return JobState.ABANDONED
        if self.world is None:
            return JobState.WAITING
        return JobState.RUNNING if self.live else JobState.FORMING


def _summary(spec: Entry, shared: _Shared, num_registered: int) -> JobSummary:
    return JobSummary(
        spec=spec_from_json(spec.value),
        state=shared.state(num_registered),
        num_registered=num_registered,
        world=shared.world,
        outcome=shared.outcome,
    )


class _Nodes:
    """Everything that the store says about single nodes."""

    def __init__(self, keys: JobKeys, entries: Iterable[Entry], shared: _Shared) -> None:
        self._keys = keys
        self._shared = shared
        self._generation = shared.world.generation if shared.world else 0
        self.registered: dict[str, tuple[NodeRecord, int]] = {}
        """Each with its create_revision."""
        self._orders: dict[str, Order] = {}
        self._acked: set[str] = set()
        self._done: set[str] = set()
        self._failed: set[str] = set()
        self._left: set[str] = set()
        self._placed: set[str] = set()
        for entry in entries:
            self._read(entry)

    def _read(self, entry: Entry) -> None:
        keys, key = self._keys, entry.key
        node_id = key.rpartition("/")[2]
        if key.startswith(keys.nodes):
            self.registered[node_id] = (NodeRecord.from_json(entry.value), entry.create_revision)
        elif key.startswith(keys.rows):
            row = parse_row(entry.value)
            if isinstance(row, Word) and row.order is not Order.ANSWER:
                self._orders[key.split("/")[-2]] = row.order
        elif key == keys.ack(self._generation, node_id):
            self._acked.add(node_id)
        elif key.startswith(keys.dones) and generation_from_json(entry.value) == self._generation:
            self._done.add(node_id)
        elif key.startswith(keys.errors):
            if FailureReport.from_json(entry.value).failure.generation == self._generation:
                self._failed.add(node_id)
        elif key.startswith(keys.leaves):
            self._left.add(node_id)

    def members(self, by_key: Mapping[str, Entry]) -> list[NodeReport]:
        """Of the newest World, in rank order."""
        entry = by_key.get(f"{self._keys.members}{self._generation}")
        reports: list[NodeReport] = []
        first_rank = 0
        for node_rank, member in enumerate(members_from_json(entry.value) if entry else ()):
            record = self._record_of(member)
            if record is not None:
                self._placed.add(member.node_id)
            reports.append(
                NodeReport(
                    node_id=member.node_id,
                    name=member.name,
                    slots=member.slots,
                    state=self._state(member, record) if record else self._state_of_missing(member.node_id),
                    leads=record is not None and record.token == self._shared.leader_token,
                    node_rank=node_rank,
                    first_rank=first_rank,
                    address=record.address if record else "",
                    registered_s=record.registered_s if record else None,
                )
            )
            first_rank += member.slots
        return reports

    def others(self) -> list[NodeReport]:
        """Registered nodes without a place; call `members` first."""
        states = {
            Order.LEAVE: NodeState.LEAVING,
            Order.REFUSED: NodeState.REFUSED,
            Order.STAND_BY: NodeState.STANDBY,
            Order.START_NEWCOMERS: NodeState.STARTING,
        }
        return [
            NodeReport(
                node_id=node_id,
                name=record.name,
                slots=record.slots,
                state=states[self._orders[node_id]] if node_id in self._orders else NodeState.WAITING,
                leads=record.token == self._shared.leader_token,
                address=record.address,
                registered_s=record.registered_s,
            )
            for node_id, (record, _) in self.registered.items()
            if node_id not in self._placed
        ]

    def _record_of(self, member: Member) -> NodeRecord | None:
        """The member's registration; None if it is gone, or has come back without its workers."""
        record, create_revision = self.registered.get(member.node_id, (None, 0))
        if record is None or self._shared.world is None:
            return None
        kept = record.past is not None and record.past.token == self._shared.world.token
        return record if kept or create_revision == member.create_revision else None

    def _state(self, member: Member, record: NodeRecord) -> NodeState:
        node_id, lost = member.node_id, record.state.lost
        if self._orders.get(node_id) is Order.LEAVE or record.state.leaving:
            return NodeState.LEAVING
        if node_id in self._done:
            return NodeState.DONE
        if node_id in self._failed or set(lost).intersection(member.workers):
            return NodeState.FAILED
        if not member.slots:
            return NodeState.IDLE
        if self._shared.live:
            return NodeState.RUNNING
        return NodeState.READY if node_id in self._acked else NodeState.PREPARING

    def _state_of_missing(self, node_id: str) -> NodeState:
        if node_id in self._done:
            return NodeState.DONE
        if node_id in self._left:
            return NodeState.LEFT
        return NodeState.GONE if self._shared.outcome is not None else NodeState.LOST
