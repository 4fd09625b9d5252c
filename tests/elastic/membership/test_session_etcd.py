"""The same sessions on real etcd servers, with a shorter list of trouble; time is real here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from baguarun.contract import World
from baguarun.elastic.membership.etcd import EtcdStore
from baguarun.elastic.membership.events import (
    Expelled,
    Finished,
    MembershipEvent,
    Prepare,
    Start,
    StoreBack,
    StoreLost,
)
from baguarun.elastic.membership.job import JobSpec, NodeOffer
from baguarun.elastic.membership.session import Session
from baguarun.elastic.membership.settings import MembershipSettings
from tests.support.etcd_servers import EtcdServer
from tests.support.fake_cluster import check_worlds
from tests.support.loop import in_loop

SETTINGS = MembershipSettings(detect_timeout_s=2.0)
GIVE_UP_S = 60.0


class RealNode:
    """One session on a connection of its own."""

    def __init__(self, store: EtcdStore, job_id: str, name: str, **limits: int) -> None:
        spec = JobSpec(
            job_id=job_id,
            min_nodes=limits.get("min_nodes", 1),
            max_nodes=limits.get("max_nodes", 2),
            max_restarts=0,
            digest="same",
            summary="train.py",
        )
        offer = NodeOffer(node_id=f"id-{name}", name=name, address="127.0.0.1", slots=2)
        self.store = store
        self.session = Session(store, spec, offer, SETTINGS)
        self.events: list[MembershipEvent] = []
        self.task = asyncio.create_task(self.session.run())
        self._listener = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        async for event in self.session.events:
            self.events.append(event)
            if isinstance(event, Prepare):
                await self.session.acknowledge(event.generation, 29500)

    def heard(self, kind: type[MembershipEvent]) -> int:
        return sum(isinstance(event, kind) for event in self.events)

    @property
    def world(self) -> World | None:
        for event in reversed(self.events):
            if isinstance(event, Start):
                return event.world
            if isinstance(event, (Prepare, Expelled, Finished)):
                return None
        return None

    async def end(self) -> None:
        self.task.cancel()
        self._listener.cancel()
        await asyncio.gather(self.task, self._listener, return_exceptions=True)
        await self.store.close()


@asynccontextmanager
async def nodes_on(etcd: EtcdServer, job_id: str, count: int, **limits: int) -> AsyncIterator[list[RealNode]]:
    nodes = []
    for number in range(count):
        store = await EtcdStore.open(etcd.url, timeout_s=5.0)
        nodes.append(RealNode(store, job_id, f"n{number}", **limits))
    try:
        yield nodes
    finally:
        await asyncio.gather(*(node.end() for node in nodes))


async def until_running(nodes: list[RealNode], num_nodes: int) -> None:
    loop = asyncio.get_running_loop()
    give_up = loop.time() + GIVE_UP_S
    while True:
        worlds = [node.world for node in nodes if node.world is not None]
        if len(worlds) == len(nodes) and all(world.num_nodes == num_nodes for world in worlds):
            check_worlds(worlds)
            return
        assert loop.time() < give_up, [node.events for node in nodes]
        await asyncio.sleep(0.02)


@in_loop
async def test_nodes_form_re_form_and_finish(shared_etcd: EtcdServer, prefix: str) -> None:
    job_id = prefix.strip("/").replace("/", "-")
    async with nodes_on(shared_etcd, job_id, 3, min_nodes=2, max_nodes=3) as nodes:
        await until_running(nodes, 3)
        await nodes[0].session.leave("preempted")
        await until_running(nodes[1:], 2)
        for node in nodes[1:]:
            assert node.world is not None
            await node.session.report_done(node.world.generation)
        await asyncio.gather(*(node.task for node in nodes))
        assert [node.heard(Finished) for node in nodes] == [0, 1, 1]
        assert await nodes[1].session.wait_until_alone(GIVE_UP_S)


@in_loop
async def test_a_node_that_falls_silent_is_left_out(shared_etcd: EtcdServer, prefix: str) -> None:
    job_id = prefix.strip("/").replace("/", "-")
    async with nodes_on(shared_etcd, job_id, 2) as nodes:
        await until_running(nodes, 2)
        # Without its connection the session can neither renew nor say good-bye.
        await nodes[0].store.close()
        nodes[0].task.cancel()
        await until_running(nodes[1:], 1)


@in_loop
async def test_an_etcd_killed_and_restarted_costs_no_world(etcd: EtcdServer) -> None:
    async with nodes_on(etcd, "killed", 2) as nodes:
        await until_running(nodes, 2)
        etcd.kill()
        while not all(node.heard(StoreLost) for node in nodes):
            await asyncio.sleep(0.05)
        await asyncio.to_thread(etcd.start)
        while not all(node.heard(StoreBack) for node in nodes):
            await asyncio.sleep(0.05)
        await asyncio.sleep(2 * SETTINGS.detect_timeout_s)
        assert [(node.world.generation if node.world else 0) for node in nodes] == [1, 1]
        await nodes[0].session.leave("preempted")
        await until_running(nodes[1:], 1)


@in_loop
async def test_an_etcd_frozen_beyond_every_lease_costs_no_world(etcd: EtcdServer) -> None:
    async with nodes_on(etcd, "frozen", 2) as nodes:
        await until_running(nodes, 2)
        etcd.freeze()
        await asyncio.sleep(3 * SETTINGS.detect_timeout_s)
        etcd.thaw()
        await asyncio.sleep(3 * SETTINGS.detect_timeout_s)
        assert [(node.world.generation if node.world else 0) for node in nodes] == [1, 1]
        assert [node.heard(Expelled) for node in nodes] == [0, 0]
        await nodes[1].session.leave("preempted")
        await until_running(nodes[:1], 1)


@in_loop
async def test_an_etcd_that_comes_back_empty_is_filled_again(etcd: EtcdServer) -> None:
    async with nodes_on(etcd, "empty", 2, min_nodes=2) as nodes:
        await until_running(nodes, 2)
        etcd.kill()
        etcd.lose_data()
        await asyncio.to_thread(etcd.start)
        while not all(node.heard(Start) == 2 for node in nodes):
            await asyncio.sleep(0.05)
        await until_running(nodes, 2)
        assert [(node.world.generation if node.world else 0) for node in nodes] == [2, 2]


@in_loop
async def test_a_hundred_nodes_form_one_world(shared_etcd: EtcdServer) -> None:
    async with nodes_on(shared_etcd, "hundred", 100, min_nodes=100, max_nodes=100) as nodes:
        await until_running(nodes, 100)
