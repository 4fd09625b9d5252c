"""The leading agent: watches, builds the `View`, and carries `decide`'s decisions out under fencing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baguarun.elastic.membership.actions import (
    Check,
    Decision,
    Dismiss,
    Finish,
    GoLive,
    Halt,
    Invite,
    Publish,
    Reset,
    Tell,
    Wait,
)
from baguarun.elastic.membership.decide import decide
from baguarun.elastic.membership.decide_in_place import awaited_nodes, decide_in_place
from baguarun.elastic.membership.examiner import Examiner
from baguarun.elastic.membership.job import JobSpec
from baguarun.elastic.membership.keys import JobKeys
from baguarun.elastic.membership.ledger import Ledger, Pulse
from baguarun.elastic.membership.new_world import members_of, record_of, rows_of
from baguarun.elastic.membership.records import (
    HaltRecord,
    Happening,
    Live,
    Order,
    Outcome,
    Word,
    events_to_json,
    members_to_json,
    port_from_json,
    spec_to_json,
)
from baguarun.elastic.membership.settings import MembershipSettings
from baguarun.elastic.membership.store import Compare, Delete, Put, Store, TxnResult, WatchRange
from baguarun.elastic.membership.view import View
from baguarun.elastic.membership.waiting import within
from baguarun.errors import StoreLostError

log = logging.getLogger("baguarun.membership")

MAX_OPERATIONS = 128
"""Operations in one transaction (etcd's default limit)."""
GATHER_S = 0.005
"""At least this between two looks at the same question, so that a burst of events costs one look."""
KEPT_EVENTS = 20
"""So much of the job's history is kept in the store, for `baguarun status`."""
SETTLED_S = 0.5
"""A reason to wait that lasts this long is worth telling people."""


class _ReadAgain(Exception):
    """A fenced write was refused, or all was reset: read the store, and see whether we still lead."""


@dataclass(frozen=True)
class Badge:
    """Who leads: `token` is the value of the leader key."""

    node_id: str
    token: str
    joined: bool
    """The leader key came with our joining (no leader was there), not by election."""


class Leader:
    """Leads until somebody else does. Threads: the session's loop."""

    def __init__(
        self,
        store: Store,
        spec: JobSpec,
        settings: MembershipSettings,
        badge: Badge,
        pulse: Pulse,
        examiner: Examiner | None = None,
    ) -> None:
        """`examiner`: where nodes probe each other."""
        self._store = store
        self._spec = spec
        self._settings = settings
        self._badge = badge
        self._pulse = pulse
        self._examiner = examiner
        self._keys = JobKeys(spec.job_id)
        self._wake = asyncio.Event()
        self._now = asyncio.get_running_loop().time
        self._looked_s = 0.0
        self._asked_s = 0.0
        self._reason = ""
        self._reason_since_s = 0.0
        self._said: tuple[str, float] | None = None
        self._resynced = False
        self._awaited: frozenset[str] = frozenset()

    def nudge(self) -> None:
        """Something that the leader counts may have changed."""
        self._wake.set()

    @property
    def awaited_nodes(self) -> frozenset[str]:
        """In place: nodes that were asked to start workers and have yet to be taken in."""
        return self._awaited

    async def run(self) -> None:
        """Lead; returns when the leader key is no longer ours."""
        while True:
            try:
                await self._lead()
                return
            except _ReadAgain:
                log.debug("%s: reading the store again", self._spec.job_id)
            except StoreLostError as error:
                log.info("leader on node %s: %s", self._badge.node_id, error)
                await asyncio.sleep(self._settings.retry_s)

    async def _lead(self) -> None:
        keys = self._keys
        snapshot = await self._store.list(keys.root)
        if not any(e.key == keys.leader and e.value == self._badge.token.encode() for e in snapshot.entries):
            return
        ledger = Ledger(keys, self._spec, snapshot, self._now())
        if self._badge.joined:
            ledger.inherit(self._badge.node_id)
        if not ledger.spec_stored:
            await self._fenced(self._introduction())
        self._resynced = False
        watcher = asyncio.create_task(self._watch(ledger, snapshot.revision + 1))
        watcher.add_done_callback(lambda _: self._wake.set())
        try:
            while not self._resynced:
                if watcher.done():
                    watcher.result()
                    return
                await self._step(ledger)
            raise _ReadAgain
        finally:
            watcher.cancel()
            # Not `await watcher`: its cancellation could not be told from ours.
            await asyncio.wait((watcher,))

    async def _watch(self, ledger: Ledger, start_revision: int) -> None:
        keys = self._keys
        ranges = [WatchRange(keys.nodes, prefix=True)]
        ranges += [WatchRange(key, deletes=False) for key in (keys.stop, keys.desired)]
        ranges.append(WatchRange(keys.suspects, prefix=True))
        reports = (keys.errors, keys.dones, keys.leaves, keys.alive)
        ranges += [WatchRange(prefix, prefix=True, deletes=False) for prefix in reports]
        async for batch in self._store.watch(ranges, start_revision):
            now_s = self._now()
            for event in batch.events:
                ledger.apply(event, now_s)
            self._resynced |= batch.resynced
            self._wake.set()

    async def _step(self, ledger: Ledger) -> None:
        self._wake.clear()
        examine_s = await self._examine(ledger)
        now_s = self._looked_s = self._now()
        view = ledger.view(now_s, self._pulse.last_gap_s(now_s, self._settings))
        self._awaited = awaited_nodes(view) if self._spec.in_place else frozenset()
        decide_now = decide_in_place if self._spec.in_place else decide
        decision = decide_now(now_s, view, self._settings)
        if decision.reason != self._reason:
            self._reason, self._reason_since_s = decision.reason, now_s
        action = decision.action
        if isinstance(action, Wait):
            await self._wait(action, view, ledger, examine_s)
            return
        log.info("%s: %s", self._spec.job_id, decision.reason)
        if isinstance(action, Publish):
            await self._publish(action, decision.reason, ledger)
        elif isinstance(action, GoLive):
            await self._go_live(action, ledger)
        elif isinstance(action, Halt):
            await self._halt(action, decision.reason, ledger)
        elif isinstance(action, Check):
            await self._fenced([Put(f"{self._keys.asks}{action.generation}", b"")])
            ledger.counted(checked=0)
            self._asked_s = now_s
        elif isinstance(action, Tell):
            await self._tell(action, decision.reason, ledger)
        elif isinstance(action, Dismiss):
            await self._dismiss(action, decision.reason, ledger)
        elif isinstance(action, Invite):
            await self._invite(action, decision.reason, ledger)
        elif isinstance(action, Reset):
            await self._reset()
        else:
            await self._finish(action, decision, ledger)

    async def _examine(self, ledger: Ledger) -> float | None:
        """Hear those whom probes accuse; returns after how many seconds to look at them again."""
        if self._examiner is None:
            return None
        again_s, expelled = await self._examiner.step(ledger, self._fenced)
        for node_id in expelled:
            reason = f"{ledger.name_of(node_id)} answers neither its neighbours nor the store"
            log.warning("%s: %s", self._spec.job_id, reason)
            await self._fenced([self._note(ledger, ledger.generation, reason)])
        return again_s

    # -- waiting

    async def _wait(self, wait: Wait, view: View, ledger: Ledger, examine_s: float | None) -> None:
        now_s = self._now()
        times = [] if wait.until_s is None else [wait.until_s]
        if examine_s is not None:
            times.append(now_s + examine_s)
        counting = _is_counting(view)
        if counting:
            # At most a tenth is added to what has been waited already.
            times.append(now_s + min(max((now_s - self._asked_s) / 10, 0.02), 0.25))
        say = (self._reason, view.newcomer_s)
        if say != self._said:
            times.append(self._reason_since_s + SETTLED_S)
        if times:
            with contextlib.suppress(asyncio.TimeoutError):
                await within(max(min(times) - now_s, 0.0), self._wake.wait())
        else:
            await self._wake.wait()
        if self._wake.is_set():
            await asyncio.sleep(max(self._looked_s + GATHER_S - self._now(), 0.0))
        if say != self._said and self._now() >= self._reason_since_s + SETTLED_S:
            await self._say(say, wait.announce)
        if counting:
            await self._count(ledger)

    async def _say(self, say: tuple[str, float], announce: bool) -> None:
        if self._said is None or self._said[0] != say[0]:
            log.info("%s: %s", self._spec.job_id, say[0])
        if announce:
            await self._fenced([Put(self._keys.note, say[0].encode())])
        self._said = say

    async def _count(self, ledger: Ledger) -> None:
        world = ledger.world
        assert world is not None
        if world.live:
            ledger.counted(checked=await self._store.count(self._keys.check(world.generation)))
        else:
            ledger.counted(acked=await self._store.count(self._keys.ack(world.generation)))

    # -- acting

    async def _publish(self, action: Publish, reason: str, ledger: Ledger) -> None:
        keys = self._keys
        token = secrets.token_hex(4)
        rows = rows_of(action, token)
        writes: list[Put | Delete] = []
        writes += [Put(keys.row(node_id, row.generation), row.to_json()) for node_id, row in rows.items()]
        writes += [Delete(keys.word(node_id)) for node_id in rows if ledger.is_invited(node_id)]
        gone = (node_id for node_id in ledger.gone if node_id not in rows)
        writes += [Delete(f"{keys.rows}{node_id}/", prefix=True) for node_id in gone]
        chunks = [writes[i : i + MAX_OPERATIONS] for i in range(0, len(writes), MAX_OPERATIONS)]
        await asyncio.gather(*(self._fenced(chunk) for chunk in chunks))
        record = record_of(
            action,
            rows,
            token,
            reason=reason,
            formed_s=time.time(),
            # The same for the whole job: workers that survive a change of the World keep theirs.
            net_secret=ledger.net_secret or secrets.token_hex(16),
        )
        members = members_of(action, rows)
        world_key = f"{keys.worlds}{record.generation}"
        operations: list[Put | Delete] = [
            Put(world_key, record.to_json()),
            Put(f"{keys.members}{record.generation}", members_to_json(members)),
            self._note(ledger, record.generation, reason),
        ]
        if ledger.world is not None:
            operations += self._sweep(ledger.world.generation)
        await self._fenced(operations, Compare(world_key, exists=False))
        ledger.published(record, members)
        self._asked_s = self._now()

    def _sweep(self, generation: int) -> list[Delete]:
        """What the World before leaves behind; reports that come later are ignored by their generation."""
        keys = self._keys
        old = [f"{keys.worlds}{generation}", f"{keys.members}{generation}", keys.note]
        prefixes = [keys.lives, keys.halts, keys.asks, keys.acks, keys.checks, keys.errors, keys.dones]
        prefixes += [keys.leaves, keys.suspects, keys.alive]
        return [Delete(key) for key in old] + [Delete(prefix, prefix=True) for prefix in prefixes]

    async def _go_live(self, action: GoLive, ledger: Ledger) -> None:
        assert ledger.world is not None
        keys, generation = self._keys, action.generation
        ack = await self._store.get(keys.ack(generation, ledger.world.members[0].node_id))
        if ack is None:
            ledger.counted(acked=0)
            return
        live = Live(token=ledger.world.token, master_port=port_from_json(ack.value))
        await self._fenced([Put(f"{keys.lives}{generation}", live.to_json())])
        ledger.went_live()

    async def _halt(self, action: Halt, reason: str, ledger: Ledger) -> None:
        assert ledger.world is not None
        halt = HaltRecord(token=ledger.world.token, reason=reason)
        note = self._note(ledger, action.generation, reason)
        await self._fenced([Put(f"{self._keys.halts}{action.generation}", halt.to_json()), note])
        ledger.halted()

    async def _tell(self, action: Tell, reason: str, ledger: Ledger) -> None:
        order = Order.REFUSED if action.refused else Order.STAND_BY
        words = {
            node_id: self._refusal(ledger, node_id) if ledger.is_stranger(node_id) else reason
            for node_id in action.node_ids
        }
        await self._send_words(words, order)
        ledger.told(action.node_ids)

    async def _dismiss(self, action: Dismiss, reason: str, ledger: Ledger) -> None:
        # Before they hear of it: they may be gone, and forgotten, by the time that we know they heard.
        ledger.dismissed(action.node_ids)
        await self._fenced([self._note(ledger, ledger.generation, reason)])
        await self._send_words(dict.fromkeys(action.node_ids, reason), Order.LEAVE)

    async def _invite(self, action: Invite, reason: str, ledger: Ledger) -> None:
        ledger.invited(action.node_ids)
        word = Word(
            text=reason,
            order=Order.START_NEWCOMERS,
            generation=ledger.generation,
            net_secret=ledger.net_secret,
        )
        writes = [Put(self._keys.word(node_id), word.to_json()) for node_id in action.node_ids]
        for i in range(0, len(writes), MAX_OPERATIONS):
            await self._fenced(writes[i : i + MAX_OPERATIONS])

    async def _send_words(self, words: Mapping[str, str], order: Order) -> None:
        """`words` by node id."""
        writes = [
            Put(self._keys.word(node_id), Word(text=text, order=order).to_json())
            for node_id, text in words.items()
        ]
        for i in range(0, len(writes), MAX_OPERATIONS):
            await self._fenced(writes[i : i + MAX_OPERATIONS])

    def _refusal(self, ledger: Ledger, node_id: str) -> str:
        return (
            f"two jobs with one id: job {self._spec.job_id!r} runs `{ledger.spec.summary}`, "
            f"this node wants to run `{ledger.summary_of(node_id)}`; "
            "start all nodes with the same command and options, or choose another --job-id"
        )

    async def _reset(self) -> None:
        keys = self._keys
        prefixes = [keys.worlds, keys.lives, keys.halts, keys.asks, keys.rows, keys.members, keys.acks]
        prefixes += [keys.checks, keys.errors, keys.dones, keys.leaves, keys.suspects, keys.alive]
        operations: list[Put | Delete] = [Delete(prefix, prefix=True) for prefix in prefixes]
        operations += [Delete(key) for key in (keys.outcome, keys.note, keys.stop, keys.desired, keys.events)]
        await self._fenced([*operations, *self._introduction()])
        raise _ReadAgain

    def _introduction(self) -> list[Put]:
        return [Put(self._keys.spec, spec_to_json(self._spec)), Put(self._keys.listed, b"")]

    async def _finish(self, action: Finish, decision: Decision, ledger: Ledger) -> None:
        outcome = Outcome(
            success=action.success,
            failure=action.failure,
            reason=decision.reason,
            exit_code=action.exit_code,
            stopped=action.stop is not None,
            at_once=action.stop is not None and action.stop.at_once,
        )
        key = self._keys.outcome
        note = self._note(ledger, ledger.generation, f"{_verb(outcome)}: {decision.reason}")
        result = await self._fenced([Put(key, outcome.to_json()), note], Compare(key, exists=False))
        ledger.ended(result.revision)

    def _note(self, ledger: Ledger, generation: int, text: str) -> Put:
        """One more thing that happened. A write that is refused reads the ledger, and this, again."""
        ledger.events = (*ledger.events, Happening(time.time(), generation, text))[-KEPT_EVENTS:]
        return Put(self._keys.events, events_to_json(ledger.events))

    async def _fenced(self, operations: Sequence[Put | Delete], *compares: Compare) -> TxnResult:
        fence = Compare(self._keys.leader, value=self._badge.token.encode())
        result = await self._store.transact([fence, *compares], operations)
        if not result.succeeded:
            raise _ReadAgain
        return result


def _is_counting(view: View) -> bool:
    world = view.world
    if world is None or view.ended_revision is not None:
        return False
    return not world.live or world.checked is not None


def _verb(outcome: Outcome) -> str:
    if outcome.stopped:
        return "stopped"
    return "succeeded" if outcome.success else "failed"
