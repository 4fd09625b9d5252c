"""Step time of every algorithm against torch DDP and its hooks, on 4 hosts, or on 2 with 2 ranks each.

The efficiency of a case is what its step would take if only its bytes or its computing counted, by what it
took: the larger of the time of a step alone and of its bytes at the line's rate, as the cost model has it.

Needs root (network namespaces, `tests/lab`); latencies need the lab's delay line.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.harness import Report, Row, finish, parser
from benchmarks.ratios import Summary, paired_ratio
from benchmarks.step import RANKS, Contest, Network, Turns, run_contest

_PEERS = ("ddp_fp16", "ddp_powersgd")
_OURS = (
    "gradient_allreduce",
    "bytegrad",
    "power_sgd",
    "decentralized",
    "low_precision_decentralized",
    "low_precision_decentralized_4bit",
    "local_sgd",
    "diloco",
    "diloco_int8",
    "async_model_average",
)
_BY_RAIL = (
    "gradient_allreduce@gloo",
    "gradient_allreduce+rail@gloo",
    "bytegrad+flat",
    "bytegrad@gloo",
    "bytegrad+flat@gloo",
    "decentralized+flat",
    "local_sgd@gloo",
    "local_sgd+flat@gloo",
)
"""Where a host has several ranks: with and without the hierarchy, which most have by default."""
_RATES = {"unlimited": None, "1000": 1000.0, "100": 100.0}
_SAMPLES_PER_RANK = 32


def networks(hosts: list[int], rates: list[str], delays_ms: list[float]) -> list[Network]:
    """Every combination."""
    found = []
    for count in hosts:
        for rate in rates:
            for delay_ms in delays_ms:
                speed = "unlimited" if _RATES[rate] is None else f"{rate} Mbit/s"
                found.append(
                    Network(
                        f"{count} hosts of {RANKS // count}, {speed}, {delay_ms:g} ms",
                        _RATES[rate],
                        hosts=count,
                        delay_ms=delay_ms or None,
                    )
                )
    return found


def rows(contest: Contest, blocks: list[dict[str, Any]]) -> list[Row]:
    """The table's lines for one network."""
    step_s: dict[str, list[float]] = {case: [] for case in contest.cases}
    moved: dict[str, list[float]] = {case: [] for case in contest.cases}
    for block in sorted(blocks, key=lambda block: block["round"]):
        step_s[block["case"]].append(block["step_s"])
        moved[block["case"]].append(block["sent_bytes_per_step"])
    alone_s = Summary.of(step_s["alone"]).median
    result = []
    for case in contest.cases:
        if case in ("ddp", "alone"):
            continue
        took_s = Summary.of(step_s[case]).median
        ratio = paired_ratio(step_s[case], step_s["ddp"])
        rate_mbit = contest.network.rate_mbit
        wire_s = 0.0 if rate_mbit is None else Summary.of(moved[case]).median * 8e-6 / rate_mbit
        result.append(
            Row(
                what=f"{contest.network.name}: {case} (efficiency {max(alone_s, wire_s) / took_s:.2f}, "
                f"{RANKS * _SAMPLES_PER_RANK / took_s:.0f} samples/s, 95 % under {ratio.upper95:.3f})",
                peer=_figures(step_s["ddp"], moved["ddp"]),
                ours=_figures(step_s[case], moved[case]),
                value=ratio.median,
                target=None,
                unit="x",
            )
        )
    return result


def _figures(step_s: list[float], moved: list[float]) -> str:
    time_ms = Summary.of([value * 1e3 for value in step_s])
    sent_mb = Summary.of(moved).median / 1e6
    return f"{time_ms.median:.1f} ms ({time_ms.low:.1f}-{time_ms.high:.1f}), {sent_mb:.2f} MB"


def main(argv: list[str] | None = None) -> int:
    options = parser("algorithms", __doc__ or "")
    options.add_argument("--hosts", default=f"{RANKS},2", help="numbers of hosts (default %(default)s)")
    options.add_argument("--rates", default=",".join(_RATES), help="Mbit/s (default %(default)s)")
    options.add_argument("--delays-ms", default="0,5", help="one way (default %(default)s)")
    options.add_argument("--cases", default=",".join((*_PEERS, *_OURS)), help="contestants besides ddp")
    options.add_argument(
        "--rail-cases", default=",".join(_BY_RAIL), help="further ones where hosts have several ranks"
    )
    options.add_argument("--rounds", type=int, default=None, help="pairs per network (default 5, quick 2)")
    args = options.parse_args(argv)
    turns = Turns(
        rounds=args.rounds or (2 if args.quick else 5),
        block_s=0.2 if args.quick else 1.0,
        pin=True,
        congestion_control="reno",
    )
    report = Report(
        name="algorithms",
        title=f"a step of {RANKS} ranks against torch DDP on Gloo",
        quick=args.quick,
    )
    places = networks(
        [int(word) for word in args.hosts.split(",")],
        args.rates.split(","),
        [float(word) for word in args.delays_ms.split(",")],
    )
    for network in places:
        cases = dict.fromkeys(("ddp", "alone", *args.cases.split(",")))
        if network.hosts < RANKS:
            cases |= dict.fromkeys(args.rail_cases.split(","))
        contest = Contest(network, "mlp", tuple(cases))
        blocks = run_contest(contest, turns)
        report.raw[network.name] = blocks
        for row in rows(contest, blocks):
            report.rows.append(row)
            print(f"{row.what}: {row.value:.3f}", flush=True)
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(main())
