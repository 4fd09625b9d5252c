"""One node's membership in a job."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias, TypeVar

from baguarun.contract import Failure
from baguarun.elastic.membership.candidacy import Candidacy
from baguarun.elastic.membership.events import MembershipEvent, StoreBack, StoreLost
from baguarun.elastic.membership.expectation import Expectation
from baguarun.elastic.membership.follower import Follower, Place
from baguarun.elastic.membership.job import JobSpec, NodeOffer
from baguarun.elastic.membership.keys import JobKeys
from baguarun.elastic.membership.ledger import Pulse
from baguarun.elastic.membership.lookout import Identity
from baguarun.elastic.membership.probe import Probing
from baguarun.elastic.membership.records import (
    FailureReport,
    InPlaceState,
    NodeRecord,
    Past,
    Suspicion,
    Witness,
    generation_to_json,
    members_from_json,
    port_to_json,
)
from baguarun.elastic.membership.settings import MembershipSettings
from baguarun.elastic.membership.store import (
    Change,
    Compare,
    Delete,
    Put,
    PutIfAbsent,
    Store,
    TxnResult,
    WatchRange,
)
from baguarun.elastic.membership.stragglers import Pace, paces_from_json, paces_to_json
from baguarun.elastic.membership.waiting import first_of, within
from baguarun.errors import RejoinError, StoreLostError, StoreRefusedError, UsageError

log = logging.getLogger("baguarun.membership")
T = TypeVar("T")
Operation: TypeAlias = Put | PutIfAbsent | Delete

_FAREWELL_S = 3.0
"""How long a polite leave tries to reach the store before it goes without a word."""
_REVOKE_S = 1.0
"""The others know already that we go, or learn it when the lease ends: not worth a longer wait."""


class Session:
    """One node's membership. Threads: one asyncio loop, the store's."""

    def __init__(
        self,
        store: Store,
        spec: JobSpec,
        offer: NodeOffer,
        settings: MembershipSettings,
        prober: Probing | None = None,
    ) -> None:
        """`prober`: where neighbours ask each other for signs of life; the session stops it at its end."""
        self._store = store
        self._spec = spec
        self._offer = offer
        self._settings = settings
        self._keys = JobKeys(spec.job_id)
        self._node_key = self._keys.nodes + offer.node_id
        self._row_prefix = f"{self._keys.rows}{offer.node_id}/"
        self._queue: asyncio.Queue[MembershipEvent | None] = asyncio.Queue()
        self._follower = Follower(spec, offer.node_id, self._queue.put_nowait)
        self._prober = prober
        self._pulse = Pulse(0.0)
        self._candidacy = Candidacy(
            store, spec, settings, self._follower, self._pulse, self._patiently, prober
        )
        self._replacements, self._invited = (Expectation(settings.newcomers_expected_s) for _ in range(2))
        self._lease = 0
        self._leased_until_s = 0.0
        self._token = ""
        self._state = InPlaceState()
        self._record: NodeRecord | None = None
        self._check_lease = asyncio.Event()
        self._farewell = False
        self._ack: tuple[int, int | None] | None = None
        self._failed: tuple[int, bool] | None = None
        self._store_lost = False
        self._told_refusal = False
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()

    # -- for the launcher

    async def run(self) -> None:
        """Join, keep the lease, lead when it is our turn; returns after the outcome or `leave`.

        Raises `UsageError` (another job runs under this id, node id taken) and `StoreRefusedError`.
        """
        try:
            await first_of(self._belong(), self._stopping.wait())
        finally:
            self._ended.set()
            try:
                await self._depart()
            finally:
                if self._prober is not None:
                    self._prober.stop()
                self._queue.put_nowait(None)

    @property
    def events(self) -> AsyncIterator[MembershipEvent]:
        """What to do next, in order; ends when `run` returns or raises. For one reader."""
        return self._read_events()

    @property
    def lease_left_s(self) -> float:
        """For so long nobody can take this node for lost, whatever becomes of the store; 0 if it may be."""
        return max(0.0, self._leased_until_s - asyncio.get_running_loop().time())

    def expects_newcomers(self) -> bool:
        """In place: whether workers are likely to come soon that the next World takes in, as far as we know.
        Asked often; who takes too long is not expected any more."""
        now_s = asyncio.get_running_loop().time()
        place = self._follower.place
        is_short = place is not None and place.record.is_short
        found = self._replacements.see(place.generation if place and is_short else None, now_s)
        return self._invited.see(self._candidacy.awaited_nodes or None, now_s) or found

    async def acknowledge(self, generation: int, master_port: int | None) -> None:
        """Workers of older generations are gone; `master_port` is a free port here, used if we are node 0."""
        place = self._follower.place
        if place is None or place.generation != generation:
            return
        self._ack = (generation, master_port)
        await self._send_ack()

    async def report_failure(self, failure: Failure, *, retry_free: bool = False) -> None:
        """A worker failed; only the first failure of a generation counts. Returns when it is stored.

        `retry_free`: nobody's fault ("address in use"), the World is tried again without a charge.
        """
        place = self._follower.place
        if place is None or place.generation != failure.generation:
            return
        if self._failed in ((failure.generation, False), (failure.generation, retry_free)):
            return
        self._failed = (failure.generation, retry_free)
        report = FailureReport(failure=failure, retry_free=retry_free)
        await self._report(self._keys.errors + self._offer.node_id, report.to_json())

    async def report_state(self, state: InPlaceState) -> None:
        """In place: what has become of our workers. Returns when it is stored; calls must not overlap."""
        self._state = state
        is_refused = False
        while not self._ended.is_set():
            if self._lease and self._record is not None:
                record = replace(self._record, state=state)
                here = Compare(self._node_key, exists=True)
                write = Put(self._node_key, record.to_json(), self._lease)
                try:
                    if (await self._store.transact([here], [write])).succeeded:
                        return
                except StoreLostError as error:
                    log.warning("node %s: not reported yet: %s", self._offer.name, error)
                except StoreRefusedError as error:
                    # It has taken others of us: it is full, say, and will be mended while the workers train.
                    if not is_refused:
                        log.warning("node %s: not reported yet: %s", self._offer.name, error)
                    is_refused = True
                except RejoinError:
                    self._check_lease.set()
            # The record of the next registration says it, if ours is gone.
            await asyncio.sleep(self._settings.retry_s)

    async def report_paces(self, paces: Sequence[Pace]) -> None:
        """In place: how our workers' steps go. Given up at once when the store does not take it."""
        if self._lease and paces:
            key = self._keys.paces + self._offer.node_id
            with self._dispensable():
                await self._store.put(key, paces_to_json(paces), self._lease)

    async def read_paces(self) -> tuple[Pace, ...]:
        """Of all nodes; empty when the store does not tell."""
        found: tuple[Pace, ...] = ()
        with self._dispensable():
            snapshot = await self._store.list(self._keys.paces)
            found = tuple(pace for entry in snapshot.entries for pace in paces_from_json(entry.value))
        return found

    @contextlib.contextmanager
    def _dispensable(self) -> Iterator[None]:
        """Around calls without which the job goes on as well; a refusal is told once."""
        try:
            yield
        except (StoreLostError, RejoinError):
            pass
        except StoreRefusedError as error:
            if not self._told_refusal:
                self._told_refusal = True
                log.warning("node %s: nobody is told how steps go: %s", self._offer.name, error)

    async def report_done(self, generation: int) -> None:
        """All local workers of that generation exited 0. Returns when it is stored."""
        place = self._follower.place
        if place is None or place.generation != generation:
            return
        await self._report(self._keys.dones + self._offer.node_id, generation_to_json(generation))

    async def leave(self, reason: str) -> None:
        """Go politely: the others re-form at once. Returns after `run` has let go of everything."""
        if self._lease and not self._ended.is_set():
            farewell: list[Operation] = [
                Delete(self._node_key),
                Put(self._keys.leaves + self._offer.node_id, reason.encode()),
            ]
            here = Compare(self._node_key, exists=True)
            self._farewell = True
            try:
                await within(_FAREWELL_S, self._store.transact([here], farewell))
            except (StoreLostError, asyncio.TimeoutError) as error:
                log.info("leaving without a word, the lease will tell: %s", error)
        self._stopping.set()
        await self._ended.wait()

    async def wait_until_alone(self, timeout_s: float) -> bool:
        """Wait, after `run` has returned, until no other node is registered; False if some still are."""
        try:
            await within(timeout_s, self._until_alone())
        except asyncio.TimeoutError:
            return False
        return True

    async def report_suspicion(
        self, generation: int, rank: int | None, reason: str, *, silence: bool
    ) -> None:
        """A worker's communication broke and no news of the membership came; `rank` is whom it blames.

        `silence`: it heard nothing from there, rather than that the connection broke. Returns when it is
        stored. The leader decides what becomes of it.
        """
        place = self._follower.place
        if place is None or place.generation != generation:
            return
        blamed: list[str] = []
        entry = await self._patiently(lambda: self._store.get(f"{self._keys.members}{generation}"))
        first_rank = 0
        for member in members_from_json(entry.value) if entry is not None else ():
            if rank is not None and first_rank <= rank < first_rank + member.slots:
                blamed.append(member.node_id)
            first_rank += member.slots
        suspicion = Suspicion(blamed=tuple(blamed), by=Witness.WORKER, reason=reason, silence=silence)
        await self._report(self._keys.suspect(generation, self._offer.node_id), suspicion.to_json())

    def _expel(self, reason: str) -> None:
        # Who comes back without a place has no workers any more, whenever the launcher gets to it.
        self._state = InPlaceState(steps=self._state.steps, stepped=self._state.stepped)
        self._follower.expel(reason)

    # -- belonging: register, stay, register again

    async def _belong(self) -> None:
        again = False
        while True:
            try:
                revision = await self._register()
                if again:
                    revision = await self._catch_up()
                if not self._follower.finished:
                    candidacy = self._candidacy
                    work = (self._keep_lease(), self._follow(revision + 1))
                    await first_of(*work, candidacy.lead(), candidacy.look_out())
                return
            except RejoinError as error:
                log.warning("node %s: %s; registering again", self._offer.name, error)
                self._lease, self._leased_until_s = 0, 0.0
                # Ours may not be the only lease that ended: if we lead, the others get time to come back.
                self._pulse.gap_s = asyncio.get_running_loop().time()
                again = True

    async def _register(self) -> int:
        """Put our key; returns the revision. Our place survives if its World is still the newest."""
        place = self._follower.place
        newest = place
        clash_since_s: float | None = None
        while True:
            if not self._lease:
                grant = partial(self._store.grant_lease, self._settings.lease_ttl_s)
                self._lease = await self._patiently(grant)
                self._token = secrets.token_hex(8)
                self._renewed()
            me = Identity(self._offer.node_id, self._token, self._lease)
            result = await self._try_to_join(place.past() if place else None, newest)
            if result.succeeded:
                self._candidacy.register(me, leads=result.created[0])
                return result.revision
            entry = await self._patiently(lambda: self._store.get(self._node_key))
            if entry is not None and NodeRecord.from_json(entry.value).token == self._token:
                # The transaction was applied and only its reply was lost.
                leads = await self._patiently(partial(self._candidacy.holds_leader_key, me))
                self._candidacy.register(me, leads=leads)
                return entry.create_revision
            if entry is not None:
                clash_since_s = await self._wait_for_id(clash_since_s)
            elif newest is not None:
                # Our World is gone: replaced by another, or together with all the store's data.
                newest = None
                worlds = await self._patiently(lambda: self._store.list(self._keys.worlds))
                if worlds.entries:
                    self._expel("the other nodes went on without this one while its lease was gone")
                    place = None

    async def _try_to_join(self, past: Past | None, newest: Place | None) -> TxnResult:
        """Put our key and, if there is none, the leader's; only while `newest` is the newest World."""
        compares = [Compare(self._node_key, exists=False)]
        if newest is not None:
            compares.append(Compare(f"{self._keys.worlds}{newest.generation}", value=newest.world_value))
        probe = (self._prober.port, self._prober.key) if self._prober is not None else (0, "")
        seen = self._follower.seen
        record = NodeRecord.of(self._offer, self._spec, self._token, seen, past, self._state, probe)
        self._record = record
        operations: list[Operation] = [
            Put(self._node_key, record.to_json(), self._lease),
            PutIfAbsent(self._keys.leader, self._token.encode(), self._lease),
        ]
        return await self._patiently(partial(self._store.transact, compares, operations))

    async def _wait_for_id(self, since_s: float | None) -> float:
        """Somebody is registered under our id: an earlier life of ours, whose lease ends, or a double."""
        now_s = asyncio.get_running_loop().time()
        since_s = now_s if since_s is None else since_s
        if now_s - since_s > self._settings.same_id_s:
            raise UsageError(
                f"node id {self._offer.node_id!r}: another living agent of job {self._spec.job_id!r} has it; "
                "want one agent per id, stop the other one or choose another job id"
            )
        self._follower.wait(f"an earlier agent still holds the node id {self._offer.node_id}")
        await asyncio.sleep(self._settings.retry_s)
        await self._patiently(lambda: self._store.keep_alive(self._lease))
        return since_s

    async def _catch_up(self) -> int:
        """Read all that concerns us afresh; returns the revision from which events are news."""
        snapshot = await self._patiently(lambda: self._store.list(self._keys.all))
        # Rows last: each is written before its World, so that of a World we have seen is there by now.
        rows = await self._patiently(lambda: self._store.list(self._row_prefix))
        for entry in (*rows.entries, *snapshot.entries):
            self._follower.read(entry)
        self._candidacy.note_leader(any(entry.key == self._keys.leader for entry in snapshot.entries))
        await self._answer()
        await self._send_ack()
        return snapshot.revision

    async def _keep_lease(self) -> None:
        """Renew for ever; a store that is away is waited for, a lease that has ended raises `RejoinError`."""
        loop = asyncio.get_running_loop()
        interval_s = self._settings.keepalive_interval_s
        pause_s = interval_s * random.uniform(0.5, 1.0)
        while True:
            timer = loop.call_later(pause_s, self._check_lease.set)
            try:
                await self._check_lease.wait()
            finally:
                timer.cancel()
            self._check_lease.clear()
            await self._patiently(self._renew)
            self._renewed()
            pause_s = interval_s

    async def _renew(self) -> None:
        asked_s = asyncio.get_running_loop().time()
        self._leased_until_s = asked_s + await self._store.keep_alive(self._lease)

    async def _follow(self, start_revision: int) -> None:
        ranges = [WatchRange(self._keys.all, prefix=True), WatchRange(self._row_prefix, True, False)]
        if self._prober is not None:
            ranges.append(WatchRange(self._node_key))
        async for batch in self._store.watch(ranges, start_revision):
            if batch.resynced:
                await self._catch_up()
            for event in batch.events:
                if event.entry.key == self._keys.leader:
                    self._candidacy.note_leader(event.change is Change.PUT)
                elif event.entry.key == self._node_key:
                    self._note_registration(event.change)
                elif event.change is Change.PUT:
                    self._follower.read(event.entry)
            await self._answer()
            if self._follower.finished:
                return

    def _note_registration(self, change: Change) -> None:
        if change is Change.DELETE and not self._farewell:
            raise RejoinError("the others took this node for lost: it did not answer them")

    async def _answer(self) -> None:
        """What the events just read ask of us."""
        follower = self._follower
        text, follower.suspected = follower.suspected, None
        if text is not None:
            key = self._keys.alive + self._offer.node_id
            await self._patiently(lambda: self._store.put(key, text.encode(), self._lease))
        if follower.unplaced:
            rows = await self._patiently(lambda: self._store.list(self._row_prefix))
            for entry in rows.entries:
                follower.read(entry)
            if follower.unplaced:
                self._expel(f"World {follower.seen} was formed without this node")
        generation, follower.asked = follower.asked, None
        if generation is not None and follower.place is not None and follower.place.generation == generation:
            key = self._keys.check(generation, self._offer.node_id)
            await self._patiently(lambda: self._store.put(key, b"", self._lease))

    async def _send_ack(self) -> None:
        place = self._follower.place
        if self._ack is None or place is None or place.generation != self._ack[0]:
            return
        generation, port = self._ack
        if self._follower.started >= generation:
            return
        key = self._keys.ack(generation, self._offer.node_id)
        await self._report(key, port_to_json(port), leased=True)
        self._candidacy.nudge()

    # -- the store, which may be away

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """The call's result, however long the store is away."""
        while True:
            try:
                result = await call()
            except StoreLostError as error:
                if not self._store_lost:
                    log.info("node %s: %s", self._offer.name, error)
                    self._store_lost = True
                    self._queue.put_nowait(StoreLost())
                await asyncio.sleep(self._settings.retry_s)
                continue
            if self._store_lost:
                self._store_lost = False
                self._queue.put_nowait(StoreBack())
            return result

    async def _report(self, key: str, value: bytes, leased: bool = False) -> None:
        """Write, unless the session ends first. Without a lease, `_catch_up` writes it after `_register`."""
        while not self._ended.is_set():
            try:
                await self._store.put(key, value, self._lease if leased else 0)
            except StoreLostError as error:
                log.warning("node %s: not reported yet: %s", self._offer.name, error)
                await asyncio.sleep(self._settings.retry_s)
                continue
            except RejoinError:
                self._check_lease.set()
            return

    def _renewed(self) -> None:
        self._pulse.renew(asyncio.get_running_loop().time(), self._settings)

    async def _depart(self) -> None:
        if not self._lease:
            return
        try:
            await within(_REVOKE_S, self._store.revoke_lease(self._lease))
        except (StoreLostError, asyncio.TimeoutError) as error:
            log.info("our keys stay until their lease ends: %s", error)

    async def _until_alone(self) -> None:
        pause_s = 0.02
        while await self._patiently(lambda: self._store.count(self._keys.nodes)) > 0:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.25)

    async def _read_events(self) -> AsyncIterator[MembershipEvent]:
        while (event := await self._queue.get()) is not None:
            yield event
