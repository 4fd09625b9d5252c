"""What `benchmarks.algorithms` holds its figures against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.cost_model import (
    HEADER_BYTES,
    Alone,
    Cluster,
    Cost,
    Gradients,
    cost_of,
    limit_s,
    stages_of,
)
from benchmarks.harness import Row

_STOCK = ("ddp", "ddp_fp16", "ddp_powersgd")
"""What torch offers, on Gloo and on our transport; `ddp_powersgd_run` is in the last one's place for those
that are measured with their warm-up, too."""

_SPEEDUPS = {
    "bytegrad": 3.8,
    "qadam": 3.8,
    "qadam_1bit": 12.0,
    "low_precision_decentralized": 2.7,
    "low_precision_decentralized_4bit": 4.5,
    "decentralized_shift_one": 1.5,
}
"""Over DDP, 4 hosts at 100 Mbit/s without latency."""
_DECENTRALIZED = ("decentralized", "low_precision_decentralized")
_WHOLE_GROUPS = ("ddp", "gradient_allreduce", "bytegrad", "qadam", "sparse", "power_sgd")
"""Beginnings of names: the decentralized family, and those of whom all exchange with all in each step."""
_FLAT_BY_DEFAULT = ("gradient_allreduce",)
_ALL_REDUCE_ON_BAGUANET = (
    "gradient_allreduce",
    "decentralized",
    "local_sgd",
    "diloco",
    "async_model_average",
)
"""On our own transport they go by rail whatever is asked."""
_SLOWER_IF_PREDICTED_FASTER, _SLOWER_IF_NOT = 1.03, 1.5
_WORTH_MENTIONING = 0.97
_LEAST_EFFICIENCY = 0.85
_BYTES_OFF = 0.05
# Barriers and the counting itself move some bytes, too.
_LEAST_BYTES = 50_000


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One contestant on one network, medians."""

    case: str
    step_s: float
    ratio_to_ddp: float
    """Of step times, pair by pair."""
    ratio_to_alone: float | None = None
    """Of those that are to be nearly as fast: of the turns of training alone before and after theirs."""
    sent_bytes: float
    """A step's, of one host's NIC."""
    sent_packets: float = 0.0
    """Of the same NIC: a header each in `sent_bytes`."""
    rounds_per_step: float = 1.0
    until_gradients_s: float = 0.0
    """Of training alone; as in `Alone`."""
    optimizer_s: float = 0.0
    busy: float = 0.0
    """The share of the time in which the machine's cores did something."""

    @property
    def cores_s(self) -> float:
        """What the cores need at least for what they did in a step: none of them ever idle."""
        return self.busy * self.step_s

    @property
    def alone(self) -> Alone:
        """What the cost model asks for."""
        return Alone(
            step_s=self.step_s, until_gradients_s=self.until_gradients_s, optimizer_s=self.optimizer_s
        )

    @property
    def payload_bytes(self) -> float:
        """Without headers, also those of acknowledgements, which count where messages are small."""
        return self.sent_bytes - HEADER_BYTES * self.sent_packets

    @property
    def is_stock(self) -> bool:
        return self.case.startswith("ddp")


def is_run(case: str) -> bool:
    """With its warm-up."""
    return case.partition("@")[0].endswith("_run")


def judge(
    place: str,
    cluster: Cluster,
    gradients: Gradients,
    found: Mapping[str, Measured],
    samples_per_step: int,
) -> list[Row]:
    """The table's lines for one network; `found` by case, with `ddp` and `alone` among them."""
    alone = found["alone"].alone
    rows = []
    for case, ours in found.items():
        if case in ("ddp", "alone"):
            continue
        cost = cost_of(case, cluster, gradients, ours.rounds_per_step)
        least_s = alone.step_s if cost is None else limit_s(cost, cluster, alone)
        words = [
            f"{place}: {case}",
            *_to_stock(ours, found),
            f"{samples_per_step / ours.step_s:.0f} samples/s",
        ]
        if cost is not None:
            words.append(f"efficiency {least_s / ours.step_s:.2f}")
        words.append(f"cores busy {ours.busy:.0%}")
        rows += _speed(", ".join(words), cluster, gradients, ours, found)
        if cost is None or cluster.hosts == 1:
            continue
        if cost.seconds(cluster) > alone.step_s:
            whose, reachable_s = "the cost model", least_s
            for stage, longer_s in _cores_in_stages(case, cluster, gradients, found).items():
                whose, reachable_s = f"{whose}, in steps of {stage} the cores", reachable_s + longer_s
            if ours.cores_s > reachable_s:
                whose, reachable_s = "the cores", ours.cores_s
            if reachable_s > least_s:
                whose += f" (the cost model's is {least_s * 1e3:.0f} ms)"
            rows.append(
                Row(
                    what=f"{place}: {case}, limit by {whose} / measured",
                    peer=f"{reachable_s * 1e3:.0f} ms",
                    ours=f"{ours.step_s * 1e3:.0f} ms",
                    value=reachable_s / ours.step_s,
                    target=None if ours.is_stock else _LEAST_EFFICIENCY,
                    at_least=True,
                )
            )
        wanted = cost.host_bytes
        if wanted >= _LEAST_BYTES:
            rows.append(
                Row(
                    what=f"{place}: {case}, the NIC's bytes without headers off the cost model's",
                    peer=f"{wanted / 1e6:.3f} MB",
                    ours=f"{ours.payload_bytes / 1e6:.3f} MB",
                    value=abs(ours.payload_bytes / wanted - 1),
                    target=_BYTES_OFF,
                    required=True,
                )
            )
    return rows + _less_by_rail(place, found)


