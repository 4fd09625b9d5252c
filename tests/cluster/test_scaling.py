"""A job that trains is scaled, looked at and stopped from a machine that runs no agent."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.cluster.conftest import START_S, Cluster, ask
from tests.lab import Host
from tests.lab.job import Job

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(180)]


def states(cluster: Cluster) -> dict[str, str]:
    report: dict[str, Any] = json.loads(ask(cluster, "status", "job", "--json"))
    return {node["name"]: node["state"] for node in report["nodes"]}


def until_state(cluster: Cluster, host: Host, state: str) -> None:
    give_up_s = time.monotonic() + START_S
    while (found := states(cluster)).get(host.name) != state:
        assert time.monotonic() < give_up_s, found
        time.sleep(0.2)


def start_one_by_one(job: Job, *hosts: Host) -> None:
    """So that the first is the oldest."""
    for size, host in enumerate(hosts, 1):
        job.start(host)
        job.wait_for_world(size, START_S)


def test_a_training_job_shrinks_and_grows_as_it_is_told(cluster: Cluster) -> None:
    a, b, c = cluster.nodes
    with cluster.job("1:3") as job:
        start_one_by_one(job, a, b, c)
        for size, gone in ((2, c), (1, b)):
            began = time.time()
            ask(cluster, "scale", "job", str(size))
            assert job.wait_for_exit(gone, START_S) == 0
            assert job.wait_for_world(size, START_S, since=began).restart_count == 0
            assert gone.pids() == []
        job.start(b, c)
        until_state(cluster, b, "standby")
        until_state(cluster, c, "standby")
        began = time.time()
        ask(cluster, "scale", "job", "3")
        grown = job.wait_for_world(3, START_S, since=began)
        assert grown.restart_count == 0
        assert job.worker(a).rank == 0, "survivors keep their place before newcomers"
        assert states(cluster) == dict.fromkeys((a.name, b.name, c.name), "running")


def test_a_node_that_cannot_hear_that_it_shall_go_is_left_out_all_the_same(cluster: Cluster) -> None:
    a, b, c = cluster.nodes
    with cluster.job("1:3") as job:
        start_one_by_one(job, a, b, c)
        c.freeze()
        began = time.time()
        ask(cluster, "scale", "job", "2")
        smaller = job.wait_for_world(2, START_S, since=began)
        assert smaller.restart_count == 0
        c.thaw()
        time.sleep(2.0)
        ask(cluster, "scale", "job", "2")
        until_state(cluster, a, "running")
        assert states(cluster)[b.name] == "running"
        late = [step for step in job.steps.since(smaller.time) if step.node == c.name]
        assert late == [], "the frozen node trained on"


def test_a_node_that_is_taken_away_is_replaced_by_the_one_that_stands_by(cluster: Cluster) -> None:
    a, b, c = cluster.nodes
    with cluster.job("2:2") as job:
        job.start(a, b)
        job.wait_for_world(2, START_S)
        job.start(c)
        until_state(cluster, c, "standby")
        job.terminate(b)
        assert job.wait_for_exit(b, START_S) == 143
        # The World that is left has as many nodes as the one to come.
        began = time.time()
        full = job.wait_for_world(2, START_S, since=began, settled=10)
        assert {step.node for step in job.steps.since(full.time - 0.2)} == {a.name, c.name}
        assert full.restart_count == 0


def test_a_stop_from_elsewhere_ends_training_on_every_node_and_leaves_no_process(cluster: Cluster) -> None:
    a, b, c = cluster.nodes
    with cluster.job("1:3") as job:
        job.start(a, b, c)
        job.wait_for_world(3, START_S)
        assert ask(cluster, "stop", "job").startswith("job job: stopped: by `baguarun stop` on ")
        assert [job.wait_for_exit(host, START_S) for host in (a, b, c)] == [143, 143, 143]
        assert [host.pids() for host in (a, b, c)] == [[], [], []]
        assert ask(cluster, "jobs").splitlines()[1].split()[:3] == ["job", "stopped", "0"]
