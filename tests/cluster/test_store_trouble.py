"""Losing the store pauses membership only: training goes on, and it heals by itself."""

from __future__ import annotations

import time

import pytest

from tests.cluster.conftest import START_S, Cluster, steps_go_on
from tests.lab.job import Job

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(180)]

OUTAGE_S = 20.0
FREEZE_S = 12.0
AFTERMATH_S = 5.0


def _assert_membership_works(cluster: Cluster, job: Job) -> None:
    """A worker killed now is followed by a new World of both nodes, at the price of one restart."""
    killed_at = time.time()
    job.kill_worker(cluster.nodes[1])
    again = job.wait_for_world(2, START_S, since=killed_at + 0.5)
    assert again.restart_count == 1


def test_training_goes_on_while_etcd_is_dead_and_membership_heals_with_it(cluster: Cluster) -> None:
    a, b, _ = cluster.nodes
    with cluster.job("1:2", options=["--max-restarts", "3"]) as job:
        job.start(a, b)
        before = job.wait_for_world(2, START_S)
        cluster.etcd.kill()
        during = steps_go_on(job, OUTAGE_S)
        cluster.etcd.start()
        after = steps_go_on(job, AFTERMATH_S)
        assert {step.generation for step in during + after} == {before.generation}
        assert {step.world_size for step in during + after} == {2}
        _assert_membership_works(cluster, job)


def test_training_goes_on_while_etcd_is_frozen_and_membership_heals_with_it(cluster: Cluster) -> None:
    a, b, _ = cluster.nodes
    with cluster.job("1:2", options=["--max-restarts", "3"]) as job:
        job.start(a, b)
        before = job.wait_for_world(2, START_S)
        cluster.etcd.host.freeze()
        during = steps_go_on(job, FREEZE_S)
        cluster.etcd.host.thaw()
        after = steps_go_on(job, AFTERMATH_S)
        assert {step.generation for step in during + after} == {before.generation}
        _assert_membership_works(cluster, job)


@pytest.mark.parametrize("cut_off", [0, 1])
def test_one_agent_cut_from_etcd_never_makes_two_jobs_and_comes_back(cluster: Cluster, cut_off: int) -> None:
    nodes = cluster.nodes[:2]
    with cluster.job("1:2") as job:
        job.start(nodes[0])
        job.wait_for_world(1, START_S)
        job.start(nodes[1])
        job.wait_for_world(2, START_S)
        nodes[cut_off].cut_from(cluster.etcd.host)
        alone = job.wait_for_world(1, START_S, since=time.time())
        assert alone.node == nodes[1 - cut_off].name
        steps_go_on(job, 3.0)
        # The one cut off has no step after the others went on without it.
        lonely = [step for step in job.steps.all() if step.node == nodes[cut_off].name]
        assert lonely[-1].generation < alone.generation
        healed_at = time.time()
        nodes[cut_off].heal_to(cluster.etcd.host)
        back = job.wait_for_world(2, START_S, since=healed_at)
        assert back.restart_count == 0
