"""Nodes of one job on a `FakeServer`: production sessions, and a launcher that does as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TypeVar

from baguarun.contract import Failure, World
from baguarun.elastic.membership.events import (
    Dismissed,
    Expelled,
    Finished,
    MembershipEvent,
    Prepare,
    Start,
    Waiting,
)
from baguarun.elastic.membership.job import JobSpec, NodeOffer
from baguarun.elastic.membership.session import Session
from baguarun.elastic.membership.settings import MembershipSettings
from tests.support.fake_prober import FakeNetwork, FakeProber
from tests.support.fake_store import FakeServer, FakeStore

E = TypeVar("E")
SETTINGS = MembershipSettings(detect_timeout_s=5.0, join_timeout_s=60.0)


def a_spec(min_nodes: int, max_nodes: int, *, max_restarts: int = 0, digest: str = "same") -> JobSpec:
    return JobSpec(
        job_id="job",
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        max_restarts=max_restarts,
        digest=digest,
        summary=f"train.py --{digest}",
    )


class FakeNode:
    """One node: acknowledges every `Prepare`, leaves when dismissed, notes every event, has no workers."""

    def __init__(
        self,
        server: FakeServer,
        spec: JobSpec,
        name: str,
        *,
        slots: int = 2,
        node_rank: int | None = None,
        settings: MembershipSettings = SETTINGS,
        network: FakeNetwork | None = None,
    ) -> None:
        """`network`: in which nodes probe each other; None: they do not."""
        self.name = name
        self.store = FakeStore(server, seed=sum(map(ord, name)))
        offer = NodeOffer(
            node_id=f"id-{name}", name=name, address=f"addr-{name}", slots=slots, node_rank=node_rank
        )
        self.prober = FakeProber(network, offer.node_id, settings) if network is not None else None
        self.session = Session(self.store, spec, offer, settings, self.prober)
        self.events: list[MembershipEvent] = []
        self.stopping_workers_s = 0.0
        """How long it takes this node to stop its workers."""
        self.task = asyncio.create_task(self.session.run())
        self._listener = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        async for event in self.session.events:
            self.events.append(event)
            if isinstance(event, Prepare):
                await asyncio.sleep(self.stopping_workers_s)
                await self.session.acknowledge(event.generation, 29500 + event.generation)
            elif isinstance(event, Dismissed):
                await self.session.leave(event.reason)

    # -- what it has seen

    def all(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def world(self) -> World | None:
        """The World whose workers would run now."""
        for event in reversed(self.events):
            if isinstance(event, Start):
                return event.world
            if isinstance(event, (Prepare, Expelled, Finished)):
                return None
        return None

    @property
    def finished(self) -> Finished | None:
        ends = self.all(Finished)
        assert len(ends) <= 1, "the job ended twice"
        return ends[0] if ends else None

    @property
    def waiting(self) -> str:
        return self.all(Waiting)[-1].reason if self.all(Waiting) else ""

    # -- what it does

    async def fail(self, *, signal: int | None = None, retry_free: bool = False) -> None:
        """Its local rank 0 fails: by `signal`, or with exit code 7."""
        assert self.world is not None
        failure = Failure(
            generation=self.world.generation,
            node=self.name,
            rank=self.world.first_rank,
            local_rank=0,
            pid=4711,
            exit_code=7 if signal is None else None,
            signal=signal,
            timestamp_s=0.0,
        )
        await self.session.report_failure(failure, retry_free=retry_free)

    async def done(self) -> None:
        assert self.world is not None
        await self.session.report_done(self.world.generation)

    async def die(self) -> None:
        """kill -9 of the agent: no word, the lease tells."""
        self.store.cut()
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def until(condition: Callable[[], bool], timeout_s: float = 300.0) -> None:
    """Let virtual time pass until the condition holds."""
    loop = asyncio.get_running_loop()
    give_up = loop.time() + timeout_s
    while not condition():
        assert loop.time() < give_up, "it never came about"
        await asyncio.sleep(0.01)


async def until_running(nodes: Iterable[FakeNode], generation: int) -> None:
    """Until exactly this generation runs on all of them."""
    nodes = list(nodes)
    for node in nodes:
        await until(lambda: node.world is not None and node.world.generation == generation)
    worlds = [node.world for node in nodes if node.world is not None]
    check_worlds(worlds)


def check_worlds(worlds: list[World]) -> None:
    """Views of one World by all its nodes: consistent and complete."""
    by_rank = sorted(worlds, key=lambda world: world.node_rank)
    assert [world.node_rank for world in by_rank] == list(range(len(worlds)))
    next_rank = 0
    for world in by_rank:
        assert world.first_rank == next_rank, "worker ranks are not consecutive"
        next_rank += world.local_world_size
    assert {world.world_size for world in worlds} == {next_rank}
    assert {world.num_nodes for world in worlds} == {len(worlds)}
    for attribute in ("generation", "master_addr", "master_port", "restart_count", "max_restarts"):
        assert len({getattr(world, attribute) for world in worlds}) == 1, f"nodes disagree on {attribute}"
