"""Half an hour of training that is hit every ten seconds: does it end, with the loss of a calm run?

Kills, frozen, cut-off and lost hosts, leaves and joins, drawn from a seed, in a lab (needs root). The leader
of three etcd is killed twice.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import mean, stdev

from benchmarks.harness import Report, Row, finish, parser
from tests.lab.chaos_run import BATCH, HOSTS, SAMPLES, Plan, undergo, undisturbed

_PACE_S = 0.15


def main(argv: list[str] | None = None) -> int:
    options = parser("chaos", __doc__ or "")
    options.add_argument("--minutes", type=float, help="default 30, quick 2")
    options.add_argument("--seed", type=int, default=0)
    args = options.parse_args(argv)
    seconds = 60 * (args.minutes or (2.0 if args.quick else 30.0))
    plan = Plan(seed=args.seed, seconds=seconds, epochs=epochs_lasting(seconds), pace_s=_PACE_S)
    report = Report(name="chaos", title="a job that is hit every ten seconds", quick=args.quick)
    with tempfile.TemporaryDirectory() as directory:
        outcome = undergo(plan, Path(directory))
        calm = undisturbed(plan, range(1, 3 if args.quick else 6), Path(directory))
    for problem in outcome.problems:
        print(problem, flush=True)
    if set(outcome.exit_codes.values()) != {0}:
        print(outcome.logs, file=sys.stderr)
    report.rows += [
        Row(
            what=f"agents that end well, after {len(outcome.history)} blows in {outcome.steps} steps",
            peer="",
            ours=str(outcome.exit_codes),
            value=sum(code == 0 for code in outcome.exit_codes.values()),
            target=len(outcome.exit_codes),
            at_least=True,
        ),
        Row(
            what="steps or samples lost or repeated, things left behind",
            peer="",
            ours="",
            value=len(outcome.problems),
            target=0,
        ),
        Row(
            what="loss on data held out, distance from calm runs in their sd",
            peer=f"{mean(calm):.4f} (sd {stdev(calm):.4f})",
            ours=f"{outcome.loss:.4f}",
            value=abs(outcome.loss - mean(calm)) / stdev(calm),
            target=2.0,
        ),
    ]
    report.raw = {
        "history": outcome.history,
        "descriptors": outcome.descriptors,
        "calm": calm,
        "problems": outcome.problems,
    }
    return finish(report, args)


def epochs_lasting(seconds: float) -> int:
    """So many that the job goes on a little longer than it is hit, if all its hosts are there."""
    return round(1.1 * seconds / (_PACE_S * SAMPLES / (HOSTS * BATCH)))


if __name__ == "__main__":
    sys.exit(main())
