"""Step time of every algorithm against torch DDP and its hooks, on 4 hosts, or on 2 with 2 ranks each.

The efficiency of a case is what its step would take at least, by the cost model (`cost_model.py`), by what it
took. The parts of a step alone, which the model has, are measured in jobs of four processes that have nothing
else in them, one before the others and one after them. The bytes that the NIC counted, the headers of its
packets aside, must be the model's: 5 % off fails the run. Targets are in `algorithm_targets.py`.

How much a step grows by latency is the median of pairs, too: jobs on networks that differ by their latency
alone are there at once and hand a baton on after each turn. It is measured against the shortest latency that
there is: against no delay line at all, what that takes of the cores is part of it. So growth is given once
more without what the cores of all hosts worked longer in the turn with latency, each contestant's own.

Needs root (network namespaces, `tests/lab`); latencies need the lab's delay line.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks.algorithm_targets import Measured, judge, judge_latency
from benchmarks.cost_model import Cluster, Gradients
from benchmarks.harness import Report, Row, finish, parser, save
from benchmarks.ratios import paired_ratio
from benchmarks.step import RANKS, Contest, Network, Turns, run_contests
from benchmarks.step_worker import NEARLY_ALONE, build_model
from tests.lab.delay import delay_program

_PEERS = (
    "ddp_fp16",
    "ddp_powersgd",
    "ddp_powersgd_run",
    "ddp@baguanet",
    "ddp_fp16@baguanet",
    "ddp_powersgd@baguanet",
    "ddp_powersgd_run@baguanet",
)
_OURS = (
    "gradient_allreduce",
    "bytegrad",
    "qadam",
    "qadam_1bit",
    "qadam_run",
    "qadam_1bit_run",
    "power_sgd",
    "power_sgd_run",
    "sparse",
    "sparse_run",
    "decentralized",
    "decentralized_shift_one",
    "decentralized_exponential",
    "low_precision_decentralized",
    "low_precision_decentralized_4bit",
    "local_sgd",
    "diloco",
    "diloco_int8",
    "diloco_overlapped",
    "async_model_average",
)
_BY_RAIL = (
    "gradient_allreduce@gloo",
    "gradient_allreduce+rail@gloo",
    "bytegrad+flat",
    "bytegrad@gloo",
    "bytegrad+flat@gloo",
    "qadam+flat",
    "sparse+flat",
    "power_sgd+flat",
    "decentralized@gloo",
    "decentralized+flat@gloo",
    "decentralized_shift_one+flat",
    "local_sgd@gloo",
    "local_sgd+flat@gloo",
)
"""Where a host has several ranks: with and without the hierarchy, which most have by default."""
_RATES = {"unlimited": None, "1000": 1000.0, "100": 100.0}
_CONTESTANTS = 28  # Models at once, of four ranks: about 0.4 GB each.
_SAMPLES_PER_STEP = 32 * RANKS
_MODEL = "mlp"


def networks(hosts: list[int], rates: list[str], delays_ms: list[float]) -> list[list[Network]]:
    """Every combination; together those that differ by their latency."""
    found = []
    for count in hosts:
        for rate in rates:
            speed = "unlimited" if _RATES[rate] is None else f"{rate} Mbit/s"
            found.append(
                [
                    Network(
                        f"{count} hosts of {RANKS // count}, {speed}, {delay_ms:g} ms",
                        _RATES[rate],
                        hosts=count,
                        delay_ms=delay_ms or None,
                    )
                    for delay_ms in delays_ms
                ]
            )
    return found


def jobs(cases: list[str], places: int = 1) -> list[tuple[str, ...]]:
    """The contestants who share processes, `ddp` with all of them, `alone` with those held against it.

    Each keeps a model and its optimizer's state, on `places` networks at once: all forty of them take more
    than this machine has.
    """
    others = [case for case in cases if case != "ddp"]
    count = max(1, math.ceil(len(others) * places / _CONTESTANTS))
    shares = [others[number::count] for number in range(count)]
    return [("ddp", *(["alone"] if set(NEARLY_ALONE) & set(share) else []), *share) for share in shares]


def measure(
    places: list[Network], cases: list[str], turns: Turns, beginnings: int
) -> list[list[dict[str, Any]]]:
    """What rank 0 measured on each network, and alone, also in jobs that have nothing else in them.

    All jobs but these are started `beginnings` times.
    """
    found: list[list[dict[str, Any]]] = [[] for _ in places]
    rosters = jobs(cases, len(places)) * beginnings
    for number, roster in enumerate([("alone",), *rosters, ("alone",)]):
        contests = [Contest(network, _MODEL, roster) for network in places]
        for blocks, taken in zip(found, run_contests(contests, turns), strict=True):
            blocks += [{**block, "job": number} for block in taken]
    return found


def medians(blocks: list[dict[str, Any]]) -> dict[str, Measured]:
    """What was measured on one network, by case."""
    turns: dict[str, list[dict[str, Any]]] = {}
    for block in blocks:
        turns.setdefault(block["case"], []).append(block)
    ddp_s = _by_turn(turns["ddp"])
    found = {}
    for case, taken in turns.items():
        step_s = _by_turn(taken)
        if case == "alone":
            ratio = median(step_s.values()) / median(ddp_s.values())
        else:
            ratio = _ratio(step_s, ddp_s)
        found[case] = Measured(
            case=case,
            step_s=median(step_s.values()),
            ratio_to_ddp=ratio,
            ratio_to_alone=_ratio(step_s, _by_turn(taken, _beside_s)) if case in NEARLY_ALONE else None,
            sent_bytes=median(block["sent_bytes_per_step"] for block in taken),
            sent_packets=median(block["sent_packets_per_step"] for block in taken),
            rounds_per_step=median(block["rounds_per_step"] for block in taken),
            until_gradients_s=median(block["until_gradients_s"] for block in taken),
            optimizer_s=median(block["optimizer_s"] for block in taken),
            busy=median(block["busy"] for block in taken),
        )
    return found


def growth(
    fast: list[dict[str, Any]], slow: list[dict[str, Any]], *, with_work: bool = True
) -> dict[str, float]:
    """By what a step takes longer on the second of two networks, by case: of turns that are a pair.

    Not `with_work`: where the cores worked longer for a step of the second, without that.
    """
    found = {}
    for case in dict.fromkeys(block["case"] for block in slow):
        before, after = ([b for b in blocks if b["case"] == case] for blocks in (fast, slow))
        step_s, slow_step_s = _by_turn(before), _by_turn(after)
        if not with_work:
            work_s, slow_work_s = _by_turn(before, _work_s), _by_turn(after, _work_s)
            slow_step_s = {
                turn: taken_s - max(0.0, slow_work_s[turn] - work_s[turn])
                for turn, taken_s in slow_step_s.items()
            }
        found[case] = _ratio(slow_step_s, step_s)
    return found


def _step_s(block: dict[str, Any]) -> float:
    return float(block["step_s"])


def _beside_s(block: dict[str, Any]) -> float:
    return float(block["beside_s"])


def _work_s(block: dict[str, Any]) -> float:
    """What the cores did for a step, if none had been idle meanwhile."""
    return float(block["busy"] * block["step_s"])


def _by_turn(
    blocks: list[dict[str, Any]], figure: Callable[[dict[str, Any]], float] = _step_s
) -> dict[tuple[int, int], float]:
    """One contestant's figure, by job and round."""
    return {(block["job"], block["round"]): figure(block) for block in blocks}


