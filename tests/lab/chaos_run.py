"""A whole run of `chaos`: a lab, three etcd, a job of up to four workers, and what became of it."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.lab.chaos import Chaos, listening, shared_memory, unbalanced
from tests.lab.etcd_trio import EtcdTrio
from tests.lab.host import Host
from tests.lab.job import Job, baguarun_command
from tests.lab.lab import Lab
from tests.lab.steps import ELASTIC_WORKER

HOSTS = 4
BATCH = 8
SAMPLES = 3200
_WIDTH = 64
_START_S = 120.0
_END_S = 180.0
_CALM_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be undergone."""

    seed: int
    seconds: float
    """For which the job is hit."""
    epochs: int
    every_s: float = 10.0
    leader_kills: int = 2
    pace_s: float = 0.1
    """In every step, so that the job lasts."""
    detect_timeout_s: float = 2.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a job."""

    exit_codes: dict[str, int | None]
    """Of the agents that were up in the end, by host; None for one that had to be killed."""
    loss: float
    """On data held out; not a number if the job did not end."""
    problems: list[str] = field(default_factory=list)
    history: list[tuple[float, str, str]] = field(default_factory=list)
    """When what happened to which host, kills of etcd's leader among it."""
    descriptors: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    """Open ones of every process, by its place in the World, in the order counted."""
    steps: int = 0
    logs: str = ""


def undergo(plan: Plan, folder: Path) -> Outcome:
    """The job, hit; `problems` are books that do not balance and whatever it left behind."""
    before = shared_memory()
    with Lab(hosts=HOSTS + 1) as lab:
        etcd = EtcdTrio(lab.hosts[-1], folder / "etcd")
        etcd.start()
        nodes = lab.hosts[:HOSTS]
        ports = {host.name: listening(host) for host in nodes}
        with _job(plan, folder, etcd.url) as job:
            chaos = Chaos(lab, job, etcd, nodes, random.Random(plan.seed))
            chaos.begin()
            job.wait_for_world(HOSTS, _START_S, settled=10)
            chaos.count_descriptors()
            chaos.run(plan.seconds, plan.every_s, plan.leader_kills)
            chaos.count_descriptors()
            well = [host for host in nodes if host.name in chaos.up]
            # Steps cost more while hosts come and go: what is left to do may take as long again.
            give_up_s = time.monotonic() + _END_S + plan.seconds
            codes = {host.name: _exit_code(job, host, give_up_s) for host in well}
            problems = [f"{host.name}: process {pid} was left" for host in well for pid in host.pids()]
            for host in well:
                left = sorted(listening(host) - ports[host.name])
                problems += [f"{host.name}: somebody listens on {address}" for address in left]
            problems += chaos.descriptors.grown()
            logs, steps = job.logs(tail_chars=6000), job.steps.all()
    # Segments of processes that were killed have no name any more, or are removed by the next group made.
    problems += [f"/dev/shm/{name} was left" for name in sorted(shared_memory() - before)]
    problems += unbalanced(steps, SAMPLES, HOSTS * BATCH)
    last = max((step.step for step in steps), default=0)
    if last != plan.epochs * SAMPLES // (HOSTS * BATCH):
        problems.append(f"the last step is {last}")
    return Outcome(
        exit_codes=codes,
        loss=next((step.loss for step in steps if step.step == -1), float("nan")),
        problems=problems,
        history=chaos.history,
        descriptors=chaos.descriptors.counts,
        steps=last,
        logs=logs,
    )


def undisturbed(plan: Plan, seeds: Sequence[int], folder: Path) -> list[float]:
    """The losses of jobs that nothing happens to, by seed."""
    losses = []
    for seed in seeds:
        calm = Plan(seed=seed, seconds=0.0, epochs=plan.epochs, pace_s=0.0)
        with Lab(hosts=HOSTS + 1) as lab:
            etcd = EtcdTrio(lab.hosts[-1], folder / f"etcd-{seed}")
            etcd.start()
            with _job(calm, folder / f"calm-{seed}", etcd.url) as job:
                job.start(*lab.hosts[:HOSTS])
                for host in lab.hosts[:HOSTS]:
                    assert job.wait_for_exit(host, _CALM_S) == 0, job.logs()
                losses.append(next(step.loss for step in job.steps.all() if step.step == -1))
    return losses


def _job(plan: Plan, folder: Path, url: str) -> Job:
    def command(_host: Host) -> list[str]:
        return [
            *(*baguarun_command(), "run", "--store", url, "--job-id", "chaos", "--nnodes", f"1:{HOSTS}"),
            *("--nproc-per-node", "1", "--elastic", "in-place", "--shutdown-timeout", "5"),
            *("--detect-timeout", str(plan.detect_timeout_s), str(ELASTIC_WORKER)),
            # Batch norm learns otherwise from micro-batches of other sizes, and a World of three deals out 5
            # and 6 samples where one of four deals out 8: no calm run would be its peer.
            *("--norm", "layer"),
            *("--width", str(_WIDTH), "--samples", str(SAMPLES), "--batch-size", str(BATCH)),
            *("--epochs", str(plan.epochs), "--seed", str(plan.seed), "--pace-s", str(plan.pace_s)),
            *("--loader-workers", "1", "--digests"),
        ]

    return Job(folder / "job", command)


def _exit_code(job: Job, host: Host, give_up_s: float) -> int | None:
    try:
        return job.wait_for_exit(host, max(give_up_s - time.monotonic(), 1.0))
    except AssertionError:
        return None
