"""Seconds of training until the validation loss is low enough, against torch DDP, on hosts at 100 Mbit/s.

The clock runs from the first step on, warm-up included, and stops at the first point of the curve, one every
five steps, that is not above the target. baguarun's algorithms run on its own transport and, where `@gloo`
stands behind the name, on Gloo.

Needs root (network namespaces, `tests/lab`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.cases import chosen
from benchmarks.harness import Report, Row, finish, parser
from benchmarks.ratios import Summary
from benchmarks.step import FAST_ETHERNET, run_ranks
from benchmarks.tasks import TASKS

_TASK = "charlm_wide"
_POWERSGD = "ddp_powersgd"
_CASES = (
    "ddp_fp16",
    _POWERSGD,
    "gradient_allreduce",
    "bytegrad",
    "bytegrad@gloo",
    "power_sgd",
    "decentralized_shift_one",
    "local_sgd",
    "diloco",
    "diloco@gloo",
    "async_model_average",
)
_EVERY = 5
_LIKE_DDP, _STEPS_LIKE_DDP = ("ddp", "ddp_fp16", "gradient_allreduce", "bytegrad"), 90
"""Those whose losses are DDP's step by step: they are at the target after some 70 steps, which are long."""
_BEST, _BEST_TO_POWERSGD, _BYTEGRAD = 0.12, 0.70, 0.30
"""The targets: the best algorithm's time by DDP's, by that of DDP with PowerSGD, and ByteGrad's by DDP's."""


def time_to(target_loss: float, seconds: Sequence[float], losses: Sequence[float]) -> float:
    """When the curve first comes down to `target_loss`; infinite if never.

    Not between points: where weights are averaged now and then, the loss falls in that very step.
    """
    reached = (second for second, loss in zip(seconds, losses, strict=True) if loss <= target_loss)
    return next(reached, math.inf)


def times_s(curves: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Seconds to the target by case, in the order of the seeds."""
    found: dict[str, list[float]] = {}
    for curve in sorted(curves, key=lambda curve: curve["seed"]):
        target_loss = TASKS[curve["task"]].target_loss
        found.setdefault(curve["case"], []).append(time_to(target_loss, curve["seconds"], curve["losses"]))
    return found


def rows(curves: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Every case by DDP, pair by pair of a seed, and the best of ours by DDP and by DDP with PowerSGD.

    Raises ValueError if DDP itself did not get there: then there is nothing to compare with.
    """
    times = times_s(curves)
    if math.inf in times["ddp"]:
        raise ValueError("DDP did not reach the target loss; want more steps, or a target that it reaches")
    ours = [name for name in times if not name.startswith("ddp")]
    result = [
        _row(f"to DDP: {name}", times, name, "ddp", _BYTEGRAD if name.startswith("bytegrad") else None)
        for name in times
        if name != "ddp"
    ]
    if ours:
        best = min(ours, key=lambda name: Summary.of(_ratios(times, name, "ddp")).median)
        result.append(_row(f"best: {best} to DDP", times, best, "ddp", _BEST))
        if _POWERSGD in times:
            result.append(_row(f"best: {best} to PowerSGD", times, best, _POWERSGD, _BEST_TO_POWERSGD))
    return result


def _row(what: str, times: Mapping[str, list[float]], name: str, peer: str, target: float | None) -> Row:
    ratio = Summary.of(_ratios(times, name, peer))
    return Row(
        what=f"{what} (ratios {ratio.low:.3f}-{ratio.high:.3f})",
        peer=_figures(times[peer]),
        ours=_figures(times[name]),
        value=ratio.median,
        target=target,
        unit="x",
    )


def _ratios(times: Mapping[str, list[float]], name: str, peer: str) -> list[float]:
    """Of one seed each; infinite where `name` never got there, 0 where only `peer` did not."""
    return [
        math.inf if math.isinf(one) else one / other
        for one, other in zip(times[name], times[peer], strict=True)
    ]


def _figures(seconds: Sequence[float]) -> str:
    summary = Summary.of(seconds)
    return f"{summary.median:.1f} s ({summary.low:.1f}-{summary.high:.1f})"


def main(argv: list[str] | None = None) -> int:
    options = parser("time_to_loss", __doc__ or "")
    options.add_argument(
        "--cases", default=",".join(_CASES), help="contestants besides ddp (default %(default)s)"
    )
    options.add_argument("--seeds", type=int, default=None, help="default 3, quick 1")
    args = options.parse_args(argv)
    seeds = args.seeds or (1 if args.quick else 3)
    cases = chosen(args.cases)
    task = TASKS[_TASK]
    report = Report(
        name="time_to_loss",
        title=f"seconds to a validation loss of {task.target_loss:g}, {FAST_ETHERNET.name}, {seeds} seeds",
        quick=args.quick,
    )
    curves: list[dict[str, Any]] = []
    for seed in range(seeds):
        for name in cases:
            words = ["benchmarks.train_worker", "--tasks", _TASK, "--cases", name]
            words += ["--seed", str(seed), "--every", str(_EVERY)]
            if name.removesuffix("@gloo") in _LIKE_DDP:
                words += ["--steps", str(_STEPS_LIKE_DDP)]
            curves += run_ranks(FAST_ETHERNET, words)
            took_s = time_to(task.target_loss, curves[-1]["seconds"], curves[-1]["losses"])
            print(f"seed {seed}, {name}: {took_s:.1f} s", flush=True)
    report.raw["curves"] = [{**curve, "network": FAST_ETHERNET.name} for curve in curves]
    report.rows += rows(curves)
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(main())
