"""A real training script, resized in place: nobody is left, and one is slow."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from baguarun.errors import NO_PROGRESS_EXIT_CODE
from tests.cluster.conftest import START_S, Cluster, ask
from tests.lab.job import ETCD_PORT
from tests.lab.steps import ELASTIC_WORKER

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(180)]

CHECKPOINT_EVERY = 50
"""Steps, of `elastic_worker.py`."""
SCRIPT = [str(ELASTIC_WORKER), "--width", "64", "--loader-workers", "0"]
IN_PLACE = ["--elastic", "in-place"]


def test_the_newest_checkpoint_is_gone_on_with_when_all_workers_are_lost_at_once(
    cluster: Cluster, tmp_path: Path
) -> None:
    script = [*SCRIPT, "--digests", "--pace-s", "0.05", "--checkpoints", str(tmp_path / "checkpoints")]
    with cluster.job("3", options=IN_PLACE, script=script) as job:
        job.start(*cluster.nodes)
        job.wait_for_world(3, START_S, settled=2 * CHECKPOINT_EVERY + 20)
        victims = {job.worker(host).pid for host in cluster.nodes}
        assert len(victims) == 3
        killed_at = time.time()
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        job.wait_for_world(3, START_S, since=killed_at + 1.0, settled=3 * CHECKPOINT_EVERY)
        steps = [step for step in job.steps.all() if step.step > 0]
        first_life = [step for step in steps if step.pid in victims]
        second_life = [step for step in steps if step.pid not in victims]
        last = max(step.step for step in first_life)
        said = "".join(job.output(host) for host in cluster.nodes)
        [checkpoint] = map(int, re.findall(r"baguarun: going on from step-(\d+)\n", said))
        # The newest may not have been whole yet.
        assert last - 2 * CHECKPOINT_EVERY < checkpoint <= last and checkpoint % CHECKPOINT_EVERY == 0
        assert min(step.step for step in second_life) == checkpoint + 1
        # What is done again has the bits that it had.
        weights = {step.step: step.weights for step in first_life}
        again = [step for step in second_life if step.step <= last]
        assert again and all(step.weights == weights[step.step] for step in again)


def test_two_nodes_that_need_each_other_outlive_a_cut_of_some_seconds_and_not_one_that_lasts(
    cluster: Cluster,
) -> None:
    """Workers do not reach each other; their agents do, and the store."""
    first, second = cluster.nodes[:2]
    options = [*IN_PLACE, "--join-timeout", "20"]
    script = [*SCRIPT, "--pace-s", "0.05"]
    with cluster.job("2", options=options, script=script, detect_timeout_s=0.5) as job:
        job.start(first, second)
        job.wait_for_world(2, START_S)
        workers = {job.worker(host).pid for host in (first, second)}
        second.cut_tcp_except(ETCD_PORT)
        time.sleep(8.0)
        second.heal()
        job.wait_for_world(2, START_S, since=time.time())
        assert {job.worker(host).pid for host in (first, second)} == workers
        second.cut_tcp_except(ETCD_PORT)
        for host in (first, second):
            assert job.wait_for_exit(host, 2 * START_S) == NO_PROGRESS_EXIT_CODE
            last = job.output(host).splitlines()[-1]
            assert re.search(r"no progress: communication broke [5-9] times in \d\d+ s .*on node", last)


def test_a_worker_that_is_slower_than_the_others_is_named(cluster: Cluster) -> None:
    slow = cluster.nodes[2]
    with cluster.job("3", options=IN_PLACE, script=SCRIPT) as job:
        for host in cluster.nodes:
            job.start(host, env={"PACE_S": "0.2" if host is slow else "0.05"})
        job.wait_for_world(3, START_S)
        rank = job.worker(slow).rank
        first = next(host for host in cluster.nodes if job.worker(host).rank == 0)
        give_up_at = time.monotonic() + START_S
        while "is a straggler" not in job.output(first):
            assert time.monotonic() < give_up_at, job.logs()
            time.sleep(0.2)
        said = [line for line in job.output(first).splitlines() if "is a straggler" in line]
        [busy_s] = re.findall(rf"rank {rank} is a straggler: busy for ([\d.]+) s", said[0])
        assert len(said) == 1 and float(busy_s) >= 0.2
        paces = [line.split() for line in ask(cluster, "status", "job").splitlines() if "0." in line]
        assert [words[0] for words in paces if words[-1] == "straggler"] == [str(rank)]
