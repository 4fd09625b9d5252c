"""One node's turn to lead: it stands when there is no leader, or a silent one, and leads if it is chosen."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from baguarun.elastic.membership.examiner import Examiner
from baguarun.elastic.membership.follower import Follower
from baguarun.elastic.membership.job import JobSpec
from baguarun.elastic.membership.keys import JobKeys
from baguarun.elastic.membership.leader import Badge, Leader
from baguarun.elastic.membership.ledger import Pulse
from baguarun.elastic.membership.lookout import Identity, Lookout
from baguarun.elastic.membership.probe import Probing
from baguarun.elastic.membership.settings import MembershipSettings
from baguarun.elastic.membership.store import Compare, Put, Store
from baguarun.elastic.membership.waiting import first_of, within

T = TypeVar("T")


class Patiently(Protocol):
    """The call's result, however long the store is away."""

    async def __call__(self, call: Callable[[], Awaitable[T]], /) -> T: ...


class Candidacy:
    """Threads: the session's loop."""

    def __init__(
        self,
        store: Store,
        spec: JobSpec,
        settings: MembershipSettings,
        follower: Follower,
        pulse: Pulse,
        patiently: Patiently,
        prober: Probing | None,
    ) -> None:
        """`follower`, `pulse`, `prober`: the session's."""
        self._store = store
        self._spec = spec
        self._settings = settings
        self._keys = JobKeys(spec.job_id)
        self._follower = follower
        self._pulse = pulse
        self._patiently = patiently
        self._prober = prober
        self._lookout = Lookout(store, self._keys, settings, prober) if prober is not None else None
        self._me = Identity("", "", 0)
        self._vacant = asyncio.Event()
        self._occupied = asyncio.Event()
        self._promoted = asyncio.Event()
        """We have taken the leader key from a leader that is silent."""
        self._leading = False
        self._joined_as_leader = False
        self._leader: Leader | None = None

    def register(self, me: Identity, *, leads: bool) -> None:
        """This node is registered anew; `leads`: the leader key came with it, as nobody had it."""
        self._me = me
        self._leading = self._joined_as_leader = leads

    def note_leader(self, present: bool) -> None:
        """Whether anybody has the leader key."""
        if present:
            self._vacant.clear()
            self._occupied.set()
        else:
            self._occupied.clear()
            self._vacant.set()

    def nudge(self) -> None:
        """Something that the leader counts may have changed; we may be it."""
        if self._leader is not None:
            self._leader.nudge()

    @property
    def awaited_nodes(self) -> frozenset[str]:
        """`Leader.awaited_nodes`, if that is us."""
        return frozenset() if self._leader is None else self._leader.awaited_nodes

    async def holds_leader_key(self, me: Identity) -> bool:
        """Whether a transaction whose reply was lost had made `me` leader."""
        leader = await self._store.get(self._keys.leader)
        return leader is not None and leader.value == me.token.encode()

    async def lead(self) -> None:
        """Lead whenever the leader key is ours; take it when it is free."""
        while True:
            if not self._leading:
                await first_of(self._vacant.wait(), self._promoted.wait())
                if not self._promoted.is_set():
                    with contextlib.suppress(asyncio.TimeoutError):
                        await within(self._stagger_s(), self._occupied.wait())
                        continue
                self._promoted.clear()
                self._leading = await self._patiently(self._stand)
                self._joined_as_leader = False
                if not self._leading:
                    if self._lookout is not None:
                        self._lookout.replaced.clear()
                    # Somebody was faster; the event that says so is on its way.
                    await asyncio.sleep(self._settings.retry_s)
                    continue
            badge = Badge(self._me.node_id, self._me.token, self._joined_as_leader)
            examiner = self._examiner()
            self._leader = Leader(self._store, self._spec, self._settings, badge, self._pulse, examiner)
            try:
                await self._leader.run()
            finally:
                if examiner is not None:
                    examiner.stop()
                self._leader = None
                self._leading = False

    async def look_out(self) -> None:
        """Watch over our neighbours, where they can be asked; does not return."""
        if self._lookout is None:
            await asyncio.Event().wait()
            return
        self._lookout.stop()
        while True:
            await self._lookout.run(lambda: self._follower.place, self._me)
            self._promoted.set()

    def _examiner(self) -> Examiner | None:
        if self._prober is None or self._lookout is None:
            return None
        asked, self._lookout.replaced = self._lookout.replaced, {}
        return Examiner(self._keys, self._me.node_id, self._settings, self._prober, asked)

    async def _stand(self) -> bool:
        me = self._me
        registered = Compare(self._keys.nodes + me.node_id, exists=True)
        claim = Put(self._keys.leader, me.token.encode(), me.lease)
        result = await self._store.transact([Compare(self._keys.leader, exists=False), registered], [claim])
        return result.succeeded or await self.holds_leader_key(me)

    def _stagger_s(self) -> float:
        """Node ranks 0 and 1 stand at once, the others later one by one, newcomers last."""
        place = self._follower.place
        if place is None:
            return random.uniform(1.5, 2.0)
        if place.row.node_rank <= 1:
            return 0.0
        return 0.25 + place.row.node_rank / place.record.num_nodes
