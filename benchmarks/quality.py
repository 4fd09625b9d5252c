"""Validation loss of every algorithm after as many steps as torch DDP, on the charlm and digits examples.

Four ranks on loopback, seeds in pairs: with one seed all contestants start from the same weights and see the
same batches in the same order, with the same optimizer. Where replicas differ, each rank's own one counts
(`train_worker.py`), with nothing done to bring them together at the end.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from benchmarks.cases import CASES, case_of, chosen
from benchmarks.harness import Report, Row, finish, parser
from benchmarks.step import LOOPBACK, RANKS, run_ranks
from benchmarks.tasks import TASKS

_TASKS = ("charlm", "digits")
_LARGEST_GAP = 1.0
"""In standard deviations of DDP's own losses over the seeds: a gap that another seed makes as well."""


def final_losses(curves: Sequence[Mapping[str, Any]], task: str) -> dict[str, list[float]]:
    """By case, in the order of the seeds."""
    found: dict[str, list[float]] = {}
    for curve in sorted(curves, key=lambda curve: curve["seed"]):
        if curve["task"] == task:
            found.setdefault(curve["case"], []).append(curve["losses"][-1])
    return found


def rows(curves: Sequence[Mapping[str, Any]]) -> list[Row]:
    """One line per task and case, the gap to DDP in DDP's standard deviations; two seeds at least."""
    result = []
    for task in dict.fromkeys(curve["task"] for curve in curves):
        losses = final_losses(curves, task)
        theirs = losses["ddp"]
        target_loss = TASKS[task].target_loss
        for name, ours in losses.items():
            if name == "ddp":
                continue
            gap = (mean(ours) - mean(theirs)) / stdev(theirs)
            trained = sum(loss <= target_loss for loss in ours)
            synchronous = case_of(name).synchronous
            result.append(
                Row(
                    what=f"{task}: {name} ({trained} of {len(ours)} under {target_loss:g})",
                    peer=_figures(theirs),
                    ours=_figures(ours),
                    value=gap,
                    target=_LARGEST_GAP if synchronous else None,
                    unit=" sd",
                )
            )
    return result


def _figures(losses: Sequence[float]) -> str:
    return f"{mean(losses):.4f} +- {stdev(losses):.4f}"


def main(argv: list[str] | None = None) -> int:
    options = parser("quality", __doc__ or "")
    options.add_argument("--tasks", default=",".join(_TASKS), help="default %(default)s")
    options.add_argument("--cases", default=",".join(CASES), help="contestants besides ddp (default all)")
    options.add_argument("--seeds", type=int, default=None, help="at least 2 (default 5, quick 2)")
    args = options.parse_args(argv)
    seeds = args.seeds or (2 if args.quick else 5)
    if seeds < 2:
        raise SystemExit(f"--seeds {seeds}: want 2 at least, to know how far seeds alone move the loss")
    cases = chosen(args.cases)
    report = Report(
        name="quality",
        title=f"validation loss after as many steps as torch DDP, {RANKS} ranks, {seeds} seeds",
        quick=args.quick,
    )
    curves: list[dict[str, Any]] = []
    for seed in range(seeds):
        words = ["benchmarks.train_worker", "--tasks", args.tasks, "--cases", ",".join(cases)]
        words += ["--seed", str(seed), "--every", "40"]
        curves += run_ranks(LOOPBACK, words)
        print(f"seed {seed + 1} of {seeds} done", flush=True)
    report.raw["curves"] = curves
    report.rows += rows(curves)
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(main())
