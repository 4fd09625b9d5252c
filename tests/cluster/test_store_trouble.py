"""Losing the store pauses membership only: training goes on, and it heals by itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.cluster.conftest import START_S, Cluster, steps_go_on
from tests.lab.chaos import unbalanced
from tests.lab.job import Job
from tests.lab.steps import ELASTIC_WORKER

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(180)]

OUTAGE_S = 20.0
FREEZE_S = 12.0
AFTERMATH_S = 5.0
BATCH = 8
SAMPLES = 100 * 3 * BATCH
TRAINS_IN_PLACE = [
    *(str(ELASTIC_WORKER), "--width", "64", "--samples", str(SAMPLES), "--batch-size", str(BATCH)),
    *("--loader-workers", "0", "--pace-s", "0.05", "--digests"),
]


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


@contextmanager
def _store_away(cluster: Cluster, trouble: str) -> Iterator[None]:
    """Etcd is `killed`, and then started on the data that it had, or `frozen` and thawed."""
    if trouble == "killed":
        cluster.etcd.kill()
    else:
        cluster.etcd.host.freeze()
    yield
    if trouble == "killed":
        cluster.etcd.start()
    else:
        cluster.etcd.host.thaw()


def _in_place_job(cluster: Cluster) -> Job:
    return cluster.job("1:3", options=["--elastic", "in-place"], script=TRAINS_IN_PLACE)


def _assert_replaced(job: Job, cluster: Cluster, pids: dict[str, int], since: float) -> None:
    """After `since` all train together again, the worker of `b` in a new process, and the books balance."""
    _, b, _ = cluster.nodes
    found = job.steps.wait_for(
        lambda step: step.node == b.name and step.pid != pids[b.name] and step.world_size == 3,
        START_S,
        since=since,
    )
    assert found is not None, job.logs()
    job.wait_for_world(3, START_S, since=time.time(), settled=found.step + 5)
    for host in cluster.nodes:
        assert (job.worker(host).pid == pids[host.name]) == (host is not b)
    assert unbalanced(job.steps.all(), SAMPLES, 3 * BATCH) == []


@pytest.mark.parametrize("trouble", ["killed", "frozen"])
def test_a_worker_lost_while_etcd_is_away_is_replaced_in_place_once_it_is_back(
    cluster: Cluster, trouble: str
) -> None:
    with _in_place_job(cluster) as job:
        job.start(*cluster.nodes)
        before = job.wait_for_world(3, START_S, settled=20)
        pids = {host.name: job.worker(host).pid for host in cluster.nodes}
        with _store_away(cluster, trouble):
            during = steps_go_on(job, 2.0)
            assert {step.generation for step in during} == {before.generation}
            job.kill_worker(cluster.nodes[1])
            time.sleep(FREEZE_S)
            back_at = time.time()
        _assert_replaced(job, cluster, pids, since=back_at)


@pytest.mark.parametrize("trouble", ["killed", "frozen"])
def test_training_in_place_stays_in_its_world_while_etcd_is_away(cluster: Cluster, trouble: str) -> None:
    with _in_place_job(cluster) as job:
        job.start(*cluster.nodes)
        before = job.wait_for_world(3, START_S, settled=20)
        pids = {host.name: job.worker(host).pid for host in cluster.nodes}
        with _store_away(cluster, trouble):
            during = steps_go_on(job, FREEZE_S)
        after = steps_go_on(job, AFTERMATH_S)
        assert {step.generation for step in during + after} == {before.generation}
        assert {step.pid for step in during + after} == set(pids.values())
        killed_at = time.time()
        job.kill_worker(cluster.nodes[1])
        _assert_replaced(job, cluster, pids, since=killed_at)
