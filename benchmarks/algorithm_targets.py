"""What `benchmarks.algorithms` holds its figures against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.cost_model import Cluster, cost_of, limit_s
from benchmarks.harness import Row

STOCK = ("ddp", "ddp_fp16", "ddp_powersgd", "ddp@baguanet", "ddp_fp16@baguanet")
"""What torch offers: on Gloo, and on our transport."""

_SPEEDUPS = {
    "bytegrad": 3.8,
    "qadam": 3.8,
    "qadam_1bit": 12.0,
    "low_precision_decentralized": 2.7,
    "low_precision_decentralized_4bit": 4.5,
    "decentralized_shift_one": 1.5,
}
"""Over DDP, 4 hosts at 100 Mbit/s without latency."""
_NEARLY_ALONE = ("async_model_average", "diloco_overlapped")
_DECENTRALIZED = (
    "decentralized_shift_one",
    "low_precision_decentralized",
    "low_precision_decentralized_4bit",
)
_SLOWER_IF_PREDICTED_FASTER, _SLOWER_IF_NOT = 1.03, 1.5
_WORTH_MENTIONING = 0.97
_LEAST_EFFICIENCY = 0.85
# How much longer the wire must need than computing to be called the limit.
_CLEARLY = 2.0
_BYTES_OFF = 0.05
# Barriers and the counting itself move some bytes, too.
_LEAST_BYTES = 100_000


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One contestant on one network, medians."""

    case: str
    step_s: float
    ratio_to_ddp: float
    """Of step times, pair by pair."""
    sent_bytes: float
    """A step's, of one host's NIC."""
    rounds_per_step: float = 1.0


def judge(
    place: str, cluster: Cluster, size_bytes: int, found: Mapping[str, Measured], samples_per_step: int
) -> list[Row]:
    """The table's lines for one network; `found` by case, with `ddp` and `alone` among them."""
    alone_s = found["alone"].step_s
    stock = min((found[name] for name in STOCK if name in found), key=lambda each: each.step_s)
    rows = []
    for case, ours in found.items():
        if case in ("ddp", "alone"):
            continue
        cost = cost_of(case, cluster, size_bytes, ours.rounds_per_step)
        least_s = alone_s if cost is None else limit_s(cost, cluster, alone_s)
        words = (
            f"{place}: {case}",
            f"{stock.step_s / ours.step_s:.2f} x the best stock one ({stock.case})",
            f"{samples_per_step / ours.step_s:.0f} samples/s",
            f"efficiency {least_s / ours.step_s:.2f}" if cost else "no cost model",
        )
        rows += _speed(", ".join(words), cluster, size_bytes, ours, found)
        if cost is None or cluster.hosts == 1:
            continue
        if cost.seconds(cluster) > _CLEARLY * alone_s:
            rows.append(
                Row(
                    what=f"{place}: {case}, limit by the cost model / measured",
                    peer=f"{least_s * 1e3:.0f} ms",
                    ours=f"{ours.step_s * 1e3:.0f} ms",
                    value=least_s / ours.step_s,
                    target=None if case in STOCK else _LEAST_EFFICIENCY,
                    at_least=True,
                )
            )
        wanted = cost.host_bytes
        if wanted >= _LEAST_BYTES:
            rows.append(
                Row(
                    what=f"{place}: {case}, the NIC's bytes off the cost model's",
                    peer=f"{wanted / 1e6:.2f} MB",
                    ours=f"{ours.sent_bytes / 1e6:.2f} MB",
                    value=abs(ours.sent_bytes / wanted - 1),
                    target=_BYTES_OFF,
                )
            )
    return rows + _less_by_rail(place, found)


