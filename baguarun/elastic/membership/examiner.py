"""The leader's hearing of suspects: asks them over the network and through the store, and acts on silence."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping

from baguarun.elastic.membership.keys import JobKeys
from baguarun.elastic.membership.ledger import Ledger
from baguarun.elastic.membership.probe import Peer, Probing
from baguarun.elastic.membership.records import Order, Word
from baguarun.elastic.membership.settings import MembershipSettings
from baguarun.elastic.membership.store import Compare, Delete, Put, TxnResult
from baguarun.elastic.membership.suspicion import examine
from baguarun.elastic.membership.view import Node

log = logging.getLogger("baguarun.membership")

_WHY = "leader"


class Examiner:
    """One leader's. Threads: the leader's loop.

    A node is expelled by taking its registration away, in a transaction that holds only as long as it has
    not written it anew. From there on the loss is one like any other; an expelled node that lives registers
    again.
    """

    def __init__(
        self,
        keys: JobKeys,
        me: str,
        settings: MembershipSettings,
        prober: Probing,
        unanswered: Mapping[str, float],
    ) -> None:
        """`unanswered`: whom this node has asked already, and when, by the prober's clock."""
        self._keys = keys
        self._me = me
        self._settings = settings
        self._prober = prober
        self._asked = dict(unanswered)
        self._texts: dict[str, str] = {}

    async def step(
        self, ledger: Ledger, fenced: Callable[..., Awaitable[TxnResult]]
    ) -> tuple[float | None, tuple[str, ...]]:
        """Do what is due; returns after how many seconds to come again, and whom it has expelled.

        `fenced` takes operations and compares and raises if this node does not lead any more.
        """
        accused = ledger.accused
        if not accused and not self._asked:
            return None, ()
        now_s = self._prober.awake_s()
        # An answer to an earlier question acquits nobody today.
        asked = accused & self._asked.keys()
        heard = {node_id for node_id in asked if self._is_heard(node_id, now_s)}
        alive = heard | {node_id for node_id in asked if self._has_written(node_id, ledger)}
        todo = examine(accused, self._me, self._asked, alive, now_s, self._settings.confirm_s)
        for node_id in todo.acquit:
            await fenced(self._complaints(ledger, node_id))
            ledger.acquitted(node_id, unheard=node_id not in heard | {self._me})
            log.info("node %s is suspected, and alive", node_id)
        for node_id in todo.expel:
            await self._expel(ledger.node(node_id), ledger, fenced)
        for node_id in todo.ask:
            self._texts[node_id] = secrets.token_hex(4)
            word = Word(text=self._texts[node_id], order=Order.ANSWER)
            self._prober.watch(_WHY, self._peers(ledger, accused))
            await fenced([Put(self._keys.ask(node_id), word.to_json())])
            # From here on: a store that took long to write it would take long to bring the answer.
            self._asked[node_id] = self._prober.awake_s()
        waiting = accused - todo.acquit - todo.expel
        if not waiting:
            self._prober.watch(_WHY, ())
        self._asked = {node_id: s for node_id, s in self._asked.items() if node_id in waiting}
        return (self._settings.probe_interval_s if waiting else None), tuple(sorted(todo.expel))

    def stop(self) -> None:
        self._prober.watch(_WHY, ())

    def _is_heard(self, node_id: str, now_s: float) -> bool:
        silence_s = self._prober.silence_s(node_id)
        return silence_s is not None and silence_s < now_s - self._asked[node_id]

    def _has_written(self, node_id: str, ledger: Ledger) -> bool:
        return node_id in self._texts and ledger.alive.get(node_id) == self._texts[node_id]

    def _complaints(self, ledger: Ledger, node_id: str) -> list[Put | Delete]:
        accusers = ledger.accusers(node_id)
        return [Delete(self._keys.suspect(ledger.generation, accuser, node_id)) for accuser in accusers]

    async def _expel(self, node: Node, ledger: Ledger, fenced: Callable[..., Awaitable[TxnResult]]) -> None:
        key = self._keys.nodes + node.node_id
        same = Compare(key, value=node.record.to_json())
        await fenced([Delete(key), *self._complaints(ledger, node.node_id)], same)
        ledger.expelled(node.node_id)

    def _peers(self, ledger: Ledger, accused: frozenset[str]) -> list[Peer]:
        records = ((node_id, ledger.node(node_id).record) for node_id in accused - {self._me})
        return [Peer(n, r.address, r.probe_port, r.probe_key) for n, r in records if r.probe_port]
