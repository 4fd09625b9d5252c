"""Validation loss of every algorithm after as many steps as torch DDP, on the charlm and digits examples.

Four ranks on loopback, seeds in pairs: with one seed all contestants start from the same weights and see the
same batches in the same order, and the optimizer is Adam, as that of the DDP that they are compared with. Two
have others. `sparse` is for SGD with momentum, and so its peer, `ddp_sgd`, has that. `qadam` brings an
optimizer of its own in place of Adam, whose variance stands still after a warm-up: its peers are DDP with
Adam and DDP with that very optimizer, `ddp_qadam`. Torch's own hooks are there to compare with, without a
target.

Where replicas differ, each rank's own one counts (`train_worker.py`), with nothing done to bring them
together at the end.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from benchmarks.cases import CASES, case_of, chosen, with_peers
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
    """One line per task, case and peer, the gap in the peer's standard deviations; two seeds at least."""
    result = []
    for task in dict.fromkeys(curve["task"] for curve in curves):
        losses = final_losses(curves, task)
        target_loss = TASKS[task].target_loss
        for name, ours in losses.items():
            case = case_of(name)
            trained = sum(loss <= target_loss for loss in ours)
            is_judged = case.synchronous and not case.is_stock
            for peer in case.peers:
                if peer == name:
                    continue
                theirs = losses[peer]
                to_peer = "" if peer == "ddp" else f" to {peer}"
                result.append(
                    Row(
                        what=f"{task}: {name}{to_peer} ({trained} of {len(ours)} under {target_loss:g})",
                        peer=_figures(theirs),
                        ours=_figures(ours),
                        value=(mean(ours) - mean(theirs)) / stdev(theirs),
                        target=_LARGEST_GAP if is_judged else None,
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
    cases = with_peers(chosen(args.cases))
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