def _ratio(ours: dict[tuple[int, int], float], theirs: dict[tuple[int, int], float]) -> float:
    """The median of the ratios of turns that are a pair."""
    return paired_ratio(list(ours.values()), [theirs[turn] for turn in ours]).median


def gradients() -> Gradients:
    """Of the model that all train."""
    return Gradients(tuple(tuple(parameter.shape) for parameter in build_model(_MODEL)[0].parameters()))


def _parse(argv: list[str] | None) -> argparse.Namespace:
    options = parser("algorithms", __doc__ or "")
    options.add_argument("--hosts", default=f"{RANKS},2", help="numbers of hosts (default %(default)s)")
    options.add_argument("--rates", default=",".join(_RATES), help="Mbit/s (default %(default)s)")
    options.add_argument("--delays-ms", default="0,5", help="one way (default %(default)s)")
    options.add_argument("--cases", default=",".join((*_PEERS, *_OURS)), help="contestants besides ddp")
    options.add_argument(
        "--rail-cases", default=",".join(_BY_RAIL), help="further ones where hosts have several ranks"
    )
    options.add_argument("--rounds", type=int, default=None, help="pairs per network (default 5, quick 2)")
    options.add_argument(
        "--beginnings",
        type=int,
        default=1,
        help="how often the contestants' processes are started, for --rounds each (default %(default)s): "
        "what one takes differs from some processes to others",
    )
    options.add_argument(
        "--block-s",
        type=float,
        default=None,
        help="length of a turn, at least three steps (default 1.0, quick 0.2)",
    )
    options.add_argument(
        "--lead-s",
        type=float,
        default=0.0,
        help="how long each trains before its turn, at least one step, so that it does not find windows of "
        "connections that were idle (default %(default)s); not those whose turns are whole periods",
    )
    options.add_argument(
        "--keep-windows",
        action="store_true",
        help="hosts with net.ipv4.tcp_slow_start_after_idle=0 (docs/transport.md)",
    )
    args = options.parse_args(argv)
    if args.beginnings < 1:
        options.error(f"--beginnings {args.beginnings}: want 1 or more")
    return args


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    turns = Turns(
        rounds=args.rounds or (2 if args.quick else 5),
        block_s=args.block_s or (0.2 if args.quick else 1.0),
        pin=True,
        congestion_control="reno",
        lead_s=args.lead_s,
        keeps_windows=args.keep_windows,
    )
    report = Report(
        name="algorithms",
        title=f"a step of {RANKS} ranks against torch DDP on Gloo",
        quick=args.quick,
    )
    report.facts["hosts_keep_tcp_windows"] = turns.keeps_windows
    report.facts["seconds_before_turns"] = turns.lead_s
    report.facts["beginnings"] = args.beginnings
    delays_ms = sorted({float(word) for word in args.delays_ms.split(",")})
    if any(delays_ms):
        # A run of an hour should not end where it comes to the first latency.
        delay_program()
    for places in networks([int(word) for word in args.hosts.split(",")], args.rates.split(","), delays_ms):
        cases = dict.fromkeys(("ddp", *args.cases.split(",")))
        if places[0].hosts < RANKS:
            cases |= dict.fromkeys(args.rail_cases.split(","))
        measured = measure(places, list(cases), turns, args.beginnings)
        for network, blocks in zip(places, measured, strict=True):
            report.raw[network.name] = blocks
            for row in _rows(network, blocks, measured[0] if network != places[0] else None):
                report.rows.append(row)
                print(f"{row.what}: {row.value:.3f}", flush=True)
        save(report, args)
    return finish(report, args)


def _rows(network: Network, blocks: list[dict[str, Any]], fast: list[dict[str, Any]] | None) -> list[Row]:
    """The table's lines for one network; `fast`: what was measured beside it with less latency."""
    delay_ms = network.delay_ms or 0.0
    cluster = Cluster(hosts=network.hosts, ranks=RANKS, rate_mbit=network.rate_mbit, delay_ms=delay_ms)
    rows = judge(network.name, cluster, gradients(), medians(blocks), _SAMPLES_PER_STEP)
    if fast:
        rows += judge_latency(growth(fast, blocks), network.name)
        rows += judge_latency(growth(fast, blocks, with_work=False), network.name, "growth in waiting")
    return rows


if __name__ == "__main__":
    sys.exit(main())
