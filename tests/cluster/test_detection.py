"""Nodes that are lost without a word, and the detection time is below what leases give: probes find them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from tests.cluster.conftest import START_S, Cluster, steps_go_on
from tests.lab import Host
from tests.lab.chaos import unbalanced
from tests.lab.job import ETCD_PORT, Job
from tests.lab.steps import ELASTIC_WORKER

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(120)]

FOUND_BY_PROBES = "answers neither its neighbours nor the store"


def freeze_host(job: Job, host: Host) -> None:
    host.freeze()


def cut_host_off(job: Job, host: Host) -> None:
    host.cut()


def power_off(job: Job, host: Host) -> None:
    host.power_off()


def freeze_agent(job: Job, host: Host) -> None:
    host.kill(job.agents[host.name], signal.SIGSTOP)


def kill_agent(job: Job, host: Host) -> None:
    host.kill(job.agents[host.name])


@pytest.mark.parametrize(
    ("lose", "victim"),
    [(freeze_host, 0), (freeze_agent, 1), (kill_agent, 2)],
)
def test_a_lost_node_is_found_by_its_neighbours_whether_it_led_or_not(
    cluster: Cluster, lose: Callable[[Job, Host], None], victim: int
) -> None:
    nodes = cluster.nodes
    with cluster.job("1:3", detect_timeout_s=1.0) as job:
        job.start(nodes[0])
        # The first to arrive leads.
        job.wait_for_world(1, START_S)
        job.start(*nodes[1:])
        job.wait_for_world(3, START_S)
        since = time.time()
        lose(job, nodes[victim])
        others = [node for node in nodes if node is not nodes[victim]]
        while not any(FOUND_BY_PROBES in job.output(node) for node in others):
            assert time.time() < since + START_S, job.logs()
            time.sleep(0.01)
        found_s = time.time() - since
        smaller = job.wait_for_world(2, START_S, since=since)
        stepped_s = smaller.time - since
        print(f"{lose.__name__}({victim}): found in {found_s:.2f} s, new workers step in {stepped_s:.2f} s")


def test_a_frozen_node_that_wakes_before_its_time_costs_nothing(cluster: Cluster) -> None:
    a, b, _ = cluster.nodes
    with cluster.job("1:2", detect_timeout_s=3.0) as job:
        job.start(a, b)
        generation = job.wait_for_world(2, START_S).generation
        b.freeze()
        time.sleep(1.0)
        b.thaw()
        assert {step.generation for step in steps_go_on(job, 3.0)} == {generation}


IN_PLACE = ("--elastic", "in-place")
SAMPLES = 3600
"""Fills whole global batches of one, two or three workers' first batches."""
TRAINING = (
    *(str(ELASTIC_WORKER), "--width", "64", "--loader-workers", "0", "--pace-s", "0.05"),
    *("--samples", str(SAMPLES), "--digests"),
)


def cut_from_its_peers(job: Job, host: Host) -> None:
    """Between its agent and the store all is well."""
    for other in job.hosts:
        if other is not host:
            host.cut_from(other)


def cut_its_worker_off(job: Job, host: Host) -> None:
    """What its agent says to others and to the store goes through."""
    host.cut_tcp_except(ETCD_PORT)


def cut_its_agent_off(job: Job, host: Host) -> None:
    """Its worker trains on with the others until they go on without it."""
    host.cut_udp_and_tcp(ETCD_PORT)


def freeze_its_worker(job: Job, host: Host) -> None:
    os.kill(job.worker(host).pid, signal.SIGSTOP)


def kill_its_worker(job: Job, host: Host) -> None:
    job.kill_worker(host)


@pytest.mark.parametrize(
    ("lose", "victim"),
    [
        (freeze_host, 0),
        (power_off, 1),
        (cut_host_off, 0),
        (cut_from_its_peers, 2),
        (freeze_its_worker, 1),
        (kill_its_worker, 0),
        (cut_its_worker_off, 1),
        (freeze_agent, 2),
        (kill_agent, 0),
        (cut_its_agent_off, 0),
    ],
)
def test_workers_go_on_in_place_without_a_node_worker_or_agent_that_is_lost(
    cluster: Cluster, lose: Callable[[Job, Host], None], victim: int
) -> None:
    nodes = cluster.nodes
    with cluster.job("1:3", options=IN_PLACE, detect_timeout_s=1.0, script=TRAINING) as job:
        job.start(*nodes)
        job.wait_for_world(3, START_S)
        survivors = {job.worker(node).pid for node in nodes if node is not nodes[victim]}
        lost = job.worker(nodes[victim]).pid
        since = time.time()
        lose(job, nodes[victim])
        smaller = job.wait_for_world(2, START_S, since=since, settled=0)
        print(f"in place, {lose.__name__}({victim}): steps again after {smaller.time - since:.2f} s")
        assert {step.pid for step in job.steps.since(since) if step.world_size == 2} <= survivors
        steps = job.steps.all()
        shared = {(step.world_size, step.step) for step in steps if step.pid != lost}
        # Broken off in the step that it has just committed, the others do that step again. Who was first may
        # have trained alone before.
        undone = [
            step for step in steps if step.world_size > 1 and (step.world_size, step.step) not in shared
        ]
        assert len(undone) <= 1
        global_batch = sum(len(step.samples) for step in steps if step.step == 1)
        assert unbalanced([step for step in steps if step not in undone], SAMPLES, global_batch) == []
