"""Nothing happens, but all cores are busy: is anybody taken for lost?

A job trains on two lab hosts (needs root); beside it, four processes probe each other as agents do, each with
an event loop that is held up now and then, and processes that do nothing but compute keep every core busy. A
suspicion alone costs nobody its place (the leader asks first); a World that is left is a false alarm.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from baguarun.elastic.membership.probe import Peer
from baguarun.elastic.membership.prober import UdpProber
from baguarun.elastic.membership.settings import MembershipSettings
from benchmarks.harness import Report, Row, finish, parser
from tests.lab import Host, Lab
from tests.lab.job import Etcd, Job, baguarun_command
from tests.lab.steps import ELASTIC_WORKER, Step

AGENTS = 4
LOAD_PER_CORE = 1
_START_CAP_S = 300.0
_MOST_STANDING_S = 10.0
"""A job whose last step is longer ago has not been calm, but ended."""
_HICCUP_S = 0.05
"""An agent's event loop that parses, or collects garbage, holds the interpreter for so long each second."""


@dataclass(frozen=True)
class Heard:
    """What one agent noticed about the others."""

    suspicions: int
    longest_silence_s: float


def compute_for_ever() -> None:
    number = 1
    while True:
        number = number * 48271 % 2147483647


def probe_others(pipe: Connection, name: str, settings: MembershipSettings, seconds: float) -> None:
    """One agent: tells where it answers, is told of the others, and reports what it noticed."""
    prober = UdpProber("127.0.0.1", settings.probe_interval_s, settings.suspect_s)
    pipe.send(Peer(name, "127.0.0.1", prober.port, prober.key))
    others = [peer for peer in pipe.recv() if peer.node_id != name]
    prober.watch("benchmark", others)
    suspected: set[str] = set()
    suspicions, longest_s = 0, 0.0
    end_s = time.monotonic() + seconds
    hiccup_s = time.monotonic() + 1.0
    while time.monotonic() < end_s:
        time.sleep(settings.probe_interval_s)
        if time.monotonic() > hiccup_s:
            hiccup_s = time.monotonic() + 1.0
            while time.monotonic() < hiccup_s - 1.0 + _HICCUP_S:
                pass
        for peer in others:
            silence_s = prober.silence_s(peer.node_id) or 0.0
            longest_s = max(longest_s, silence_s)
            if silence_s < settings.suspect_s:
                suspected.discard(peer.node_id)
            elif peer.node_id not in suspected:
                suspected.add(peer.node_id)
                suspicions += 1
    # Nobody stops while others still listen.
    pipe.send(Heard(suspicions, longest_s))
    pipe.recv()
    prober.stop()


class TrainingJob:
    """Two hosts with two workers each; `steps` are those of the time that was watched."""

    def __init__(self, detect_timeout_s: float) -> None:
        self.steps: list[Step] = []
        self.logs = ""
        self.ended_s = 0.0
        """When nobody watched any more, by the clock of the steps."""
        self.is_over = threading.Event()
        """Set: nobody wants to know any more."""
        self._detect_timeout_s = detect_timeout_s

    def watch(self, seconds: float, has_begun: threading.Event) -> None:
        with tempfile.TemporaryDirectory() as folder, Lab(hosts=3) as lab:
            etcd = Etcd(lab.hosts[-1], Path(folder) / "etcd")
            etcd.start()

            def command(_host: Host) -> list[str]:
                return [
                    *(*baguarun_command(), "run", "--store", etcd.url, "--job-id", "calm"),
                    *("--nnodes", "2", "--nproc-per-node", "2", "--elastic", "in-place"),
                    *("--detect-timeout", str(self._detect_timeout_s), str(ELASTIC_WORKER)),
                    *("--width", "64", "--loader-workers", "1", "--pace-s", "0.05"),
                ]

            with Job(Path(folder) / "job", command) as job:
                job.start(*lab.hosts[:2])
                job.wait_for_world(4, _START_CAP_S)
                has_begun.set()
                began_s = time.time()
                self.is_over.wait(seconds)
                self.ended_s = time.time()
                self.steps = job.steps.since(began_s)
                self.logs = job.logs(tail_chars=4000)


def run(settings: MembershipSettings, seconds: float) -> list[Heard]:
    """What agents hear of each other for `seconds`, with every core busy meanwhile."""
    context = multiprocessing.get_context("spawn")
    load = [
        context.Process(target=compute_for_ever, daemon=True)
        for _ in range(LOAD_PER_CORE * (os.cpu_count() or 1))
    ]
    pipes = []
    agents = []
    for number in range(AGENTS):
        ours, theirs = context.Pipe()
        agents.append(context.Process(target=probe_others, args=(theirs, f"n{number}", settings, seconds)))
        pipes.append(ours)
    try:
        for process in (*agents, *load):
            process.start()
        peers = [pipe.recv() for pipe in pipes]
        for pipe in pipes:
            pipe.send(peers)
        heard: list[Heard] = [pipe.recv() for pipe in pipes]
        for pipe in pipes:
            pipe.send(None)
        for process in agents:
            process.join(10)
        return heard
    finally:
        for process in (*agents, *load):
            process.kill()


def main(argv: list[str] | None = None) -> int:
    arguments = parser("false_alarms", __doc__ or "")
    arguments.add_argument("--seconds", type=float, default=1800.0, help="how long (1800; quick: 10)")
    arguments.add_argument("--detect-timeout", type=float, default=1.0, help="seconds (1)")
    options = arguments.parse_args(argv)
    settings = MembershipSettings(detect_timeout_s=options.detect_timeout)
    seconds = 10.0 if options.quick else options.seconds
    report = Report(
        name="false_alarms",
        title=f"suspicions in {seconds:g} s, detect-timeout {options.detect_timeout:g} s, all cores busy",
        quick=options.quick,
    )
    job, has_begun = TrainingJob(options.detect_timeout), threading.Event()
    watching = threading.Thread(target=job.watch, args=(seconds, has_begun))
    watching.start()
    try:
        if not has_begun.wait(_START_CAP_S):
            raise RuntimeError("the job did not begin to train")
        heard = run(settings, seconds)
    except BaseException:
        job.is_over.set()
        raise
    finally:
        watching.join()
    report.raw["heard"] = [vars(found) for found in heard]
    generations = sorted({step.generation for step in job.steps})
    if len(generations) > 1:
        print(job.logs, file=sys.stderr)
    # The pauses of one worker: as long as its World was not disturbed.
    of_one = [step.time for step in job.steps if step.rank == 0]
    if job.ended_s - of_one[-1] > _MOST_STANDING_S:
        print(job.logs, file=sys.stderr)
        raise RuntimeError(f"the job's last step was {job.ended_s - of_one[-1]:.0f} s before the end")
    pause_s = max(later - earlier for earlier, later in itertools.pairwise(of_one))
    report.rows.append(
        Row(
            what=f"Worlds left by a job of 4 workers in {len(of_one)} steps",
            peer="",
            ours=f"longest step {pause_s:.2f} s",
            value=float(len(generations) - 1),
            target=0.0,
        )
    )
    longest_s = max(found.longest_silence_s for found in heard)
    report.rows.append(
        Row(
            what=f"suspicions among {AGENTS} agents that are well (suspect after {settings.suspect_s:g} s)",
            peer="",
            ours=f"longest silence {longest_s:.2f} s",
            value=float(sum(found.suspicions for found in heard)),
            target=0.0,
        )
    )
    return finish(report, options)


if __name__ == "__main__":
    sys.exit(main())