def _speed(
    words: str, cluster: Cluster, size_bytes: int, ours: Measured, found: Mapping[str, Measured]
) -> list[Row]:
    ddp, alone_s = found["ddp"], found["alone"].step_s
    figures = {"peer": _figures(ddp), "ours": _figures(ours)}
    base, _, _ = ours.case.partition("@")
    rows = []
    wanted = _SPEEDUPS.get(ours.case)
    if wanted and (cluster.hosts, cluster.rate_mbit, cluster.delay_ms) == (cluster.ranks, 100.0, 0.0):
        rows.append(
            Row(
                what=f"{words}; DDP's time / ours",
                value=1 / ours.ratio_to_ddp,
                target=wanted,
                at_least=True,
                unit="x",
                **figures,
            )
        )
    if ours.case in _NEARLY_ALONE and cluster.delay_ms == 0 and cluster.rate_mbit != 1000:
        rows.append(
            Row(
                what=f"{words}; the speed of training alone",
                peer=_figures(found["alone"]),
                ours=figures["ours"],
                value=alone_s / ours.step_s,
                target=0.85 if cluster.rate_mbit is None else 0.95,
                at_least=True,
                unit="x",
            )
        )
    target: float | None = None
    note = ""
    if base == "gradient_allreduce":
        target = 1.0
    elif ours.case not in STOCK:
        is_win = _predicts_win(ours, cluster, size_bytes, alone_s)
        target = _SLOWER_IF_PREDICTED_FASTER if is_win else _SLOWER_IF_NOT
        note = "" if is_win else ", no win predicted"
    rows.append(
        Row(
            what=f"{words}; our time / DDP's{note}",
            value=ours.ratio_to_ddp,
            target=target,
            unit="x",
            **figures,
        )
    )
    return rows


def _predicts_win(ours: Measured, cluster: Cluster, size_bytes: int, alone_s: float) -> bool:
    cost = cost_of(ours.case, cluster, size_bytes, ours.rounds_per_step)
    ddp = cost_of("ddp", cluster, size_bytes)
    assert ddp is not None
    if cost is None:
        return False
    return limit_s(cost, cluster, alone_s) < _WORTH_MENTIONING * limit_s(ddp, cluster, alone_s)


def _less_by_rail(place: str, found: Mapping[str, Measured]) -> list[Row]:
    """Where a contestant is there with the hierarchy and without."""
    rows = []
    for case, flat in found.items():
        name, _, transport = case.partition("@")
        base, _, level = name.partition("+")
        suffix = f"@{transport}" if transport else ""
        rail = found.get(f"{base}+rail{suffix}") or found.get(f"{base}{suffix}")
        # On our own transport all-reduces go by rail whatever is asked.
        is_direct = transport == "gloo" or base in ("bytegrad", "qadam", "sparse")
        if level == "flat" and rail is not None and is_direct:
            rows.append(
                Row(
                    what=f"{place}: {case}, bytes of the NIC by rail / flat",
                    peer=f"{flat.sent_bytes / 1e6:.2f} MB",
                    ours=f"{rail.sent_bytes / 1e6:.2f} MB",
                    value=rail.sent_bytes / flat.sent_bytes,
                    target=0.95,
                )
            )
    return rows


def judge_latency(fast: Mapping[str, Measured], slow: Mapping[str, Measured], place: str) -> list[Row]:
    """How much longer a step takes with latency than without, of neighbours against whole groups."""
    grown = {case: slow[case].step_s / fast[case].step_s for case in fast if case in slow}
    family = {case: value for case, value in grown.items() if case in _DECENTRALIZED}
    groups = {
        case: value
        for case, value in grown.items()
        if case.startswith(("ddp", "gradient_allreduce", "bytegrad", "qadam")) and "_run" not in case
    }
    if not family or not groups:
        return []
    return [
        Row(
            what=f"{place}: growth of {case} by latency, by the least growth of {_names(groups)}",
            peer=f"x {min(groups.values()):.2f}",
            ours=f"x {value:.2f}",
            value=value / min(groups.values()),
            target=1.03,
        )
        for case, value in family.items()
    ]


def _names(cases: Sequence[str] | Mapping[str, float]) -> str:
    return "/".join(cases)


def _figures(found: Measured) -> str:
    return f"{found.step_s * 1e3:.1f} ms, {found.sent_bytes / 1e6:.2f} MB"
