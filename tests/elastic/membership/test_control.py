"""What is asked of a running job from outside, on a store in memory and in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from baguarun.elastic.membership.control import scale_job, stop_job
from baguarun.elastic.membership.events import Dismissed
from baguarun.elastic.membership.records import StopRequest
from baguarun.errors import RetryLaterError, UsageError
from tests.support.fake_cluster import FakeNode, a_spec, until, until_running
from tests.support.fake_store import FakeServer, FakeStore
from tests.support.virtual_time import in_virtual_time

STOP = StopRequest(reason="by hand", exit_code=143)


async def a_running_job(server: FakeServer, min_nodes: int, max_nodes: int, count: int) -> list[FakeNode]:
    """Nodes n0, n1, ... in the order of their age."""
    nodes = []
    for i in range(count):
        nodes.append(FakeNode(server, a_spec(min_nodes, max_nodes), f"n{i}"))
        await asyncio.sleep(0.05)
    await until_running(nodes, 1)
    return nodes


@in_virtual_time
async def test_scaling_returns_at_once_what_the_job_was_before() -> None:
    server = FakeServer()
    nodes = await a_running_job(server, 1, 3, 3)
    before = await scale_job(FakeStore(server), "job", 1)
    assert (before.desired, len(before.nodes)) == (None, 3)
    await asyncio.gather(nodes[1].task, nodes[2].task)
    await until_running(nodes[:1], 2)
    assert (await scale_job(FakeStore(server), "job", 3)).desired == 1


@in_virtual_time
async def test_several_wishes_in_a_row_end_as_the_last_one_says() -> None:
    server = FakeServer()
    store = FakeStore(server)
    nodes = await a_running_job(server, 1, 4, 4)
    for wish in (3, 1, 2):
        await scale_job(store, "job", wish)
    await until(lambda: nodes[0].world is not None and nodes[0].world.num_nodes <= 2)
    spare = FakeNode(server, a_spec(1, 4), "n9")
    await until(lambda: nodes[0].world is not None and nodes[0].world.num_nodes == 2)
    assert nodes[0].all(Dismissed) == []
    await until(lambda: bool(spare.world or spare.waiting))


@in_virtual_time
@pytest.mark.parametrize(
    ("limits", "wish", "message"),
    [
        ((2, 4), 1, "scale job 1: want 2 to 4, the job was started with --nnodes 2:4"),
        ((2, 4), 5, "scale job 5: want 2 to 4, the job was started with --nnodes 2:4"),
        ((2, 2), 3, "scale job 3: want 2, the job was started with --nnodes 2; one started with"),
    ],
)
async def test_a_size_outside_the_range_is_refused_and_nothing_changes(
    limits: tuple[int, int], wish: int, message: str
) -> None:
    server = FakeServer()
    await a_running_job(server, *limits, 2)
    with pytest.raises(UsageError, match=message):
        await scale_job(FakeStore(server), "job", wish)
    assert "/baguarun/job/desired" not in server.entries


@in_virtual_time
async def test_a_job_that_is_over_cannot_be_scaled_and_stopping_it_again_says_how_it_ended() -> None:
    server = FakeServer()
    store = FakeStore(server)
    (node,) = await a_running_job(server, 1, 2, 1)
    await node.done()
    await node.task
    with pytest.raises(UsageError, match=r"job 'job': it has ended already \(succeeded\)"):
        await scale_job(store, "job", 1)
    assert (await stop_job(store, "job", STOP)).success
    assert "/baguarun/job/stop" not in server.entries


@in_virtual_time
async def test_a_wish_for_a_job_whose_nodes_all_died_does_not_reach_its_next_run() -> None:
    server = FakeServer()
    store = FakeStore(server)
    for node in await a_running_job(server, 1, 2, 2):
        await node.die()
    await until(lambda: not server.keys("/baguarun/job/nodes/"))
    for ask in (scale_job(store, "job", 1), stop_job(store, "job", STOP)):
        with pytest.raises(UsageError, match="job 'job': no node of it is here"):
            await ask
    again = FakeNode(server, a_spec(1, 2), "n0")
    await until(lambda: again.world is not None)


@in_virtual_time
async def test_a_job_without_a_leader_is_asked_again_until_it_has_one() -> None:
    server = FakeServer()
    nodes = await a_running_job(server, 1, 2, 2)
    await nodes[0].die()
    server.end_lease(server.entries["/baguarun/job/all/leader"].lease)
    outcome = await stop_job(FakeStore(server), "job", STOP)
    assert (outcome.stopped, outcome.exit_code, outcome.reason) == (True, 143, "by hand")
    await nodes[1].task


@in_virtual_time
async def test_a_leader_that_does_not_answer_is_not_waited_for_for_ever() -> None:
    server = FakeServer()
    (node,) = await a_running_job(server, 1, 2, 1)
    lease = server.entries["/baguarun/job/all/leader"].lease
    node.store.cut()

    async def keep_the_lease() -> None:
        while True:
            server.renew(lease)
            await asyncio.sleep(1.0)

    keeping = asyncio.create_task(keep_the_lease())
    with pytest.raises(RetryLaterError, match="its leader has not answered for 15 s"):
        await stop_job(FakeStore(server), "job", STOP)
    keeping.cancel()
    await node.die()


@in_virtual_time
async def test_a_stop_reaches_nodes_that_stand_by_too() -> None:
    server = FakeServer()
    nodes = await a_running_job(server, 1, 2, 2)
    spare = FakeNode(server, a_spec(1, 2), "n2")
    await until(lambda: "standing by" in spare.waiting)
    await stop_job(FakeStore(server), "job", StopRequest(reason="x", exit_code=137, at_once=True))
    await asyncio.gather(*(node.task for node in (*nodes, spare)))
    assert all(node.finished and node.finished.at_once for node in (*nodes, spare))
