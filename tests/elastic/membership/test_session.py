"""Whole jobs on a store in memory, in virtual time: what each node's launcher is told."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace

import pytest

from baguarun.elastic.membership.control import stop_job
from baguarun.elastic.membership.events import Dismissed, Expelled, Prepare, Start, StoreBack, StoreLost
from baguarun.elastic.membership.job import JobSpec
from baguarun.elastic.membership.records import InPlaceState, Process, StopRequest, desired_to_json
from baguarun.elastic.membership.store import Put
from baguarun.elastic.membership.stragglers import Pace
from baguarun.errors import UsageError
from tests.support.fake_cluster import FakeNode, a_spec, until, until_running
from tests.support.fake_store import FakeServer, FakeStore
from tests.support.virtual_time import in_virtual_time


async def _one_after_the_other(server: FakeServer, spec: JobSpec, count: int) -> list[FakeNode]:
    """Nodes n0, n1, ... in the order of their age: n0 leads."""
    nodes = []
    for i in range(count):
        nodes.append(FakeNode(server, spec, f"n{i}"))
        await asyncio.sleep(0.05)
    await until_running(nodes, 1)
    return nodes


def _now() -> float:
    return asyncio.get_running_loop().time()


@in_virtual_time
async def test_a_single_node_forms_a_world_alone() -> None:
    node = FakeNode(FakeServer(), a_spec(1, 1), "n0", slots=3)
    await until_running([node], 1)
    world = node.world
    assert world is not None
    assert (world.world_size, world.master_addr, world.master_port) == (3, "addr-n0", 29501)


@in_virtual_time
async def test_nodes_are_ranked_by_the_natural_order_of_their_names() -> None:
    server, spec = FakeServer(), a_spec(3, 3)
    nodes = [FakeNode(server, spec, name, slots=slots) for name, slots in (("n10", 1), ("n2", 2), ("n1", 4))]
    await until_running(nodes, 1)
    ranks = {node.name: node.world.node_rank for node in nodes if node.world}
    assert ranks == {"n1": 0, "n2": 1, "n10": 2}


@in_virtual_time
async def test_requested_node_ranks_come_first() -> None:
    server, spec = FakeServer(), a_spec(3, 3)
    nodes = [FakeNode(server, spec, "a"), FakeNode(server, spec, "b", node_rank=1)]
    nodes.append(FakeNode(server, spec, "c", node_rank=0))
    await until_running(nodes, 1)
    assert [node.world.node_rank for node in nodes if node.world] == [2, 1, 0]


@in_virtual_time
async def test_below_min_nodes_people_are_told_how_many_are_missing_and_the_join_timeout_ends_it() -> None:
    node = FakeNode(FakeServer(), a_spec(2, 2), "n0")
    await until(lambda: node.waiting == "1 of 2 nodes are here")
    await node.task
    assert node.finished is not None
    assert not node.finished.success
    assert node.finished.reason == "1 of 2 nodes are here after waiting 60 s"
    assert node.finished.exit_code == 1


@in_virtual_time
async def test_between_min_and_max_the_world_forms_after_a_quiet_moment() -> None:
    server, spec = FakeServer(), a_spec(1, 4)
    nodes = [FakeNode(server, spec, "n0")]
    await asyncio.sleep(0.7)
    nodes.append(FakeNode(server, spec, "n1"))
    await until_running(nodes, 1)
    assert all(len(node.all(Start)) == 1 for node in nodes)


@in_virtual_time
async def test_a_job_succeeds_when_all_members_are_done_and_all_nodes_hear_it() -> None:
    server, spec = FakeServer(), a_spec(2, 2)
    nodes = [FakeNode(server, spec, f"n{i}") for i in range(2)]
    await until_running(nodes, 1)
    await nodes[0].done()
    await asyncio.sleep(60)
    assert nodes[0].finished is None
    await nodes[1].done()
    await asyncio.gather(*(node.task for node in nodes))
    for node in nodes:
        assert node.finished is not None and node.finished.success and node.finished.exit_code == 0
    assert await nodes[0].session.wait_until_alone(1.0)
    assert server.keys("/baguarun/job/nodes/") == []


@in_virtual_time
async def test_a_done_node_that_vanishes_counts_as_done() -> None:
    server, spec = FakeServer(), a_spec(2, 2)
    nodes = [FakeNode(server, spec, f"n{i}") for i in range(2)]
    await until_running(nodes, 1)
    await nodes[0].done()
    await nodes[0].die()
    await asyncio.sleep(20)
    assert nodes[1].world is not None
    await nodes[1].done()
    await nodes[1].task
    assert nodes[1].finished is not None and nodes[1].finished.success


@in_virtual_time
async def test_a_failure_costs_a_restart_on_all_nodes_until_the_budget_is_used_up() -> None:
    server, spec = FakeServer(), a_spec(2, 2, max_restarts=2)
    nodes = [FakeNode(server, spec, f"n{i}") for i in range(2)]
    for generation in (1, 2, 3):
        await until_running(nodes, generation)
        world = nodes[0].world
        assert world is not None and world.restart_count == generation - 1
        await nodes[1].fail()
    await asyncio.gather(*(node.task for node in nodes))
    for node in nodes:
        end = node.finished
        assert end is not None and end.failure is not None and not end.success
        assert (end.failure.node, end.failure.generation, end.exit_code) == ("n1", 3, 7)
        assert end.reason.endswith("after 2 of 2 restarts")


@in_virtual_time
async def test_without_restarts_left_the_verdict_needs_no_lease_to_expire_when_all_agents_answer() -> None:
    server, spec = FakeServer(), a_spec(3, 3)
    nodes = [FakeNode(server, spec, f"n{i}") for i in range(3)]
    await until_running(nodes, 1)
    failed_at = _now()
    await nodes[2].fail()
    await nodes[0].task
    assert _now() - failed_at < 1.0
    assert nodes[0].finished is not None and nodes[0].finished.failure is not None


@in_virtual_time
async def test_a_failure_caused_by_a_lost_node_is_a_membership_change_and_not_charged() -> None:
    server, spec = FakeServer(), a_spec(2, 3)
    nodes = [FakeNode(server, spec, f"n{i}") for i in range(3)]
    await until_running(nodes, 1)
    await nodes[2].die()
    await nodes[0].fail()
    await nodes[1].fail()
    await until_running(nodes[:2], 2)
    assert nodes[0].world is not None and nodes[0].world.restart_count == 0


@in_virtual_time
async def test_a_charge_is_refunded_when_a_lost_member_was_the_cause() -> None:
    server, spec = FakeServer(), a_spec(2, 3, max_restarts=3)
    nodes = [FakeNode(server, spec, f"n{i}") for i in range(3)]
    await until_running(nodes, 1)
    await nodes[0].die()
    await nodes[2].fail()
    await until(lambda: nodes[2].world is not None and nodes[2].world.num_nodes == 2)
    assert nodes[2].world is not None and nodes[2].world.restart_count == 0


@in_virtual_time
async def test_the_root_cause_is_the_worker_killed_by_a_signal() -> None:
    server, spec = FakeServer(), a_spec(3, 3)
    nodes = [FakeNode(server, spec, f"n{i}") for i in range(3)]
    await until_running(nodes, 1)
    await nodes[0].fail()
    await nodes[1].fail(signal=signal.SIGABRT)
    await nodes[2].fail(signal=signal.SIGKILL)
    await nodes[0].task
    end = nodes[0].finished
    assert end is not None and end.failure is not None
    assert (end.failure.node, end.exit_code) == ("n2", 137)


@in_virtual_time
async def test_an_address_in_use_is_tried_again_without_a_charge() -> None:
    server, spec = FakeServer(), a_spec(2, 2)
    nodes = [FakeNode(server, spec, f"n{i}") for i in range(2)]
    await until_running(nodes, 1)
    await nodes[0].fail(retry_free=True)
    await until_running(nodes, 2)
    assert nodes[0].world is not None
    assert (nodes[0].world.restart_count, nodes[0].world.master_port) == (0, 29502)


@in_virtual_time
async def test_a_polite_leave_re_forms_at_once_and_survivors_keep_their_order() -> None:
    server, spec = FakeServer(), a_spec(2, 4)
    nodes = [FakeNode(server, spec, f"n{i}") for i in range(4)]
    await until_running(nodes, 1)
    left_at = _now()
    await nodes[1].session.leave("preempted")
    await nodes[1].task
    await until_running([nodes[0], nodes[2], nodes[3]], 2)
    assert _now() - left_at < 1.0
    assert [n.world.node_rank for n in nodes if n.world and n is not nodes[1]] == [0, 1, 2]
    assert nodes[1].finished is None


@in_virtual_time
async def test_the_leader_leaves_politely_and_the_next_takes_over_at_once() -> None:
    server, spec = FakeServer(), a_spec(2, 3)
    nodes = await _one_after_the_other(server, spec, 3)
    left_at = _now()
    await nodes[0].session.leave("preempted")
    await until_running(nodes[1:], 2)
    assert _now() - left_at < 1.0


@in_virtual_time
async def test_the_leader_dies_and_the_rest_re_form_within_the_lease() -> None:
    server, spec = FakeServer(), a_spec(2, 3)
    nodes = await _one_after_the_other(server, spec, 3)
    died_at = _now()
    await nodes[0].die()
    await until_running(nodes[1:], 2)
    assert _now() - died_at < 5.0 + 1.0


@in_virtual_time
async def test_leaving_below_min_nodes_waits_for_another_node() -> None:
    server, spec = FakeServer(), a_spec(2, 2)
    nodes = [FakeNode(server, spec, f"n{i}") for i in range(2)]
    await until_running(nodes, 1)
    await nodes[0].session.leave("preempted")
    await until(lambda: nodes[1].waiting == "1 of 2 nodes are here")
    newcomer = FakeNode(server, spec, "n7")
    await until_running([nodes[1], newcomer], 2)
    assert nodes[1].world is not None and nodes[1].world.node_rank == 0


@in_virtual_time
async def test_newcomers_join_a_running_job_behind_the_old_nodes() -> None:
    server, spec = FakeServer(), a_spec(1, 3)
    old = FakeNode(server, spec, "n9")
    await until_running([old], 1)
    new = [FakeNode(server, spec, "n1"), FakeNode(server, spec, "n0")]
    await until_running([old, *new], 2)
    assert [node.world.node_rank for node in (old, *new) if node.world] == [0, 2, 1]
    assert old.all(Prepare)[-1].reason == "n0, n1 joined"


@in_virtual_time
async def test_all_workers_of_a_job_share_a_secret_and_those_of_the_next_have_another() -> None:
    server, spec = FakeServer(), a_spec(1, 3)
    nodes = await _one_after_the_other(server, spec, 2)
    await nodes[0].session.leave("SIGTERM")
    nodes.append(FakeNode(server, spec, "n2"))
    await until(lambda: nodes[2].world is not None and nodes[2].world.world_size == 4)
    [secret] = {event.world.net_secret for node in nodes for event in node.all(Start)}
    assert len(secret) == 32
    await asyncio.gather(nodes[1].done(), nodes[2].done())
    await asyncio.gather(nodes[1].task, nodes[2].task)
    again = FakeNode(server, spec, "n1")
    await until(lambda: again.world is not None)
    assert again.world is not None
    assert again.world.net_secret not in ("", secret)


@in_virtual_time
async def test_nodes_beyond_max_stand_by_and_take_the_place_of_one_that_goes() -> None:
    server, spec = FakeServer(), a_spec(2, 2)
    nodes = [FakeNode(server, spec, f"n{i}") for i in range(2)]
    await until_running(nodes, 1)
    spare = FakeNode(server, spec, "n2")
    await until(lambda: (spare.waiting or "").startswith("all 2 places are taken (another job wants another"))
    await nodes[0].session.leave("preempted")
    await until_running([nodes[1], spare], 2)


@in_virtual_time
async def test_a_job_about_to_finish_takes_nobody_in() -> None:
    server, spec = FakeServer(), a_spec(1, 3)
    nodes = [FakeNode(server, spec, f"n{i}") for i in range(2)]
    await until_running(nodes, 1)
    await nodes[0].done()
    late = FakeNode(server, spec, "n2")
    await until(lambda: "about to finish" in late.waiting)
    await nodes[1].done()
    await late.task
    assert late.finished is not None and late.finished.success
    assert late.all(Prepare) == []


@in_virtual_time
async def test_two_jobs_with_one_id_are_told_apart_and_the_first_goes_on() -> None:
    server = FakeServer()
    first = FakeNode(server, a_spec(1, 2, digest="first"), "n0")
    await until_running([first], 1)
    second = FakeNode(server, a_spec(1, 2, digest="second"), "n1")
    with pytest.raises(UsageError, match=r"`train.py --first`.*`train.py --second`.*--job-id"):
        await second.task
    await asyncio.sleep(30)
    assert first.world is not None and first.world.generation == 1
    assert server.keys("/baguarun/job/nodes/") == ["/baguarun/job/nodes/id-n0"]


@in_virtual_time
async def test_the_same_job_of_one_node_started_twice_is_refused_and_the_first_goes_on() -> None:
    server, spec = FakeServer(), a_spec(1, 1)
    first = FakeNode(server, spec, "n0")
    await until_running([first], 1)
    second = FakeNode(server, spec, "n1")
    with pytest.raises(UsageError, match=r"'job' runs already .*--job-id, or --nnodes 1:2"):
        await second.task
    assert first.world is not None and first.world.generation == 1


@in_virtual_time
async def test_a_job_of_one_node_goes_on_where_its_node_is_started_again_after_a_crash() -> None:
    server, spec = FakeServer(), a_spec(1, 1)
    first = FakeNode(server, spec, "n0")
    await until_running([first], 1)
    await first.die()
    await until_running([FakeNode(server, spec, "n1")], 2)


@in_virtual_time
async def test_a_finished_job_is_history_and_its_id_can_be_used_again() -> None:
    server = FakeServer()
    for digest in ("first", "second"):
        nodes = [FakeNode(server, a_spec(2, 2, max_restarts=1, digest=digest), f"n{i}") for i in range(2)]
        await until_running(nodes, 1)
        await nodes[0].fail()
        await until_running(nodes, 2)
        await nodes[0].fail()
        await asyncio.gather(*(node.task for node in nodes))
        assert nodes[0].finished is not None
        assert nodes[0].finished.reason.endswith("after 1 of 1 restarts")


@in_virtual_time
async def test_a_job_that_was_killed_on_all_nodes_starts_afresh() -> None:
    server = FakeServer()
    nodes = [FakeNode(server, a_spec(2, 2, max_restarts=1), f"n{i}") for i in range(2)]
    await until_running(nodes, 1)
    await nodes[0].fail()
    await until_running(nodes, 2)
    for node in nodes:
        await node.die()
    await asyncio.sleep(30)
    again = [FakeNode(server, a_spec(2, 2, max_restarts=1, digest="other"), f"n{i}") for i in range(2)]
    await until_running(again, 1)
    assert again[0].world is not None and again[0].world.restart_count == 0


@in_virtual_time
async def test_a_job_that_is_stopped_ends_for_all_with_the_given_exit_code() -> None:
    server, spec = FakeServer(), a_spec(2, 2)
    nodes = [FakeNode(server, spec, f"n{i}") for i in range(2)]
    await until_running(nodes, 1)
    await stop_job(FakeStore(server), "job", StopRequest(reason="Ctrl-C on n1", exit_code=130))
    await asyncio.gather(*(node.task for node in nodes))
    for node in nodes:
        assert node.finished is not None
        assert (node.finished.reason, node.finished.exit_code) == ("Ctrl-C on n1", 130)
        assert (node.finished.stopped, node.finished.at_once) == (True, False)


@in_virtual_time
async def test_a_node_id_in_use_is_refused() -> None:
    server, spec = FakeServer(), a_spec(1, 2)
    first = FakeNode(server, spec, "n0")
    await until_running([first], 1)
    double = FakeNode(server, spec, "n0")
    with pytest.raises(UsageError, match="id-n0"):
        await double.task
    assert first.world is not None and first.world.generation == 1


@in_virtual_time
async def test_a_restarted_agent_waits_for_its_old_lease_and_joins_as_a_newcomer() -> None:
    server, spec = FakeServer(), a_spec(2, 2)
    nodes = [FakeNode(server, spec, f"n{i}") for i in range(2)]
    await until_running(nodes, 1)
    await nodes[0].die()
    again = FakeNode(server, spec, "n0")
    await until_running([nodes[1], again], 2)
    assert nodes[1].world is not None and nodes[1].world.node_rank == 0


@in_virtual_time
async def test_a_store_that_is_away_pauses_membership_only() -> None:
    server, spec = FakeServer(), a_spec(2, 2)
    nodes = [FakeNode(server, spec, f"n{i}") for i in range(2)]
    await until_running(nodes, 1)
    server.freeze()
    await asyncio.sleep(20)
    server.restart()
    await asyncio.sleep(30)
    for node in nodes:
        assert node.world is not None and node.world.generation == 1
        assert len(node.all(StoreLost)) == len(node.all(StoreBack)) == 1


@in_virtual_time
async def test_a_store_that_is_full_costs_words_and_no_node(caplog: pytest.LogCaptureFixture) -> None:
    server = FakeServer()
    spec = replace(a_spec(1, 2, max_restarts=9), in_place=True)
    n0, n1 = FakeNode(server, spec, "n0", slots=1), FakeNode(server, spec, "n1", slots=1)
    await until_running([n0, n1], 1)
    n0.store.is_full = n1.store.is_full = True
    for _ in range(2):
        await n1.session.report_paces([Pace(1, 1, 7, 0.1)])
    assert caplog.text.count("database space exceeded") == 1
    lost = asyncio.create_task(n1.session.report_state(InPlaceState(lost=(Process(0, 1),))))
    await asyncio.sleep(100.0)
    assert not (lost.done() or n0.task.done() or n1.task.done())
    assert caplog.text.count("database space exceeded") == 2
    n0.store.is_full = n1.store.is_full = False
    await lost
    await n1.session.report_paces([Pace(1, 1, 7, 0.1)])
    assert await n1.session.read_paces() == (Pace(1, 1, 7, 0.1),)
    await until(lambda: n0.world is not None and n0.world.generation == 2)


@in_virtual_time
async def test_a_lease_is_known_to_run_no_longer_than_the_store_keeps_it() -> None:
    server, spec = FakeServer(), a_spec(2, 2)
    nodes = [FakeNode(server, spec, f"n{i}") for i in range(2)]
    await until_running(nodes, 1)
    await asyncio.sleep(30)
    ttl_s = nodes[0].session._settings.lease_ttl_s
    assert all(0 < node.session.lease_left_s <= ttl_s for node in nodes)
    server.freeze()
    await asyncio.sleep(ttl_s)
    assert all(node.session.lease_left_s == 0 for node in nodes)
    server.thaw()
    await asyncio.sleep(30)
    assert all(node.session.lease_left_s > 0 for node in nodes)


@in_virtual_time
async def test_leases_that_ended_while_the_store_was_frozen_are_registered_again() -> None:
    server, spec = FakeServer(), a_spec(2, 3)
    nodes = [FakeNode(server, spec, f"n{i}") for i in range(3)]
    await until_running(nodes, 1)
    server.freeze()
    await asyncio.sleep(20)
    server.thaw()
    await asyncio.sleep(30)
    for node in nodes:
        assert node.world is not None and node.world.generation == 1, node.events
        assert node.all(Expelled) == []
    assert len(server.keys("/baguarun/job/nodes/")) == 3
    await nodes[1].fail()
    await nodes[0].task


@in_virtual_time
async def test_a_node_that_does_not_come_back_after_a_gap_is_lost() -> None:
    server, spec = FakeServer(), a_spec(2, 3)
    nodes = [FakeNode(server, spec, f"n{i}") for i in range(3)]
    await until_running(nodes, 1)
    server.freeze()
    await nodes[2].die()
    await asyncio.sleep(20)
    server.thaw()
    await until_running(nodes[:2], 2)


@in_virtual_time
async def test_a_store_that_lost_its_data_is_told_what_the_agents_know() -> None:
    server, spec = FakeServer(), a_spec(2, 2, max_restarts=3)
    nodes = [FakeNode(server, spec, f"n{i}") for i in range(2)]
    await until_running(nodes, 1)
    await nodes[0].fail()
    await until_running(nodes, 2)
    server.freeze()
    await asyncio.sleep(3)
    server.lose_data()
    await until_running(nodes, 3)
    for rank, node in enumerate(nodes):
        assert node.world is not None
        assert (node.world.node_rank, node.world.restart_count) == (rank, 1)
        assert len({event.world.net_secret for event in node.all(Start)}) == 1


@in_virtual_time
async def test_a_frozen_node_is_left_out_expelled_when_it_thaws_and_comes_back_as_a_newcomer() -> None:
    server, spec = FakeServer(), a_spec(1, 2)
    nodes = await _one_after_the_other(server, spec, 2)
    nodes[0].store.stall()
    await until_running(nodes[1:], 2)
    assert nodes[0].world is not None, "it cannot know yet"
    nodes[0].store.mend()
    await until_running([nodes[1], nodes[0]], 3)
    assert len(nodes[0].all(Expelled)) == 1
    assert nodes[1].world is not None and nodes[1].world.node_rank == 0


@in_virtual_time
async def test_a_node_whose_link_is_cut_is_expelled_after_the_others_went_on() -> None:
    server, spec = FakeServer(), a_spec(1, 3)
    nodes = [FakeNode(server, spec, f"n{i}") for i in range(3)]
    await until_running(nodes, 1)
    nodes[1].store.cut()
    await until_running([nodes[0], nodes[2]], 2)
    nodes[1].store.mend()
    await until(lambda: len(nodes[1].all(Expelled)) == 1)
    await until_running(nodes, 3)


@in_virtual_time
async def test_a_leader_that_was_frozen_publishes_nothing() -> None:
    server, spec = FakeServer(), a_spec(1, 3)
    nodes = await _one_after_the_other(server, spec, 3)
    nodes[0].store.stall()
    await nodes[2].session.leave("now the leader would have something to publish")
    await until(lambda: nodes[1].world is not None and nodes[1].world.num_nodes == 1)
    nodes[0].store.mend()
    await until(lambda: nodes[0].world is not None and nodes[0].world.num_nodes == 2)
    generations = [event.generation for event in nodes[1].all(Prepare)]
    assert generations == sorted(set(generations)), "one generation was published twice"


@in_virtual_time
async def test_a_leader_that_freezes_in_the_act_ends_no_job_when_it_thaws() -> None:
    server, spec = FakeServer(), a_spec(1, 2)
    nodes = await _one_after_the_other(server, spec, 2)
    nodes[0].store.stall_at = "/baguarun/job/all/outcome"
    await nodes[1].fail()
    await until_running(nodes[1:], 2)
    nodes[0].store.mend()
    await until_running([nodes[1], nodes[0]], 3)
    assert server.puts["/baguarun/job/all/outcome"] == 0


@in_virtual_time
async def test_lost_replies_do_no_harm() -> None:
    server, spec = FakeServer(), a_spec(2, 3, max_restarts=9)
    nodes = [FakeNode(server, spec, f"n{i}") for i in range(3)]
    for node in nodes:
        node.store.lost_replies = 2
    await until_running(nodes, 1)
    for node in nodes:
        node.store.lost_replies = 3
    await nodes[1].fail()
    await until(lambda: all(node.world is not None and node.world.restart_count >= 1 for node in nodes))


@in_virtual_time
async def test_compacted_history_is_read_afresh() -> None:
    server, spec = FakeServer(), a_spec(2, 3, max_restarts=9)
    nodes = await _one_after_the_other(server, spec, 3)
    nodes[2].store.stall()
    await nodes[0].fail()
    await until(lambda: server.keys("/baguarun/job/all/world/") == ["/baguarun/job/all/world/2"])
    server.compact()
    nodes[2].store.mend()
    await until_running(nodes, 2)


@in_virtual_time
async def test_old_generations_leave_nothing_behind() -> None:
    server, spec = FakeServer(), a_spec(2, 3, max_restarts=99)
    nodes = [FakeNode(server, spec, f"n{i}") for i in range(3)]
    for generation in range(1, 30):
        await until_running(nodes, generation)
        await nodes[generation % 3].fail()
    await until_running(nodes, 30)
    assert len(server.entries) < 25, server.keys()


def _scale(server: FakeServer, num_nodes: int) -> None:
    server.transact([], [Put("/baguarun/job/desired", desired_to_json(num_nodes))])


@in_virtual_time
async def test_scaled_down_the_youngest_leave_politely_and_scaled_up_spares_come_in() -> None:
    server = FakeServer()
    nodes = await _one_after_the_other(server, a_spec(1, 3), 3)
    _scale(server, 2)
    await nodes[2].task
    (dismissed,) = nodes[2].all(Dismissed)
    assert dismissed.reason == "the job is scaled to 2 of at most 3 nodes; n2 must go"
    await until_running(nodes[:2], 2)
    spare = FakeNode(server, a_spec(1, 3), "n3")
    await until(lambda: spare.waiting == "the job is scaled to 2 of at most 3 nodes; standing by")
    _scale(server, 3)
    await until_running([*nodes[:2], spare], 3)
    world = nodes[0].world
    assert world is not None and world.restart_count == 0
    assert not any(node.all(Expelled) for node in (*nodes, spare))


@in_virtual_time
async def test_a_leader_that_is_scaled_away_leaves_and_another_one_goes_on() -> None:
    server, spec = FakeServer(), a_spec(1, 2)
    nodes = await _one_after_the_other(server, spec, 2)
    await nodes[0].session.leave("preempted")
    await until_running([nodes[1]], 2)
    old_hand = FakeNode(server, spec, "n2")
    await until_running([nodes[1], old_hand], 3)
    server.end_lease(server.entries["/baguarun/job/nodes/id-n1"].lease)  # the leader, and young from here on
    await until(lambda: "/baguarun/job/nodes/id-n1" in server.entries)
    _scale(server, 1)
    await nodes[1].task
    assert len(nodes[1].all(Dismissed)) == 1
    await until_running([old_hand], 4)


@in_virtual_time
async def test_a_new_leader_knows_whom_the_last_one_has_asked_to_go() -> None:
    server = FakeServer()
    nodes = await _one_after_the_other(server, a_spec(1, 3), 3)
    nodes[2].store.stall()
    _scale(server, 2)
    await until(lambda: "/baguarun/job/row/id-n2/word" in server.entries)
    await nodes[0].die()
    await until(lambda: nodes[1].world is not None and nodes[1].world.num_nodes == 1)
    nodes[2].store.mend()
    await nodes[2].task
    assert server.puts["/baguarun/job/row/id-n2/word"] == 1


@in_virtual_time
async def test_nodes_that_died_before_their_first_world_do_not_stand_in_a_new_commands_way() -> None:
    server = FakeServer()
    early = FakeNode(server, a_spec(2, 3), "n0")
    await until(lambda: early.waiting == "1 of 2 nodes are here")
    _scale(server, 2)
    await early.die()
    await until(lambda: not server.keys("/baguarun/job/nodes/"))
    late = FakeNode(server, a_spec(1, 1, digest="other"), "n1")
    await until_running([late], 1)
    assert "/baguarun/job/desired" not in server.entries