def _cores_in_stages(
    case: str, cluster: Cluster, gradients: Gradients, found: Mapping[str, Measured]
) -> dict[str, float]:
    """By how many seconds, of a mean step of a run, the cores need longer than the cost model says, by stage,
    as far as those whose steps it takes were measured as well."""
    alone = found["alone"].alone
    longer = {}
    for stage, share in stages_of(case).items():
        cost = cost_of(stage, cluster, gradients)
        if stage in found and cost is not None:
            longer[stage] = share * (found[stage].cores_s - limit_s(cost, cluster, alone))
    return {stage: seconds for stage, seconds in longer.items() if seconds > 0}


def _to_stock(ours: Measured, found: Mapping[str, Measured]) -> list[str]:
    """How `ours` compares with the best of torch's on Gloo, and on our transport."""
    words = []
    for transport, suffix in (("Gloo", ""), ("baguanet", "@baguanet")):
        names = [f"{name}{suffix}" for name in _STOCK]
        with_warmup = f"ddp_powersgd_run{suffix}"
        if is_run(ours.case) and with_warmup in found:
            names[-1] = with_warmup
        stock = [found[name] for name in names if name in found]
        if stock:
            best = min(stock, key=lambda each: each.step_s)
            speed = best.step_s / ours.step_s
            words.append(
                f"{speed:.2f} x the best stock one on {transport} ({best.case.removesuffix(suffix)})"
            )
    return words


def _speed(
    words: str, cluster: Cluster, gradients: Gradients, ours: Measured, found: Mapping[str, Measured]
) -> list[Row]:
    ddp, alone = found["ddp"], found["alone"].alone
    figures = {"peer": _figures(ddp), "ours": _figures(ours)}
    base = ours.case.partition("@")[0].partition("+")[0]
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
    if ours.ratio_to_alone:
        least = 0.85 if cluster.rate_mbit is None else 0.95
        is_judged = cluster.delay_ms == 0 and cluster.rate_mbit != 1000
        rows.append(
            Row(
                what=f"{words}; the speed of training alone",
                peer=f"{ours.step_s / ours.ratio_to_alone * 1e3:.1f} ms beside it",
                ours=figures["ours"],
                value=1 / ours.ratio_to_alone,
                target=least if is_judged else None,
                at_least=True,
                unit="x",
            )
        )
    target: float | None = None
    note = ""
    if base == "gradient_allreduce":
        target = 1.0
    elif not ours.is_stock:
        cost = cost_of(ours.case, cluster, gradients, ours.rounds_per_step)
        is_win = cost is not None and _is_win(cost, cluster, gradients, alone)
        target = _SLOWER_IF_PREDICTED_FASTER if is_win else _SLOWER_IF_NOT
        note = "" if is_win else ", no cost model" if cost is None else ", no win predicted"
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


def _is_win(cost: Cost, cluster: Cluster, gradients: Gradients, alone: Alone) -> bool:
    ddp = cost_of("ddp", cluster, gradients)
    assert ddp is not None
    return limit_s(cost, cluster, alone) < _WORTH_MENTIONING * limit_s(ddp, cluster, alone)


def _less_by_rail(place: str, found: Mapping[str, Measured]) -> list[Row]:
    """Where a contestant is there with the hierarchy and without, of which one is its default."""
    rows = []
    for case, other in found.items():
        name, at, transport = case.partition("@")
        base, _, level = name.partition("+")
        default = found.get(f"{base}{at}{transport}")
        if default is None or level != ("rail" if base in _FLAT_BY_DEFAULT else "flat"):
            continue
        if transport != "gloo" and base in _ALL_REDUCE_ON_BAGUANET:
            continue
        rail, flat = (other, default) if level == "rail" else (default, other)
        rows.append(
            Row(
                what=f"{place}: {base}{at}{transport}, bytes of the NIC by rail / flat",
                peer=f"{flat.sent_bytes / 1e6:.2f} MB",
                ours=f"{rail.sent_bytes / 1e6:.2f} MB",
                value=rail.sent_bytes / flat.sent_bytes,
                target=0.95,
            )
        )
    return rows


def judge_latency(grown: Mapping[str, float], place: str, what: str = "growth") -> list[Row]:
    """How much longer a step takes with latency than without, of neighbours against whole groups."""
    family = {case: value for case, value in grown.items() if case.startswith(_DECENTRALIZED)}
    groups = {
        case: value for case, value in grown.items() if case.startswith(_WHOLE_GROUPS) and not is_run(case)
    }
    if not family or not groups:
        return []
    return [
        Row(
            what=f"{place}: {what} of {case} by latency, by the least of {_names(groups)}",
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
