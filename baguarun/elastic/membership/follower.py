"""Where this node stands: turns what the store says to it into events for the launcher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baguarun.contract import World
from baguarun.elastic.membership.events import (
    Dismissed,
    Expelled,
    Finished,
    Halted,
    Invited,
    MembershipEvent,
    Prepare,
    Start,
    Waiting,
)
from baguarun.elastic.membership.job import JobSpec
from baguarun.elastic.membership.keys import JobKeys
from baguarun.elastic.membership.records import (
    HaltRecord,
    Live,
    Order,
    Outcome,
    Past,
    Row,
    Word,
    WorldRecord,
    parse_row,
)
from baguarun.elastic.membership.store import Entry
from baguarun.errors import UsageError


@dataclass(frozen=True)
class Place:
    """Our place in a World."""

    record: WorldRecord
    row: Row
    world_value: bytes
    """The World's key as it lies in the store: as long as it is there, the World is the newest."""

    @property
    def generation(self) -> int:
        return self.record.generation

    def past(self) -> Past:
        return Past(
            generation=self.record.generation,
            token=self.record.token,
            node_rank=self.row.node_rank,
            num_nodes=self.record.num_nodes,
            restart_count=self.record.restart_count,
            net_secret=self.record.net_secret,
        )

    def world(self, spec: JobSpec, master_port: int | None) -> World:
        return World(
            job_id=spec.job_id,
            generation=self.record.generation,
            node_rank=self.row.node_rank,
            num_nodes=self.record.num_nodes,
            first_rank=self.row.first_rank,
            local_world_size=self.row.slots,
            world_size=self.record.world_size,
            master_addr=self.record.master_addr,
            master_port=master_port or 0,
            restart_count=self.record.restart_count,
            max_restarts=spec.max_restarts,
            net_secret=self.record.net_secret,
            local_ranks=tuple(process.local_rank for process in self.row.workers),
            in_place=self.record.in_place,
        )


class Follower:
    """Fed with entries of `all/` and of our row, in any order, repeated or not; emits each event once."""

    def __init__(self, spec: JobSpec, node_id: str, emit: Callable[[MembershipEvent], None]) -> None:
        self.place: Place | None = None
        """In the newest World; None for a newcomer."""
        self.seen = 0
        """Generation of the newest World heard of; never below `started`."""
        self.started = 0
        """Generation of the last `Start`."""
        self.asked: int | None = None
        """Generation for which the leader wants a sign of life."""
        self.suspected: str | None = None
        """What the leader wants to have written back, as a sign that this very node is alive."""
        self.finished = False
        self._spec = spec
        self._keys = JobKeys(spec.job_id)
        self._row_prefix = f"{self._keys.rows}{node_id}/"
        self._emit = emit
        self._rows: dict[int, Row] = {}
        self._world: tuple[WorldRecord, bytes] | None = None
        self._live: Live | None = None
        self._halt: HaltRecord | None = None
        self._halted = 0
        """Generation of the last World that was halted."""
        self._waiting = ""
        self._dismissed = False

    def read(self, entry: Entry) -> None:
        """Take in one entry. Raises `UsageError` if the leader refuses us."""
        key, keys = entry.key, self._keys
        if key.startswith(self._row_prefix):
            self._read_row(entry.value)
        elif key.startswith(keys.worlds):
            self._read_world(entry.value)
        elif key.startswith(keys.lives):
            self._live = Live.from_json(entry.value)
            self._start()
        elif key.startswith(keys.halts):
            self._halt = HaltRecord.from_json(entry.value)
            self._stop_if_halted()
        elif key.startswith(keys.asks):
            self.asked = int(key.removeprefix(keys.asks))
        elif key == keys.note:
            self.wait(entry.value.decode())
        elif key == keys.outcome:
            outcome = Outcome.from_json(entry.value)
            self.finished = True
            self._emit(_finished(outcome))

    @property
    def unplaced(self) -> bool:
        """A newer World is there, and we, a member of the last, do not see our row in it (yet)."""
        return self.place is not None and self.place.generation < self.seen

    def expel(self, reason: str) -> None:
        """Our place is gone; from here on we are a newcomer."""
        self.place = None
        self._emit(Expelled(reason))

    def wait(self, reason: str) -> None:
        if reason != self._waiting:
            self._waiting = reason
            self._emit(Waiting(reason))

    def _read_row(self, value: bytes) -> None:
        row = parse_row(value)
        if isinstance(row, Row):
            self._rows[row.generation % 2] = row
            self._match()
        else:
            self._obey(row)

    def _obey(self, word: Word) -> None:
        match word.order:
            case Order.REFUSED:
                raise UsageError(word.text)
            case Order.ANSWER:
                self.suspected = word.text
            case Order.STAND_BY:
                self.wait(word.text)
            case Order.START_NEWCOMERS:
                if self.place is None:
                    self._emit(Invited(word.generation, word.net_secret))
            case Order.LEAVE:
                if not self._dismissed:
                    self._dismissed = True
                    self._emit(Dismissed(word.text))

    def _read_world(self, value: bytes) -> None:
        record = WorldRecord.from_json(value)
        # A newcomer may have seen the last World of a run that is history by now; its numbers start again.
        if record.generation > (self.seen if self.place is not None else self.started):
            self.seen = record.generation
            self._world = (record, value)
            self._match()

    def _match(self) -> None:
        if self._world is None:
            return
        record, value = self._world
        row = self._rows.get(record.generation % 2)
        if row is None or (row.generation, row.token) != (record.generation, record.token):
            return
        if self.place is not None and self.place.generation == record.generation:
            return
        self.place = Place(record, row, value)
        self._waiting = ""
        self._emit(
            Prepare(
                record.generation,
                record.reason,
                in_place=record.in_place,
                polite=record.polite,
                workers=row.workers,
                leaving=row.leaving,
                net_secret=record.net_secret,
            )
        )
        self._start()

    def _start(self) -> None:
        if self.place is None or self._live is None:
            return
        generation = self.place.generation
        if self._live.token == self.place.record.token and generation > self.started:
            self.started = generation
            self._emit(Start(self.place.world(self._spec, self._live.master_port)))
            self._stop_if_halted()

    def _stop_if_halted(self) -> None:
        place, halt = self.place, self._halt
        if place is None or halt is None or place.record.token != halt.token:
            return
        if self.started == place.generation > self._halted:
            self._halted = place.generation
            self._emit(Halted(place.generation + 1, halt.reason))


def _finished(outcome: Outcome) -> Finished:
    return Finished(
        outcome.success,
        outcome.failure,
        outcome.reason,
        outcome.exit_code,
        stopped=outcome.stopped,
        at_once=outcome.at_once,
    )
