"""The leader's memory: what it has read of the store, kept current by the watch, as a `View`."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import MappingProxyType

from baguarun.elastic.membership.job import JobSpec
from baguarun.elastic.membership.keys import JobKeys
from baguarun.elastic.membership.records import (
    FailureReport,
    Happening,
    Member,
    NodeRecord,
    Order,
    StopRequest,
    Suspicion,
    Witness,
    Word,
    WorldRecord,
    desired_from_json,
    events_from_json,
    generation_from_json,
    members_from_json,
    parse_row,
    spec_from_json,
)
from baguarun.elastic.membership.settings import MembershipSettings
from baguarun.elastic.membership.store import Change, Entry, Event, Snapshot
from baguarun.elastic.membership.suspicion import Complaint
from baguarun.elastic.membership.view import CurrentWorld, Node, Report, View


@dataclass
class Pulse:
    """How well this agent itself is connected: kept by the session, read by the leader."""

    renewed_s: float
    """Last renewal of the lease."""
    gap_s: float = float("-inf")
    """End of the last time without renewals."""

    def renew(self, now_s: float, settings: MembershipSettings) -> None:
        if now_s - self.renewed_s > settings.gap_s:
            self.gap_s = now_s
        self.renewed_s = now_s

    def last_gap_s(self, now_s: float, settings: MembershipSettings) -> float:
        """When the last gap ended; now, if we are in one."""
        return now_s if now_s - self.renewed_s > settings.gap_s else self.gap_s


class Ledger:
    """Built from one snapshot of the job's keys, then fed with the events after it."""

    def __init__(self, keys: JobKeys, spec: JobSpec, snapshot: Snapshot, now_s: float) -> None:
        self.spec = spec
        """Of the running job; the leader's own if the store has none."""
        self.spec_stored = False
        self._spec_revision = 0
        self.world: CurrentWorld | None = None
        self.net_secret = ""
        """The job's, from its newest World or from who has run in one; nothing is decided by it."""
        self.events: tuple[Happening, ...] = ()
        """What happened last; nothing is decided by it."""
        self._keys = keys
        self._nodes: dict[str, Node] = {}
        self._strangers: set[str] = set()
        self._told: set[str] = set()
        self._reports: dict[str, Report] = {}
        self._complaints: dict[str, Complaint] = {}
        """By what follows the generation in their keys."""
        self._lost: set[str] = set()
        self._unheard: set[str] = set()
        self.alive: dict[str, str] = {}
        """What suspects have written back, by node id."""
        self._done: set[str] = set()
        self._left: set[str] = set()
        self._gone: set[str] = set()
        self._dismissed: set[str] = set()
        self._invited: set[str] = set()
        self._desired: int | None = None
        self._stop: StopRequest | None = None
        self._ended_revision: int | None = None
        self._newcomer_s = now_s
        self._loss_s = now_s
        self._first_loss_s = now_s
        self._short_s: float | None = None
        self._took_over_s = now_s
        self._load(snapshot, now_s)
        self._inherited = False

    # -- reading

    def view(self, now_s: float, gap_s: float) -> View:
        """The moment as `decide` sees it. It shares memory with the ledger: use it before the next change."""
        if len(self._nodes) - len(self._strangers) >= self.spec.min_nodes:
            self._short_s = None
        elif self._short_s is None:
            self._short_s = now_s
        return View(
            spec=self.spec,
            nodes=MappingProxyType(self._nodes),
            strangers=frozenset(self._strangers),
            told=frozenset(self._told),
            world=self.world,
            reports=tuple(self._reports.values()),
            time_s=time.time(),
            complaints=tuple(c for c in self._complaints.values() if c.by is Witness.WORKER),
            silent=self.accused | self._lost,
            unheard=frozenset(self._unheard),
            done=frozenset(self._done),
            left=frozenset(self._left),
            desired=self._desired,
            dismissed=frozenset(self._dismissed),
            invited=frozenset(self._invited),
            stop=self._stop,
            ended_revision=self._ended_revision,
            inherited=self._inherited,
            newcomer_s=self._newcomer_s,
            loss_s=self._loss_s,
            first_loss_s=self._first_loss_s,
            short_s=now_s if self._short_s is None else self._short_s,
            gap_s=gap_s,
            took_over_s=self._took_over_s,
        )

    # -- what the leader did

    def published(self, record: WorldRecord, members: tuple[Member, ...]) -> None:
        self.world = _current(record, members, live=False, acked=0)
        self.net_secret = record.net_secret
        self._reports.clear()
        self._complaints.clear()
        self._lost.clear()
        self._unheard.clear()
        self._done.clear()
        self._left.clear()
        self._gone.clear()
        self._told -= {member.node_id for member in members}
        # Who loses its place is asked again.
        self._invited -= {member.node_id for member in members}

    def went_live(self) -> None:
        assert self.world is not None
        self.world = replace(self.world, live=True)

    def halted(self) -> None:
        assert self.world is not None
        self.world = replace(self.world, halted=True)

    def counted(self, *, acked: int | None = None, checked: int | None = None) -> None:
        """Take over the number of acknowledgements or signs of life."""
        assert self.world is not None
        if acked is not None:
            self.world = replace(self.world, acked=acked)
        if checked is not None:
            self.world = replace(self.world, checked=checked)

    def told(self, node_ids: Iterable[str]) -> None:
        self._told.update(node_ids)

    def dismissed(self, node_ids: Iterable[str]) -> None:
        self._dismissed.update(node_ids)

    def invited(self, node_ids: Iterable[str]) -> None:
        self._invited.update(node_ids)

    def ended(self, revision: int) -> None:
        self._ended_revision = revision

    def inherit(self, leader_id: str) -> None:
        """The leader came to a job without nodes: what is older than it belongs to an earlier run."""
        leader = self._nodes.get(leader_id)
        if leader is None:
            return
        newest = self._spec_revision if self.spec_stored else leader.create_revision
        if self.world is not None:
            newest = max(member.create_revision for member in self.world.members)
        self._inherited = newest < leader.create_revision and all(
            node.create_revision >= leader.create_revision for node in self._nodes.values()
        )

    @property
    def accused(self) -> frozenset[str]:
        """Registered members whom probes accuse."""
        members = {member.node_id for member in self.world.members} if self.world else set()
        probes = (c.blamed for c in self._complaints.values() if c.by is Witness.PROBE)
        return frozenset(n for blamed in probes for n in blamed if n in members and n in self._nodes)

    def accusers(self, node_id: str) -> tuple[str, ...]:
        """Whose probes accuse that node."""
        of = (c for c in self._complaints.values() if c.by is Witness.PROBE and node_id in c.blamed)
        return tuple(sorted(complaint.node_id for complaint in of))

    def node(self, node_id: str) -> Node:
        """A registered node."""
        return self._nodes[node_id]

    def name_of(self, node_id: str) -> str:
        """What people call a member; it may have gone."""
        members = self.world.members if self.world else ()
        return next((member.name for member in members if member.node_id == node_id), node_id)

    def acquitted(self, node_id: str, *, unheard: bool = False) -> None:
        """Probes' complaints about that node are void: it has answered, if only through the store."""
        if unheard:
            self._unheard.add(node_id)
        for accuser in self.accusers(node_id):
            del self._complaints[f"{accuser}/{node_id}"]

    def expelled(self, node_id: str) -> None:
        """That node is lost for sure; its registration goes."""
        self.acquitted(node_id)
        self._lost.add(node_id)

    @property
    def generation(self) -> int:
        """Of the newest World, 0 before the first."""
        return self.world.generation if self.world is not None else 0

    @property
    def gone(self) -> frozenset[str]:
        """Nodes that vanished since the last World was published: their rows are rubbish."""
        return frozenset(self._gone)

    def is_invited(self, node_id: str) -> bool:
        """Whether a node was asked to start newcomers and has had no place since."""
        return node_id in self._invited

    def is_stranger(self, node_id: str) -> bool:
        """Whether a registered node wants to run another job."""
        return node_id in self._strangers

    def summary_of(self, node_id: str) -> str:
        """What a registered node wants to run."""
        return self._nodes[node_id].record.summary

    # -- what the store said

    def apply(self, event: Event, now_s: float) -> None:
        """Take in one change of `nodes/`, `suspect/` or the reports, `stop` or `desired`."""
        key = event.entry.key
        if key.startswith(self._keys.suspects):
            self._read_suspicion(event.entry, now_s, gone=event.change is Change.DELETE)
        elif not key.startswith(self._keys.nodes):
            if event.change is Change.PUT:
                self._read(event.entry, now_s)
        elif event.change is Change.PUT:
            self._add_node(event.entry, now_s)
        else:
            self._drop_node(key.removeprefix(self._keys.nodes), now_s)

    def _add_node(self, entry: Entry, now_s: float) -> None:
        node_id = entry.key.removeprefix(self._keys.nodes)
        record = NodeRecord.from_json(entry.value)
        known = self._nodes.get(node_id)
        if known is None or known.create_revision != entry.create_revision:
            self._newcomer_s = now_s
            self._left.discard(node_id)
            self._gone.discard(node_id)
        elif not set(known.record.state.workers).issuperset(record.state.workers):
            self._newcomer_s = now_s
        self._nodes[node_id] = Node(node_id, entry.create_revision, record)
        if record.state.failure is not None:
            self._note_failure(node_id, record.state.failure, entry.mod_revision, now_s)
        if record.digest != self.spec.digest:
            self._strangers.add(node_id)
        else:
            self._strangers.discard(node_id)
            if record.past is not None and not self.net_secret:
                self.net_secret = record.past.net_secret

    def _drop_node(self, node_id: str, now_s: float) -> None:
        if self._nodes.pop(node_id, None) is None:
            return
        self._strangers.discard(node_id)
        self._told.discard(node_id)
        self._dismissed.discard(node_id)
        self._invited.discard(node_id)
        self._gone.add(node_id)
        if not self._anyone_missing(but=node_id):
            self._first_loss_s = now_s
        self._loss_s = now_s

    def _anyone_missing(self, but: str) -> bool:
        members = self.world.members if self.world else ()
        return any(m.node_id not in self._nodes and m.node_id != but for m in members)

    def _read(self, entry: Entry, now_s: float) -> None:
        keys, key = self._keys, entry.key
        if key.startswith(keys.errors):
            self._read_error(key.removeprefix(keys.errors), entry, now_s)
        elif key.startswith(keys.dones):
            if self.world and generation_from_json(entry.value) == self.world.generation:
                self._done.add(key.removeprefix(keys.dones))
        elif key.startswith(keys.leaves):
            self._left.add(key.removeprefix(keys.leaves))
        elif key.startswith(keys.suspects):
            self._read_suspicion(entry, now_s)
        elif key.startswith(keys.alive):
            self.alive[key.removeprefix(keys.alive)] = entry.value.decode()
        elif key == keys.stop:
            self._stop = StopRequest.from_json(entry.value)
        elif key == keys.desired:
            self._desired = desired_from_json(entry.value)

    def _read_suspicion(self, entry: Entry, now_s: float, *, gone: bool = False) -> None:
        generation, _, who = entry.key.removeprefix(self._keys.suspects).partition("/")
        if self.world is None or int(generation) != self.world.generation:
            return
        if gone:
            self._complaints.pop(who, None)
            return
        found = Suspicion.from_json(entry.value)
        seen_s = self._complaints[who].seen_s if who in self._complaints else now_s
        self._complaints[who] = Complaint(
            who.split("/")[0], found.blamed, found.by, found.reason, seen_s, found.silence
        )

    def _read_error(self, node_id: str, entry: Entry, now_s: float) -> None:
        self._note_failure(node_id, FailureReport.from_json(entry.value), entry.mod_revision, now_s)

    def _note_failure(self, node_id: str, report: FailureReport, revision: int, now_s: float) -> None:
        world = self.world
        if world is None or report.failure.generation != world.generation:
            return
        if all(member.node_id != node_id for member in world.members):
            return
        known = self._reports.get(node_id)
        if known is None or known.retry_free:
            seen_s = known.seen_s if known else now_s
            self._reports[node_id] = Report(node_id, report.failure, report.retry_free, revision, seen_s)

    def _load(self, snapshot: Snapshot, now_s: float) -> None:
        keys = self._keys
        by_key = {entry.key: entry for entry in snapshot.entries}
        if keys.spec in by_key:
            self.spec = spec_from_json(by_key[keys.spec].value)
            self.spec_stored = True
            self._spec_revision = by_key[keys.spec].mod_revision
        if keys.outcome in by_key:
            self._ended_revision = by_key[keys.outcome].create_revision
        records = [WorldRecord.from_json(e.value) for e in snapshot.entries if e.key.startswith(keys.worlds)]
        if records:
            record = max(records, key=lambda record: record.generation)
            members = members_from_json(by_key[f"{keys.members}{record.generation}"].value)
            live = f"{keys.lives}{record.generation}" in by_key
            halted = f"{keys.halts}{record.generation}" in by_key
            self.world = replace(_current(record, members, live=live, acked=0), halted=halted)
            self.net_secret = record.net_secret
        if keys.events in by_key:
            self.events = events_from_json(by_key[keys.events].value)
        for entry in snapshot.entries:
            if entry.key.startswith(keys.nodes):
                self._add_node(entry, now_s)
            else:
                self._read(entry, now_s)
        for entry in snapshot.entries:
            if entry.key.startswith(keys.rows):
                self._load_row(entry.key.removeprefix(keys.rows).split("/")[0], entry.value)

    def _load_row(self, node_id: str, value: bytes) -> None:
        """What an earlier leader wrote to one node."""
        if node_id not in self._nodes:
            self._gone.add(node_id)
            return
        row = parse_row(value)
        if isinstance(row, Word) and row.order is Order.LEAVE:
            self._dismissed.add(node_id)
        elif isinstance(row, Word) and row.order is Order.START_NEWCOMERS:
            self._invited.add(node_id)


def _current(record: WorldRecord, members: tuple[Member, ...], *, live: bool, acked: int) -> CurrentWorld:
    return CurrentWorld(
        generation=record.generation,
        token=record.token,
        members=members,
        live=live,
        acked=acked,
        checked=None,
        restart_count=record.restart_count,
        charged=record.charged,
        free_retries=record.free_retries,
        in_place=record.in_place,
        polite=record.polite,
        streak=record.streak,
        broken=record.broken,
    )
