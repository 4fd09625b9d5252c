"""What people are shown of a job, from the store's keys at every stage of its life."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from baguarun.elastic.membership.control import scale_job
from baguarun.elastic.membership.events import Invited
from baguarun.elastic.membership.records import InPlaceState, NodeRecord, Process
from baguarun.elastic.membership.report import (
    JobReport,
    JobState,
    NodeState,
    known_jobs,
    list_jobs,
    read_job,
)
from baguarun.elastic.membership.stragglers import Pace
from tests.support.fake_cluster import FakeNode, a_spec, until, until_running
from tests.support.fake_store import FakeServer, FakeStore
from tests.support.virtual_time import in_virtual_time


async def look(server: FakeServer) -> JobReport:
    report = await read_job(FakeStore(server), "job")
    assert report is not None
    return report


def states(report: JobReport) -> dict[str, NodeState]:
    return {node.name: node.state for node in report.nodes}


async def a_running_job(server: FakeServer, min_nodes: int, max_nodes: int, count: int) -> list[FakeNode]:
    """Nodes n0, n1, ... in the order of their age."""
    nodes = []
    for i in range(count):
        nodes.append(FakeNode(server, a_spec(min_nodes, max_nodes, max_restarts=2), f"n{i}"))
        await asyncio.sleep(0.05)
    await until_running(nodes, 1)
    return nodes


@in_virtual_time
async def test_a_store_without_the_job_has_no_report() -> None:
    assert await read_job(FakeStore(FakeServer()), "job") is None


@in_virtual_time
async def test_a_job_that_waits_for_nodes_says_for_how_many() -> None:
    server = FakeServer()
    node = FakeNode(server, a_spec(2, 3), "n0")
    await until(lambda: bool(node.waiting))
    report = await look(server)
    assert report.summary.state is JobState.WAITING
    assert report.note == "1 of 2 nodes are here"
    assert states(report) == {"n0": NodeState.WAITING}
    assert report.nodes[0].leads


@in_virtual_time
async def test_a_running_job_shows_ranks_leader_and_who_stands_by() -> None:
    server = FakeServer()
    await a_running_job(server, 1, 2, 2)
    spare = FakeNode(server, a_spec(1, 2, max_restarts=2), "n2", slots=4)
    await until(lambda: bool(spare.waiting))
    report = await look(server)
    assert report.summary.state is JobState.RUNNING
    assert report.summary.num_registered == 3
    running, standby = NodeState.RUNNING, NodeState.STANDBY
    assert [(n.name, n.state, n.node_rank, n.first_rank, n.slots, n.leads) for n in report.nodes] == [
        ("n0", running, 0, 0, 2, True),
        ("n1", running, 1, 2, 2, False),
        ("n2", standby, None, None, 4, False),
    ]
    assert report.nodes[0].address == "addr-n0"
    record = NodeRecord.from_json(server.entries["/baguarun/job/nodes/id-n0"].value)
    assert report.nodes[0].registered_s == record.registered_s > 0
    # What the first World waited for is no news any more.
    assert report.note == ""
    assert [(event.generation, event.text) for event in report.events] == [(1, "all nodes are here")]


@in_virtual_time
async def test_a_forming_world_shows_who_is_not_ready() -> None:
    server = FakeServer()
    nodes = await a_running_job(server, 1, 3, 2)
    nodes[1].stopping_workers_s = 20.0
    late = FakeNode(server, a_spec(1, 3, max_restarts=2), "n2")
    await until(lambda: len(server.keys("/baguarun/job/ack/2/")) == 2)
    report = await look(server)
    assert report.summary.state is JobState.FORMING
    assert states(report) == {"n0": NodeState.READY, "n1": NodeState.PREPARING, "n2": NodeState.READY}
    await until_running([*nodes, late], 2)
    assert (await look(server)).events[-1].text == "n2 joined"


@in_virtual_time
async def test_whoever_is_asked_to_go_is_shown_as_leaving_and_the_wish_is_shown_too() -> None:
    server = FakeServer()
    nodes = await a_running_job(server, 1, 3, 3)
    nodes[2].store.stall()
    await scale_job(FakeStore(server), "job", 2)
    await until(lambda: "/baguarun/job/row/id-n2/word" in server.entries)
    await asyncio.sleep(0.1)
    report = await look(server)
    assert (report.desired, states(report)["n2"]) == (2, NodeState.LEAVING)
    assert report.events[-1].text == "the job is scaled to 2 of at most 3 nodes; n2 must go"
    nodes[2].store.mend()
    await nodes[2].task


@in_virtual_time
async def test_members_that_are_done_left_or_lost_are_told_apart() -> None:
    server = FakeServer()
    nodes = await a_running_job(server, 3, 3, 3)
    await nodes[0].done()
    await nodes[1].session.leave("preempted")
    await nodes[2].die()
    await until(lambda: len(server.keys("/baguarun/job/nodes/")) == 1)
    report = await look(server)
    assert states(report) == {"n0": NodeState.DONE, "n1": NodeState.LEFT, "n2": NodeState.LOST}
    assert report.nodes[2].registered_s is None


@in_virtual_time
async def test_a_node_that_registered_again_with_its_workers_keeps_its_place() -> None:
    server = FakeServer()
    nodes = await a_running_job(server, 1, 2, 2)
    server.end_lease(server.entries["/baguarun/job/nodes/id-n1"].lease)
    await until(lambda: "/baguarun/job/nodes/id-n1" in server.entries)
    assert states(await look(server)) == {"n0": NodeState.RUNNING, "n1": NodeState.RUNNING}
    assert all(node.world is not None and node.world.generation == 1 for node in nodes)


@in_virtual_time
async def test_a_failure_is_counted_and_kept_in_the_history_and_the_end_is_its_last_line() -> None:
    server = FakeServer()
    nodes = await a_running_job(server, 2, 2, 2)
    await nodes[1].fail()
    await until_running(nodes, 2)
    report = await look(server)
    assert report.summary.world is not None and report.summary.world.restart_count == 1
    assert report.events[-1].text.endswith("exited with code 7 in generation 1; restart 1 of 2")
    for node in nodes:
        await node.done()
    await asyncio.gather(*(node.task for node in nodes))
    report = await look(server)
    assert report.summary.state is JobState.SUCCEEDED
    assert states(report) == {"n0": NodeState.DONE, "n1": NodeState.DONE}
    assert report.events[-1].text == "succeeded: all workers have finished"


@in_virtual_time
async def test_of_a_long_history_the_end_is_kept() -> None:
    server = FakeServer()
    (node,) = await a_running_job(server, 1, 2, 1)
    for generation in range(2, 26, 2):
        guest = FakeNode(server, a_spec(1, 2, max_restarts=2), f"g{generation}")
        await until_running([node, guest], generation)
        await guest.session.leave("bye")
        await until_running([node], generation + 1)
    events = (await look(server)).events
    assert [event.generation for event in events] == list(range(6, 26))


@in_virtual_time
async def test_a_job_whose_nodes_all_died_is_abandoned() -> None:
    server = FakeServer()
    for node in await a_running_job(server, 1, 2, 2):
        await node.die()
    await until(lambda: not server.keys("/baguarun/job/nodes/"))
    report = await look(server)
    assert report.summary.state is JobState.ABANDONED
    assert set(states(report).values()) == {NodeState.LOST}


@in_virtual_time
async def test_the_list_of_jobs_holds_running_and_ended_ones_once() -> None:
    server = FakeServer()
    (node,) = await a_running_job(server, 1, 2, 1)
    await node.done()
    await node.task
    assert [summary.state for summary in await list_jobs(FakeStore(server))] == [JobState.SUCCEEDED]
    await a_running_job(server, 1, 2, 1)
    (summary,) = await list_jobs(FakeStore(server))
    assert (summary.state, summary.num_registered) == (JobState.RUNNING, 1)
    assert await known_jobs(FakeStore(server)) == ["job"]


@in_virtual_time
async def test_a_job_in_place_shows_who_has_no_worker_and_who_is_about_to_join() -> None:
    server = FakeServer()
    spec = replace(a_spec(1, 3, max_restarts=9), in_place=True)
    n0, n1 = FakeNode(server, spec, "n0", slots=1), FakeNode(server, spec, "n1", slots=1)
    await until_running([n0, n1], 1)
    worker = Process(0, 1)
    await n0.session.report_state(InPlaceState(workers=(worker,)))
    await n1.session.report_state(InPlaceState(lost=(worker,)))
    await until(lambda: n1.world is not None and n1.world.generation == 2)
    report = await look(server)
    assert states(report) == {"n0": NodeState.RUNNING, "n1": NodeState.IDLE}
    assert [node.slots for node in report.nodes] == [1, 0]
    n2 = FakeNode(server, spec, "n2", slots=1)
    await until(lambda: bool(n2.all(Invited)))
    assert states(await look(server))["n2"] is NodeState.STARTING
    await n2.session.report_state(InPlaceState(workers=(Process(0, 0, 1),)))
    await until(lambda: n2.world is not None)
    assert states(await look(server))["n2"] is NodeState.RUNNING


@in_virtual_time
async def test_the_paces_of_the_newest_world_are_shown_by_rank() -> None:
    server = FakeServer()
    first, second = await a_running_job(server, 1, 2, 2)
    await first.session.report_paces([Pace(0, 1, 7, 0.1)])
    await second.session.report_paces([Pace(1, 1, 6, None), Pace(2, 99, 6, 0.1)])
    assert (await look(server)).paces == (Pace(0, 1, 7, 0.1), Pace(1, 1, 6, None))
    assert len(await first.session.read_paces()) == 3
