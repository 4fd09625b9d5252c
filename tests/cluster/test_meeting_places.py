"""Nodes meet without an etcd of one's own: at a torchrun endpoint, or by a static World."""

from __future__ import annotations

import pytest

from tests.cluster.conftest import START_S, Cluster
from tests.lab.job import Job

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(180)]

LIMIT = {"STEP_LIMIT": "10"}


def _assert_trained_to_the_end(job: Job, cluster: Cluster) -> None:
    nodes = cluster.nodes[:2]
    assert [job.wait_for_exit(node, START_S) for node in nodes] == [0, 0]
    last = {step.node: step.world_size for step in job.steps.all() if step.step == 9}
    assert last == {node.name: 2 for node in nodes}
    assert [node.pids() for node in nodes] == [[], []]


def test_torchruns_own_line_works_though_the_endpoint_starts_last(cluster: Cluster) -> None:
    a, b, _ = cluster.nodes
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{a.address}:29400"]
    with cluster.job("2", meet=meet) as job:
        job.start(b, env=LIMIT)
        job.start(a, env=LIMIT)
        _assert_trained_to_the_end(job, cluster)


def test_a_static_job_needs_no_store(cluster: Cluster) -> None:
    a, b, _ = cluster.nodes
    cluster.etcd.kill()
    meet = ["--master-addr", a.address, "--master-port", "29500"]
    with cluster.job("2", meet=meet) as job:
        job.start(a, env={**LIMIT, "PET_NODE_RANK": "0"})
        job.start(b, env={**LIMIT, "PET_NODE_RANK": "1"})
        _assert_trained_to_the_end(job, cluster)
