"""Worker failures are charged to the job, and every agent ends with the first one and its exit code."""

from __future__ import annotations

import time

import pytest

from tests.cluster.conftest import START_S, Cluster
from tests.lab.job import Job

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(180)]


def _last_report(job: Job, cluster: Cluster, node: int) -> str:
    """What the agent printed after its last line about generations: the report."""
    return job.output(cluster.nodes[node])[-2500:]


def test_restarts_are_counted_for_the_job_and_not_per_node(cluster: Cluster) -> None:
    a, b, _ = cluster.nodes
    with cluster.job("2", options=["--max-restarts", "1"]) as job:
        job.start(a, b)
        job.wait_for_world(2, START_S)
        killed_at = time.time()
        job.kill_worker(a)
        again = job.wait_for_world(2, START_S, since=killed_at + 0.5)
        assert again.restart_count == 1
        job.kill_worker(b)
        assert [job.wait_for_exit(node, START_S) for node in (a, b)] == [137, 137]
        for node in (0, 1):
            report = _last_report(job, cluster, node)
            assert "SIGKILL" in report and f"node {b.name}" in report
            assert "1 of 1 restarts" in report
        assert [node.pids() for node in (a, b)] == [[], []]


def test_every_agent_ends_with_the_first_failure_and_its_exit_code(cluster: Cluster) -> None:
    a, b, c = cluster.nodes
    with cluster.job("3", options=["--max-restarts", "0"]) as job:
        job.start(a, b, c, env={"STEP_FAIL": "1:5:7"})
        assert [job.wait_for_exit(node, START_S) for node in (a, b, c)] == [7, 7, 7]
        culprit = next(step for step in job.steps.all() if step.rank == 1)
        for node in range(3):
            report = _last_report(job, cluster, node)
            assert f"rank 1 on node {culprit.node}" in report
            assert f"pid {culprit.pid}" in report
            assert "exited with code 7" in report


def test_kills_in_a_row_are_all_recovered_from(cluster: Cluster) -> None:
    a, b, _ = cluster.nodes
    with cluster.job("2", options=["--max-restarts", "100"]) as job:
        job.start(a, b)
        job.wait_for_world(2, START_S)
        for number in range(4):
            killed_at = time.time()
            job.kill_worker((a, b)[number % 2])
            again = job.wait_for_world(2, START_S, since=killed_at + 0.5, settled=number)
            assert again.restart_count == number + 1


def test_another_job_under_the_same_id_is_refused_and_the_first_one_goes_on(cluster: Cluster) -> None:
    a, b, _ = cluster.nodes
    with cluster.job("1:2") as first, cluster.job("1:2", options=["--max-restarts", "7"]) as second:
        first.start(a)
        first.wait_for_world(1, START_S)
        second.start(b)
        assert second.wait_for_exit(b, START_S) == 2
        message = second.output(b)
        assert "job" in message and "max-restarts" in message
        assert b.pids() == []
        refused_at = time.time()
        assert first.steps.wait_for(lambda step: True, START_S, since=refused_at) is not None
        assert first.worker(a).generation == 1


def test_an_unreachable_store_ends_in_one_message_that_names_it(cluster: Cluster) -> None:
    a, _, _ = cluster.nodes
    a.cut_from(cluster.etcd.host)
    with cluster.job("1:2") as job:
        job.start(a)
        assert job.wait_for_exit(a, START_S) != 0
        assert cluster.etcd.host.address in job.output(a)
        assert "Traceback" not in job.output(a)
        assert a.pids() == []
