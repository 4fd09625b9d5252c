"""Peak memory of a rank above torch DDP's, by the size of the model, on 4 hosts with a rank each and on 2
hosts with two each, where algorithms that can do so exchange by rail.

What counts is the high-water mark of the resident set (VmHWM), from the start of a fresh process to the end
of some steps with Adam (`sparse` and its peer: SGD with momentum), exchanges of weights and compressed steps
included. The model is large, so that little else is seen; DDP keeps its gradients as views of its buckets,
the leaner of its two ways. Blocks of 64 KiB and more go back to the kernel when they are freed, for
everybody: what of the C library's heap lies idle differs from run to run by as much as is looked for here.
On `--networks loopback` memory that ranks share is counted in each of them.

Needs root for hosts (network namespaces, `tests/lab`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.cases import CASES, case_of, chosen, with_peers
from benchmarks.harness import Report, Row, finish, interleave, parser
from benchmarks.ratios import Summary
from benchmarks.step import HOSTS, LOOPBACK, Network, run_ranks

_CASES = (*CASES, "gradient_allreduce@gloo", "bytegrad@gloo")
_BYTEGRAD = 0.10
_ON_HEAP_BYTES = 64 << 10
_PAIRS = Network("2 hosts of 2, unlimited", hosts=2)
NETWORKS = {"hosts": HOSTS, "pairs": _PAIRS, "loopback": LOOPBACK}


def goes_by_rail(name: str) -> bool:
    """Whether the case does otherwise where hosts have several ranks."""
    algorithm = case_of(name).algorithm
    return algorithm is not None and getattr(algorithm, "hierarchical", False) == "auto"


def contestants(network: Network, names: Sequence[str]) -> list[str]:
    """Those of the cases that tell something on this network, and what they are compared with, first."""
    return with_peers(name for name in names if network is not _PAIRS or goes_by_rail(name))


def rows(network: Network, peaks_mb: Mapping[str, Sequence[float]], model_mb: float) -> list[Row]:
    """One line per case: how far its peak is above its first peer's, in sizes of the model."""
    result = []
    for name, peaks in peaks_mb.items():
        peer = case_of(name).peers[0]
        if name == peer:
            continue
        ours, theirs = Summary.of(peaks), Summary.of(peaks_mb[peer])
        result.append(
            Row(
                what=f"{network.name}: above DDP's peak: {name}",
                peer=_figures(theirs),
                ours=_figures(ours),
                value=100 * (ours.median - theirs.median) / model_mb,
                target=100 * _BYTEGRAD if name.removesuffix("@gloo") == "bytegrad" else None,
                unit=" %",
            )
        )
    return result


def _figures(peak_mb: Summary) -> str:
    return f"{peak_mb.median:.0f} MB ({peak_mb.low:.0f}-{peak_mb.high:.0f})"


def measure(network: Network, name: str) -> dict[str, Any]:
    """The peaks of one job of fresh processes."""
    words = ["benchmarks.memory_worker", "--case", name]
    return run_ranks(network, words, on_heap_bytes=_ON_HEAP_BYTES)[0]


def compete(network: Network, names: Sequence[str], repeats: int) -> list[dict[str, Any]]:
    """The jobs of all contestants, in turns."""
    taken: list[dict[str, Any]] = []

    def run(name: str) -> float:
        taken.append(measure(network, name))
        peak_mb: float = taken[-1]["peak_mb"]
        print(f"{network.name}: {name}: {peak_mb:.0f} MB", flush=True)
        return peak_mb

    interleave({name: lambda name=name: run(name) for name in names}, repeats)  # type: ignore[misc]
    return taken


def main(argv: list[str] | None = None) -> int:
    options = parser("memory", __doc__ or "")
    options.add_argument("--cases", default=",".join(_CASES), help="contestants besides ddp (default all)")
    options.add_argument("--networks", default="hosts,pairs", help=f"of {', '.join(NETWORKS)}")
    options.add_argument("--repeats", type=int, default=None, help="default 3, quick 1")
    args = options.parse_args(argv)
    repeats = args.repeats or (1 if args.quick else 3)
    names = chosen(args.cases)
    report = Report(
        name="memory", title="peak memory above torch DDP's, in parts of the model", quick=args.quick
    )
    for network in [NETWORKS[name] for name in args.networks.split(",")]:
        taken = compete(network, contestants(network, names), repeats)
        report.raw[network.name] = taken
        peaks_mb: dict[str, list[float]] = {}
        for job in taken:
            peaks_mb.setdefault(job["case"], []).append(job["peak_mb"])
        report.facts["model_mb"] = taken[0]["model_mb"]
        report.rows += rows(network, peaks_mb, taken[0]["model_mb"])
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(main())
