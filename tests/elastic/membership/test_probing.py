"""Jobs whose nodes probe each other: who is lost, who is not, and how soon; in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from baguarun.elastic.membership.events import Expelled
from baguarun.elastic.membership.settings import MembershipSettings
from tests.support.fake_cluster import FakeNode, a_spec, until, until_running
from tests.support.fake_prober import FakeNetwork
from tests.support.fake_store import FakeServer
from tests.support.virtual_time import in_virtual_time

SETTINGS = MembershipSettings(detect_timeout_s=1.0, join_timeout_s=60.0)
IN_TIME_S = SETTINGS.detect_timeout_s + 0.3
"""By then the others run in a World of their own; their leases alone would have taken 2 s and more."""


class Job:
    def __init__(self, count: int, least: int = 1) -> None:
        self.server, self.network = FakeServer(), FakeNetwork()
        self.spec = a_spec(least, count)
        self.nodes: list[FakeNode] = []
        self.count = count

    async def run(self) -> Job:
        """All nodes run in World 1, know their neighbours, and the first one leads."""
        for i in range(self.count):
            node = FakeNode(self.server, self.spec, f"n{i}", settings=SETTINGS, network=self.network)
            self.nodes.append(node)
            await asyncio.sleep(0.05)
        await until_running(self.nodes, 1)
        await asyncio.sleep(2 * SETTINGS.detect_timeout_s)
        return self

    def cut_off(self, node: FakeNode) -> None:
        """Its host is frozen or away: neither the network nor the store hears of it."""
        self.network.gone.add(f"id-{node.name}")
        node.store.stall()
        if node.prober is not None:
            node.prober.frozen = True

    def mend(self, node: FakeNode) -> None:
        self.network.gone.discard(f"id-{node.name}")
        node.store.mend()
        if node.prober is not None:
            node.prober.frozen = False


def _now() -> float:
    return asyncio.get_running_loop().time()


@in_virtual_time
async def _loses(count: int, lost: list[int]) -> None:
    job = await Job(count).run()
    for at in lost:
        job.cut_off(job.nodes[at])
    since_s = _now()
    await until_running([node for i, node in enumerate(job.nodes) if i not in lost], 2)
    assert _now() - since_s < IN_TIME_S


@pytest.mark.parametrize(
    ("count", "lost"),
    [(2, [1]), (2, [0]), (3, [2]), (3, [0]), (3, [1, 2]), (3, [0, 1]), (8, [5]), (8, [0]), (8, [0, 1])],
    ids=str,
)
def test_lost_nodes_are_left_out_before_their_leases_end_whoever_leads(count: int, lost: list[int]) -> None:
    _loses(count, lost)


@in_virtual_time
async def test_a_node_that_comes_back_is_a_newcomer() -> None:
    job = await Job(3).run()
    job.cut_off(job.nodes[0])
    await until_running(job.nodes[1:], 2)
    job.mend(job.nodes[0])
    await until(lambda: all(node.world is not None and node.world.generation >= 3 for node in job.nodes))
    assert job.nodes[0].all(Expelled)


@in_virtual_time
async def test_a_network_that_carries_no_probes_loses_nobody() -> None:
    job = Job(3)
    job.network.deaf |= {frozenset((f"id-n{i}", f"id-n{j}")) for i in range(3) for j in range(i)}
    await job.run()
    await asyncio.sleep(30.0)
    assert [node.world.generation for node in job.nodes if node.world] == [1, 1, 1]


@in_virtual_time
async def test_a_network_that_stops_to_carry_probes_loses_nobody_who_answers_the_store() -> None:
    job = await Job(3).run()
    job.network.gone |= {"id-n0", "id-n1", "id-n2"}
    await asyncio.sleep(30.0)
    assert [node.world.generation for node in job.nodes if node.world] == [1, 1, 1]
    assert not job.server.keys("/baguarun/job/suspect/")


@in_virtual_time
async def test_who_was_suspected_wrongly_once_is_found_when_it_is_lost_later() -> None:
    job = await Job(3).run()
    job.network.gone.add("id-n1")
    await asyncio.sleep(5.0)
    job.network.gone.clear()
    await asyncio.sleep(5.0)
    job.cut_off(job.nodes[1])
    since_s = _now()
    await until_running([job.nodes[0], job.nodes[2]], 2)
    assert _now() - since_s < IN_TIME_S


@in_virtual_time
async def test_nodes_without_a_store_lose_nobody() -> None:
    job = await Job(3).run()
    job.server.freeze()
    job.network.gone.add("id-n1")
    await asyncio.sleep(1.5)
    job.network.gone.clear()
    await asyncio.sleep(0.5)
    job.server.thaw()
    await asyncio.sleep(5.0)
    assert [node.world.generation for node in job.nodes if node.world] == [1, 1, 1]


@in_virtual_time
async def test_two_nodes_that_hear_everyone_but_each_other_both_stay() -> None:
    job = await Job(4).run()
    job.network.deaf.add(frozenset(("id-n1", "id-n2")))
    await asyncio.sleep(10.0)
    assert [node.world.generation for node in job.nodes if node.world] == [1, 1, 1, 1]


@in_virtual_time
async def test_a_leader_that_hears_nobody_but_has_the_store_goes_on_leading() -> None:
    job = await Job(3).run()
    leader = job.server.keys("/baguarun/job/all/leader")
    job.network.gone.add("id-n0")
    await asyncio.sleep(10.0)
    assert [node.world.generation for node in job.nodes if node.world] == [1, 1, 1]
    assert job.server.keys("/baguarun/job/all/leader") == leader


@in_virtual_time
async def test_a_node_that_stood_still_for_a_moment_suspects_nobody() -> None:
    job = await Job(3).run()
    node = job.nodes[1]
    job.cut_off(node)
    await asyncio.sleep(0.5 * SETTINGS.detect_timeout_s)
    job.mend(node)
    await asyncio.sleep(10.0)
    assert [node.world.generation for node in job.nodes if node.world] == [1, 1, 1]
