"""What a loss, a join or a leave costs a running job: resized in place, against restarts by torchrun.

Lab hosts (network namespaces: needs root) run the same script for both launchers, with torchrun from its
checkpoints. A case that does not recover within 90 s counts as never.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.harness import Report, Row, finish, parser
from benchmarks.recovery_accounts import accounts
from benchmarks.recovery_calm import calm_rows
from benchmarks.recovery_events import (
    EVENTS,
    LIGHTHOUSES,
    NEVER,
    SAMPLES,
    Event,
    Running,
    Site,
    Trial,
    join,
    kill_worker,
)
from benchmarks.recovery_wire import state_s, wire_bytes_per_s
from benchmarks.restart import figures
from tests.lab import Lab
from tests.lab.job import Etcd

ALGORITHMS = ("gradient_allreduce", "bytegrad", "qadam", "async_model_average", "diloco")
LAUNCHERS = ("baguarun", "torchrun", "torchft", "torchft-tuned")
_START_CAP_S = 120.0


def suffer(launcher: str, algorithm: str, event: Event, site: Site, rounds: int) -> list[Trial]:
    """`rounds` trials, in one job as long as it is as large as before afterwards, else one each."""
    trials: list[Trial] = []
    while len(trials) < rounds:
        with site.job(launcher, algorithm, event.nnodes) as job:
            job.start(*site.lab.hosts[: event.starting_nodes])
            size = event.starting_nodes * site.per_node
            job.wait_for_world(size, _START_CAP_S, settled=20)
            run = Running(site, job, stays=launcher != "torchrun")
            while len(trials) < rounds:
                trial = event.inflict(run, len(trials))
                trials.append(trial)
                print(f"{launcher} {algorithm}: {event.name}: {describe(trial)}", flush=True)
                if trial.seconds == NEVER or trial.stall_s == NEVER:
                    print(job.logs(tail_chars=2000), file=sys.stderr)
                    break
                if event.inflict is not kill_worker:
                    break
                job.wait_for_world(size, _START_CAP_S, since=time.time())
            if launcher == "baguarun":
                trials[-1].problems += accounts(job.steps.all(), algorithm, SAMPLES)
                for problem in trials[-1].problems:
                    print(f"    {problem}", flush=True)
    return trials


def describe(trial: Trial) -> str:
    text = f"{trial.seconds:.2f} s"
    if trial.stall_s is not None:
        text += f", the others stood {trial.stall_s:.2f} s for the newcomer"
    if trial.newcomer_s is not None:
        text += f", which stepped {trial.newcomer_s:.2f} s after it was ready"
    return text


def rows(event: Event, algorithm: str, site: Site, found: dict[str, list[Trial]]) -> list[Row]:
    """The table's lines about one event."""
    trials = found["baguarun"]
    ours = [trial.seconds for trial in trials]
    peers = {
        name: [trial.seconds for trial in others] for name, others in found.items() if name != "baguarun"
    }
    peer = "; ".join(f"{name} {figures(seconds)}" for name, seconds in peers.items()) or "-"
    what = f"{algorithm}, {site.workers} workers, {event.name}"
    result = []
    if event.inflict is not join:
        bound_s = event.bound_s(site)
        result.append(
            Row(
                what=f"{what}: worst",
                peer=peer,
                ours=figures(ours),
                value=max(ours),
                target=bound_s,
                unit=" s",
            )
        )
    if event.inflict is kill_worker:
        result.append(
            Row(what=f"{what}: median", peer="", ours="", value=median(ours), target=0.5, unit=" s")
        )
    newcomers = site.per_node if event.inflict is join else 1
    for name, target_s, values in (
        (
            "others stood for the newcomer, 0.3 s and the state's on the wire",
            0.3 + state_s(newcomers, site.wire_bytes_per_s),
            [trial.stall_s for trial in trials],
        ),
        ("newcomer, ready to first step", 1.0, [trial.newcomer_s for trial in trials]),
    ):
        seconds = [value for value in values if value is not None]
        if seconds:
            text, worst = figures(seconds), max(seconds)
            result.append(
                Row(what=f"{what}: {name}", peer="", ours=text, value=worst, target=target_s, unit=" s")
            )
    problems = sum(len(trial.problems) for trial in trials)
    result.append(
        Row(what=f"{what}: steps, samples lost or repeated", peer="", ours="", value=problems, target=0)
    )
    return result


def main(argv: list[str] | None = None) -> int:
    options = parser("recovery", __doc__ or "")
    options.add_argument("--events", default=",".join(EVENTS), help=f"of {', '.join(EVENTS)}")
    options.add_argument("--algorithms", default=",".join(ALGORITHMS), help=f"of {', '.join(ALGORITHMS)}")
    options.add_argument("--launchers", default=",".join(LAUNCHERS), help="baguarun and its peers")
    options.add_argument(
        "--torchft", type=Path, help="folder where torchft is installed; without it, no torchft"
    )
    options.add_argument("--per-node", default="1,2", help="workers per host, of two hosts")
    options.add_argument("--rounds", type=int, help="trials of each (default: 50 kills, 3 of the others)")
    options.add_argument("--detect-timeout", type=float, default=1.0)
    options.add_argument(
        "--calm", action=argparse.BooleanOptionalAction, default=True, help="cost of no event"
    )
    args = options.parse_args(argv)
    report = Report(name="recovery", title="losses, joins and leaves of a running job", quick=args.quick)
    for per_node in map(int, args.per_node.split(",")):
        _measure(args, report, per_node)
    return finish(report, args)


def _measure(args: argparse.Namespace, report: Report, per_node: int) -> None:
    with tempfile.TemporaryDirectory() as directory, Lab(hosts=4) as lab:
        etcd = Etcd(lab.hosts[-1], Path(directory) / "etcd")
        site = Site(
            lab=lab,
            etcd=etcd,
            scratch=Path(directory),
            per_node=per_node,
            detect_timeout_s=args.detect_timeout,
            torchft=args.torchft,
            wire_bytes_per_s=wire_bytes_per_s(*lab.hosts[:2]),
        )
        report.raw[f"bytes per second of one stream, {site.workers} workers"] = site.wire_bytes_per_s
        etcd.start()
        launchers = args.launchers.split(",")
        if args.torchft is None:
            launchers = [name for name in launchers if name not in LIGHTHOUSES]
        if args.calm:
            rows_of_calm, raw = calm_rows(site, ALGORITHMS[0], 5.0 if args.quick else 20.0)
            report.rows += rows_of_calm
            report.raw[f"calm, {site.workers} workers"] = raw
        for algorithm, key in itertools.product(args.algorithms.split(","), args.events.split(",")):
            event = EVENTS[key]
            first = algorithm == args.algorithms.split(",")[0]
            rounds = args.rounds or (1 if args.quick else 50 if key == "kill" and first else 3)
            found: dict[str, list[Trial]] = {}
            for launcher in launchers:
                # What the peers do does not depend on the algorithm.
                if launcher == "baguarun" or first:
                    turns = rounds if launcher == "baguarun" else min(rounds, 3)
                    found[launcher] = suffer(launcher, algorithm, event, site, turns)
            report.rows += rows(event, algorithm, site, found)
            report.raw[f"{algorithm}, {site.workers} workers, {event.name}"] = {
                launcher: [vars(trial) for trial in trials] for launcher, trials in found.items()
            }


if __name__ == "__main__":
    sys.exit(main())
