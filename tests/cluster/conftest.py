"""A lab of three nodes and a store, and jobs of the real command line on it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.lab import Host, Lab
from tests.lab.job import REPOSITORY, Etcd, Job, baguarun_command
from tests.lab.steps import STEP_WORKER, Step

START_S = 60.0
"""Generous: the tests bound hangs, the benchmarks measure speed."""
DETECT_TIMEOUT_S = 3.0


@dataclass
class Cluster:
    """Nodes `a`, `b`, `c` and the store on a host of its own."""

    lab: Lab
    etcd: Etcd
    scratch: Path
    jobs: list[Job] = field(default_factory=list)

    @property
    def nodes(self) -> list[Host]:
        return self.lab.hosts[:3]

    def job(
        self,
        nnodes: str,
        *,
        options: Sequence[str] = (),
        job_id: str = "job",
        meet: Sequence[str] | None = None,
        detect_timeout_s: float = DETECT_TIMEOUT_S,
        script: Sequence[str] = (str(STEP_WORKER),),
    ) -> Job:
        """A job of one worker per node, nothing started yet; `meet` takes the place of `--store`."""
        where = ["--store", self.etcd.url] if meet is None else list(meet)

        def command(host: Host) -> list[str]:
            return [
                *(*baguarun_command(), "run", "--nnodes", nnodes, "--nproc-per-node", "1", *where),
                *("--job-id", job_id, "--detect-timeout", str(detect_timeout_s), "--shutdown-timeout", "5"),
                *(word.replace("{address}", host.address) for word in options),
                *script,
            ]

        made = Job(self.scratch / f"job-{len(self.jobs)}", command)
        self.jobs.append(made)
        return made


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Lab(hosts=4) as lab:
        made = Cluster(lab, Etcd(lab.hosts[3], tmp_path / "etcd"), tmp_path)
        made.etcd.start()
        yield made
        for job in made.jobs:
            # Shown by pytest when the test failed.
            print(job.logs())


def ask(cluster: Cluster, *words: str) -> str:
    """What a command says on the store's host."""
    command = [*baguarun_command(), *words, "--store", cluster.etcd.url]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = cluster.lab.hosts[3].run(command, env=environ, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def steps_go_on(job: Job, for_s: float) -> list[Step]:
    """The steps of the next `for_s` seconds; fails when any stretch of 5 s has none."""
    began = time.time()
    last = began
    while time.time() < began + for_s:
        step = job.steps.wait_for(lambda step: True, 5.0, since=last)
        assert step is not None, f"no step for 5 s\n{job.logs()}"
        time.sleep(0.2)
        last = max(found.time for found in job.steps.since(began))
    return job.steps.since(began)
