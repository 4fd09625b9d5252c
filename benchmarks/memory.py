"""Peak memory of a rank above torch DDP's, by the size of the model, on 4 hosts with a rank each.

What counts is the high-water mark of the resident set (VmHWM), from the start of a fresh process to the end
of some steps with Adam, exchanges of weights included. The model is large, so that little else is seen; DDP
keeps its gradients as views of its buckets, the leaner of its two ways. On `--network loopback` memory that
ranks share is counted in each of them.

Needs root for hosts (network namespaces, `tests/lab`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.cases import CASES, chosen
from benchmarks.harness import Report, Row, finish, interleave, parser
from benchmarks.ratios import Summary
from benchmarks.step import HOSTS, LOOPBACK, Network, run_ranks

_CASES = (*CASES, "gradient_allreduce@gloo", "bytegrad@gloo")
_BYTEGRAD = 0.10
_NETWORKS = {"hosts": HOSTS, "loopback": LOOPBACK}


def rows(peaks_mb: Mapping[str, Sequence[float]], model_mb: float) -> list[Row]:
    """One line per case: how far its peak is above DDP's, in sizes of the model."""
    theirs = Summary.of(peaks_mb["ddp"])
    result = []
    for name, peaks in peaks_mb.items():
        if name == "ddp":
            continue
        ours = Summary.of(peaks)
        result.append(
            Row(
                what=f"above DDP's peak: {name}",
                peer=_figures(theirs),
                ours=_figures(ours),
                value=100 * (ours.median - theirs.median) / model_mb,
                target=100 * _BYTEGRAD if name.startswith("bytegrad") else None,
                unit=" %",
            )
        )
    return result


def _figures(peak_mb: Summary) -> str:
    return f"{peak_mb.median:.0f} MB ({peak_mb.low:.0f}-{peak_mb.high:.0f})"


def measure(network: Network, name: str) -> dict[str, Any]:
    """The peaks of one job of fresh processes."""
    return run_ranks(network, ["benchmarks.memory_worker", "--case", name])[0]


def main(argv: list[str] | None = None) -> int:
    options = parser("memory", __doc__ or "")
    options.add_argument("--cases", default=",".join(_CASES), help="contestants besides ddp (default all)")
    options.add_argument("--network", choices=_NETWORKS, default="hosts")
    options.add_argument("--repeats", type=int, default=None, help="default 3, quick 1")
    args = options.parse_args(argv)
    repeats = args.repeats or (1 if args.quick else 3)
    taken: list[dict[str, Any]] = []

    def run(name: str) -> float:
        taken.append(measure(_NETWORKS[args.network], name))
        print(f"{name}: {taken[-1]['peak_mb']:.0f} MB", flush=True)
        peak_mb: float = taken[-1]["peak_mb"]
        return peak_mb

    peaks_mb = interleave(
        {name: lambda name=name: run(name) for name in chosen(args.cases)},  # type: ignore[misc]
        repeats,
    )
    model_mb = taken[0]["model_mb"]
    report = Report(
        name="memory",
        title=f"peak memory above torch DDP's, in parts of the model's {model_mb:.0f} MB",
        quick=args.quick,
    )
    report.raw["jobs"] = taken
    report.rows += rows(peaks_mb, model_mb)
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(main())
