"""One node's watch over its neighbours: complains when one falls silent, and replaces a leader that does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from baguarun.elastic.membership.follower import Place
from baguarun.elastic.membership.keys import JobKeys
from baguarun.elastic.membership.probe import Peer, Probing, may_take_over, neighbours
from baguarun.elastic.membership.records import NodeRecord, Suspicion, Witness, members_from_json
from baguarun.elastic.membership.settings import MembershipSettings
from baguarun.elastic.membership.store import Compare, Put, Store
from baguarun.errors import RejoinError, StoreLostError

log = logging.getLogger("baguarun.membership")

_WHY = "neighbours"


@dataclass(frozen=True)
class Identity:
    """Whom this node's registration makes it."""

    node_id: str
    token: str
    lease: int


@dataclass(frozen=True)
class _Circle:
    """The members of one World, as far as this node watches them."""

    generation: int
    token: str
    ring: tuple[str, ...]
    watched: tuple[str, ...]


class Lookout:
    """Threads: the session's loop. What is out of reach of the store is put off, not failed."""

    def __init__(self, store: Store, keys: JobKeys, settings: MembershipSettings, prober: Probing) -> None:
        self._store = store
        self._keys = keys
        self._settings = settings
        self._prober = prober
        self._circle: _Circle | None = None
        self._complained: dict[str, float] = {}
        """When this node complained about another, by the prober's clock."""
        self._unheard_s: float | None = None

        self.replaced: dict[str, float] = {}
        """The leader that this node replaced last, and since when it could have shown that it is alive."""

    async def run(self, place: Callable[[], Place | None], me: Identity) -> None:
        """Watch over the members of `place` for ever; returns when this node has become the leader."""
        try:
            while True:
                await asyncio.sleep(self._settings.probe_interval_s)
                try:
                    if await self._look(place(), me):
                        return
                except StoreLostError as error:
                    log.debug("%s: a suspicion is put off: %s", me.node_id, error)
                    await asyncio.sleep(self._settings.retry_s)
        except RejoinError:
            # The session is about to find out itself.
            await asyncio.Event().wait()

    async def _look(self, place: Place | None, me: Identity) -> bool:
        circle = await self._follow(place, me)
        if circle is None:
            return False
        self._warn_of_the_unheard(circle)
        for node_id in circle.watched:
            silence_s = self._prober.silence_s(node_id)
            is_silent = silence_s is not None and silence_s >= self._settings.suspect_s
            if is_silent and node_id not in self._complained:
                await self._complain(circle, me, node_id)
            elif not is_silent and node_id in self._complained and silence_s is not None:
                await self._take_back(circle, me, node_id)
        for node_id, since_s in list(self._complained.items()):
            age_s = self._prober.awake_s() - since_s
            if age_s >= 2 * self._settings.detect_timeout_s:
                await self._check(circle, me, node_id)
            elif age_s >= self._settings.confirm_s and await self._replace(circle, me, node_id):
                return True
        return False

    async def _follow(self, place: Place | None, me: Identity) -> _Circle | None:
        """Know the World that this node has a place in, and ask its neighbours there."""
        old = self._circle
        if place is None:
            if old is not None:
                self.stop()
            return None
        if old is not None and (old.generation, old.token) == (place.generation, place.record.token):
            return old
        entry = await self._store.get(f"{self._keys.members}{place.generation}")
        ring = tuple(member.node_id for member in members_from_json(entry.value)) if entry else ()
        if me.node_id not in ring:
            return None
        watched = neighbours(ring, me.node_id)
        found = await asyncio.gather(*(self._store.get(self._keys.nodes + node_id) for node_id in watched))
        records = [(n, NodeRecord.from_json(e.value)) for n, e in zip(watched, found, strict=True) if e]
        self._prober.watch(
            _WHY, [Peer(n, r.address, r.probe_port, r.probe_key) for n, r in records if r.probe_port]
        )
        # Who stays silent will be complained about again.
        self._complained.clear()
        self._unheard_s = self._prober.awake_s()
        self._circle = _Circle(place.generation, place.record.token, ring, watched)
        return self._circle

    def _warn_of_the_unheard(self, circle: _Circle) -> None:
        if self._unheard_s is None:
            return
        if self._prober.awake_s() - self._unheard_s < 4 * self._settings.detect_timeout_s:
            return
        self._unheard_s = None
        unheard = [node_id for node_id in circle.watched if self._prober.silence_s(node_id) is None]
        if unheard:
            log.warning(
                "no answer to probes over UDP from %s (a firewall?): only the store's leases, of %d s, "
                "will tell if it is lost",
                ", ".join(unheard),
                self._settings.lease_ttl_s,
            )

    async def _complain(self, circle: _Circle, me: Identity, node_id: str) -> None:
        reason = f"no answer to probes for {self._settings.suspect_s:g} s"
        log.info("node %s suspects node %s: %s", me.node_id, node_id, reason)
        suspicion = Suspicion(blamed=(node_id,), by=Witness.PROBE, reason=reason)
        key = self._keys.suspect(circle.generation, me.node_id, node_id)
        await self._store.put(key, suspicion.to_json(), me.lease)
        self._complained[node_id] = self._prober.awake_s()

    async def _take_back(self, circle: _Circle, me: Identity, node_id: str) -> None:
        log.info("node %s hears node %s again", me.node_id, node_id)
        await self._store.delete(self._keys.suspect(circle.generation, me.node_id, node_id))
        del self._complained[node_id]

    async def _check(self, circle: _Circle, me: Identity, node_id: str) -> None:
        """A complaint that is gone was found wrong: its subject is not watched until it is heard again."""
        if await self._store.get(self._keys.suspect(circle.generation, me.node_id, node_id)) is None:
            self._prober.forget(node_id)
            del self._complained[node_id]
        else:
            self._complained[node_id] = self._prober.awake_s()

    async def _replace(self, circle: _Circle, me: Identity, node_id: str) -> bool:
        """Take the leadership from `node_id` if it is the leader, and the others do not hear it either."""
        leader, node = await asyncio.gather(
            self._store.get(self._keys.leader), self._store.get(self._keys.nodes + node_id)
        )
        if leader is None or node is None or NodeRecord.from_json(node.value).token != leader.value.decode():
            return False
        prefix = self._keys.suspect(circle.generation)
        complaints = (await self._store.list(prefix)).entries
        paths = [entry.key.removeprefix(prefix).split("/") for entry in complaints]
        complainers = [path[0] for path in paths if path[1:] == [node_id]]
        silent = {other: other in self._complained for other in circle.ring}
        watchers = neighbours(circle.ring, node_id)
        agreeing = may_take_over(me.node_id, watchers, complainers, silent)
        if not agreeing:
            return False
        proofs = [self._keys.suspect(circle.generation, other, node_id) for other in agreeing]
        compares = [
            Compare(self._keys.leader, value=leader.value),
            Compare(self._keys.nodes + me.node_id, exists=True),
            *(Compare(proof, exists=True) for proof in proofs),
        ]
        claim = Put(self._keys.leader, me.token.encode(), me.lease)
        if not (await self._store.transact(compares, [claim])).succeeded:
            return False
        self.replaced = {node_id: self._complained[node_id]}
        log.warning("node %s leads instead of %s, which is silent", me.node_id, node_id)
        return True

    def stop(self) -> None:
        self._prober.watch(_WHY, ())
        self._circle = None
        self._complained.clear()
