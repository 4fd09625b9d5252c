"""Nodes that probe each other in a network that a test can cut, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from baguarun.elastic.membership.probe import Peer, Silences
from baguarun.elastic.membership.settings import MembershipSettings


class FakeNetwork:
    """Who hears whom: everybody, until told otherwise."""

    def __init__(self) -> None:
        self.deaf: set[frozenset[str]] = set()
        """Pairs of node ids that do not reach each other."""
        self.gone: set[str] = set()
        """Nodes that nobody reaches and that reach nobody."""

    def connects(self, one: str, other: str) -> bool:
        return not {one, other} & self.gone and frozenset((one, other)) not in self.deaf


class FakeProber:
    """A `Probing` whose questions are answered at once, or not."""

    def __init__(self, network: FakeNetwork, node_id: str, settings: MembershipSettings) -> None:
        self.port, self.key = 1, "ab"
        self._network = network
        self._node_id = node_id
        self._interval_s = settings.probe_interval_s
        self._watched: dict[str, list[Peer]] = {}
        self._silences = Silences(self._interval_s, asyncio.get_running_loop().time())
        self._task = asyncio.create_task(self._run())
        self._number = 0
        self.frozen = False

    def watch(self, why: str, peers: Iterable[Peer]) -> None:
        self._watched[why] = list(peers)

    def forget(self, node_id: str) -> None:
        self._silences.forget(node_id)

    def silence_s(self, node_id: str) -> float | None:
        return self._silences.silence_s(node_id)

    def awake_s(self) -> float:
        return self._silences.awake_s

    def stop(self) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            if self.frozen:
                continue
            self._silences.tick(asyncio.get_running_loop().time())
            for node_id in {peer.node_id for peers in self._watched.values() for peer in peers}:
                self._number += 1
                self._silences.asked(node_id, self._number, 1.0)
                if self._network.connects(self._node_id, node_id):
                    self._silences.answered(node_id, self._number)
