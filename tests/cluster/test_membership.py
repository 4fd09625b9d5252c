"""Nodes join, leave, die, freeze and come back; the rest of the job goes on without a charged restart."""

from __future__ import annotations

import time

import pytest

from tests.cluster.conftest import START_S, Cluster
from tests.lab.job import Job
from tests.lab.steps import Step

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(180)]


def _assert_one_job_at_a_time(job: Job) -> None:
    """No generation makes a step after the first step of a later one: one job never becomes two."""
    first: dict[int, float] = {}
    for step in job.steps.all():
        first.setdefault(step.generation, step.time)
    for step in job.steps.all():
        later = [moment for generation, moment in first.items() if generation > step.generation]
        assert all(step.time <= moment for moment in later), f"{step} after the next World's first step"


def _assert_uncharged(job: Job, step: Step) -> None:
    assert step.restart_count == 0, f"a membership change was charged as a restart\n{job.logs()}"


def test_a_node_that_joins_a_running_job_makes_the_world_larger(cluster: Cluster) -> None:
    a, b, _ = cluster.nodes
    with cluster.job("1:2") as job:
        job.start(a)
        job.wait_for_world(1, START_S)
        job.start(b)
        grown = job.wait_for_world(2, START_S)
        _assert_uncharged(job, grown)
        assert job.worker(a).rank == 0, "survivors keep their place before newcomers"
        _assert_one_job_at_a_time(job)


def test_a_node_asked_to_leave_goes_and_the_other_goes_on(cluster: Cluster) -> None:
    a, b, _ = cluster.nodes
    with cluster.job("1:2") as job:
        job.start(a, b)
        job.wait_for_world(2, START_S)
        job.terminate(b)
        assert job.wait_for_exit(b, START_S) == 143
        _assert_uncharged(job, job.wait_for_world(1, START_S))
        assert b.pids() == []
        _assert_one_job_at_a_time(job)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_node_that_dies_is_left_out_whether_it_led_or_not(cluster: Cluster, victim: int) -> None:
    nodes = cluster.nodes[:2]
    with cluster.job("1:2") as job:
        job.start(nodes[0])
        # The first to arrive leads.
        job.wait_for_world(1, START_S)
        job.start(nodes[1])
        job.wait_for_world(2, START_S)
        nodes[victim].crash()
        alone = job.wait_for_world(1, START_S, since=time.time())
        assert alone.node == nodes[1 - victim].name
        _assert_uncharged(job, alone)
        _assert_one_job_at_a_time(job)


def test_a_node_that_loses_power_is_left_out_though_nobody_hears_it_go(cluster: Cluster) -> None:
    a, b, _ = cluster.nodes
    with cluster.job("1:2") as job:
        job.start(a, b)
        job.wait_for_world(2, START_S)
        b.power_off()
        alone = job.wait_for_world(1, START_S)
        assert alone.node == a.name
        _assert_uncharged(job, alone)


def test_a_frozen_node_is_left_out_and_joins_again_when_it_wakes(cluster: Cluster) -> None:
    a, b, _ = cluster.nodes
    with cluster.job("1:2") as job:
        job.start(a, b)
        before = job.wait_for_world(2, START_S)
        frozen_pid = job.worker(b).pid
        b.freeze()
        _assert_uncharged(job, job.wait_for_world(1, START_S))
        thawed_at = time.time()
        b.thaw()
        after = job.wait_for_world(2, START_S, since=thawed_at)
        assert after.generation > before.generation
        _assert_uncharged(job, after)
        assert frozen_pid not in {step.pid for step in job.steps.since(thawed_at)}
        _assert_one_job_at_a_time(job)


def test_a_spare_node_above_the_maximum_takes_a_dead_ones_place(cluster: Cluster) -> None:
    a, b, c = cluster.nodes
    with cluster.job("2:2") as job:
        job.start(a, b)
        job.wait_for_world(2, START_S)
        job.start(c)
        b.crash()
        full = job.wait_for_world(2, START_S, since=time.time())
        assert {step.node for step in job.steps.since(full.time - 0.2)} == {a.name, c.name}
        _assert_uncharged(job, full)


def test_nodes_that_finish_leave_with_success(cluster: Cluster) -> None:
    a, b, c = cluster.nodes
    with cluster.job("3") as job:
        job.start(a, b, c, env={"STEP_LIMIT": "20"})
        assert [job.wait_for_exit(node, START_S) for node in (a, b, c)] == [0, 0, 0]
        assert [node.pids() for node in (a, b, c)] == [[], [], []]
        finished = {(step.node, step.step) for step in job.steps.all()}
        assert finished == {(node.name, number) for node in (a, b, c) for number in range(20)}
