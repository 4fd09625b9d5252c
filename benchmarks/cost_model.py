"""What a step must send and how long that takes at least, from the sizes alone (docs/algorithms.md).

Bytes are what leaves one host per step. Ring, rails and direct messages between N hosts of g ranks, R in
all, with S bytes of gradients or weights: an all-reduce around a ring of ranks sends 2(R-1)/R S over the one
edge that leaves a host; one by rail 2(N-1)/N S; direct messages among all ranks 2g(R-g)/R S. PowerSGD's S is
4r(m+k) bytes of each m x k matrix that it compresses, and all of the rest; torch's reduces these three apart,
ours sends them from each rank to all others, g(R-g) S, or by rail from each host to all others, (N-1) S, as
it does where a bucket's are few.
On a ring 2(R-1) messages follow each other. On `baguanet` two may be enough, as it can send directly to who
sums up and from there to all; that is the least, wherever it takes a ring since that fills the wire better.
One of few bytes goes by doubling there: hosts exchange all they have with log2(N) others, S log2(N).

A `_run` is a training in short, the warm-up its first tenth: its cost is the mean of its steps'.

How long a step takes at least is forward, then backward and the wire side by side from the first gradient
on, then the optimizer: gradients cannot be sent before there are any, nor be applied before the last of them
has arrived. Weights on the way to neighbours were there before; whoever applies what came when it comes hides
all of it. The parts are measured, without communication and with SGD; an optimizer that goes through more
memory takes as much longer.

The cores may need longer than the wire, where ranks outnumber them: what they did in a step, measured, is the
other limit. Of a run, too, that is so of each of its steps by itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum

HEADER_BYTES = 66
"""Of an Ethernet frame with TCP and its timestamps."""
# What a full frame carries besides.
_SEGMENT_BYTES = 1448

_CODED_GRADIENTS: dict[str, int | str] = {
    "bytegrad": 8,
    "qadam": 8,
    "qadam_1bit": 1,
    "sparse": "1/100",
    "sparse_64th": "1/64",
    "sparse_16th": "1/16",
}
_CODED_NEIGHBOURS = {"low_precision_decentralized": 8, "low_precision_decentralized_4bit": 4}
_CODED_CHANGES = {"diloco_int8": 8, "diloco_overlapped": 4}
_WAITING = ("local_sgd", "diloco", "diloco_int8")
"""Who averages at the end of a step, and goes on when that is done."""
_FRAGMENTS = 4
"""Of `diloco_overlapped`, which exchanges one of them at a time."""
_BLOCK_BYTES = 4 * 2048
_CODED_BYTES: dict[int | str, int] = {
    8: 2048 + 8,
    4: 1024 + 8,
    1: 256 + 4,
    "1/100": 20 * 6,
    "1/64": 32 * 6,
    "1/16": 128 * 6,
}
"""Of a block of 2048 numbers in fp32: by bits, with its least and greatest or its mean; or by what `sparse`
keeps, values and places."""
_DOUBLED_BYTES = 64 << 10
"""What an all-reduce on `baguanet` takes for few: `kSmallBytes` of cpp_ext/net/wire_group.h."""
_RANK = 1
"""Of both PowerSGDs."""
_LEAST_GAINS = {"power_sgd": 1, "ddp_powersgd": 2}
"""How many times smaller than a matrix its factors must be; torch's `min_compression_rate`."""
_QADAM_BYTES_OF_SGD = 20 / 12
"""Memory that a step of the optimizer goes through, per number. SGD: the parameter in and out, the gradient.
QAdam (`cpp_ext/engine/momentum_update.h`): the parameter in and out, momentum, the average out, the
denominator."""
_RUNS = {
    "qadam_run": (("gradient_allreduce", 1), ("qadam", 9)),
    "qadam_1bit_run": (("gradient_allreduce", 1), ("qadam_1bit", 9)),
    "power_sgd_run": (("gradient_allreduce", 2), ("power_sgd", 18)),
    "ddp_powersgd_run": (("ddp", 2), ("ddp_powersgd", 18)),
    "sparse_run": (("gradient_allreduce", 1), ("sparse_16th", 1), ("sparse_64th", 1), ("sparse", 27)),
}
"""What the steps of a run cost as much as, and how many of them."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Where the ranks are and what joins them."""

    hosts: int
    ranks: int
    rate_mbit: float | None = None
    delay_ms: float = 0.0
    """One way, between a host and the switch."""

    @property
    def per_host(self) -> int:
        return self.ranks // self.hosts


@dataclass(frozen=True)
class Gradients:
    """What there is to exchange, in fp32."""

    shapes: tuple[tuple[int, ...], ...]

    @property
    def size_bytes(self) -> int:
        return 4 * sum(math.prod(shape) for shape in self.shapes)

    def low_rank_bytes(self, rank: int, least_gain: int) -> tuple[int, int, int]:
        """Left factors, right factors and what stays whole: matrices have factors in their place, where those
        are more than `least_gain` times smaller."""
        left = right = rest = 0
        for shape in self.shapes:
            whole = math.prod(shape)
            rows, columns = (shape[0], whole // shape[0]) if len(shape) > 1 and whole else (whole, 1)
            kept = min(rank, rows, columns)
            if (rows + columns) * kept * least_gain < whole:
                left += rows * kept
                right += columns * kept
            else:
                rest += whole
        return 4 * left, 4 * right, 4 * rest


class Behind(Enum):
    """What the wire can be busy behind, as far as that is long enough."""

    BACKWARD = "from the first gradient to the last"
    COMPUTING = "forward and backward, not the optimizer"
    STEP = "all of the step"
    NOTHING = "training waits for all of it"


@dataclass(frozen=True, kw_only=True)
class Alone:
    """Seconds of a step that communicates nothing, and of its parts."""

    step_s: float
    until_gradients_s: float = 0.0
    """From the begin of the step until the first gradient is there."""
    optimizer_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one step on the wire."""

    host_bytes: float
    """Payload that leaves each host."""
    messages: float
    """That follow each other, each waiting for the one before."""
    behind: Behind = Behind.BACKWARD
    optimizer_of_sgd: float = 1.0
    """How many times as long as SGD's its optimizer takes."""
    stages: tuple[tuple[float, Cost], ...] = ()
    """Of a run: shares of its steps and what one of them costs. The fields above are the mean then."""

    def wire_bytes(self) -> float:
        """With the headers of packets, which a limited wire takes time for.

        The hosts' NICs do not count them: they have frames whole that are cut up behind them.
        """
        return self.host_bytes * (1 + HEADER_BYTES / _SEGMENT_BYTES)

    def seconds(self, cluster: Cluster) -> float:
        """The least that the wire needs."""
        latency_s = self.messages * 2 * cluster.delay_ms / 1e3
        if cluster.rate_mbit is None:
            return latency_s
        return self.wire_bytes() * 8e-6 / cluster.rate_mbit + latency_s


def limit_s(cost: Cost, cluster: Cluster, alone: Alone) -> float:
    """The least that a step can take."""
    if cost.stages:
        return sum(share * limit_s(stage, cluster, alone) for share, stage in cost.stages)
    wire_s = cost.seconds(cluster)
    optimizer_s = cost.optimizer_of_sgd * alone.optimizer_s
    step_s = alone.step_s - alone.optimizer_s + optimizer_s
    if cost.behind is Behind.NOTHING:
        return step_s + wire_s
    if cost.behind is Behind.BACKWARD:
        wire_s += alone.until_gradients_s
    if cost.behind is not Behind.STEP:
        wire_s += optimizer_s
    return max(step_s, wire_s)


def stages_of(case: str) -> dict[str, float]:
    """The contestants whose steps a run is made of, and what share of its steps is theirs; else nothing."""
    name, at, transport = case.partition("@")
    stages = _RUNS.get(name.partition("+")[0], ())
    steps = sum(count for _, count in stages)
    return {f"{one}{at}{transport}": count / steps for one, count in stages}


def cost_of(case: str, cluster: Cluster, gradients: Gradients, rounds_per_step: float = 1.0) -> Cost | None:
    """The cost of a contestant's step; None where this model has no formula.

    `rounds_per_step` is what an algorithm did that chooses by itself how often it exchanges.
    """
    name, _, transport = case.partition("@")
    base, _, level = name.partition("+")
    if base in _RUNS:
        found = ((share, cost_of(one, cluster, gradients)) for one, share in stages_of(case).items())
        return _mean(tuple((share, cost) for share, cost in found if cost is not None))
    size_bytes = gradients.size_bytes
    is_ring = transport == "gloo" or (base.startswith("ddp") and transport != "baguanet")
    if base in ("ddp", "ddp_fp16", "gradient_allreduce"):
        sent_bytes = size_bytes / 2 if base == "ddp_fp16" else size_bytes
        return _all_reduce(cluster, sent_bytes, by_rail=not is_ring or level == "rail", is_ring=is_ring)
    if base in _LEAST_GAINS:
        parts = gradients.low_rank_bytes(_RANK, _LEAST_GAINS[base])
        # Ours has messages of its own; torch's are all-reduces.
        if base == "power_sgd":
            outside = cluster.per_host * (cluster.ranks - cluster.per_host)
            receivers = outside if level == "flat" else cluster.hosts - 1
            return Cost(host_bytes=receivers * sum(parts), messages=2)
        reduced = [_all_reduce(cluster, size, by_rail=not is_ring, is_ring=is_ring) for size in parts]
        # One factor follows the other.
        return Cost(
            host_bytes=sum(part.host_bytes for part in reduced),
            messages=sum(part.messages for part in reduced[:2]),
        )
    if base in _CODED_GRADIENTS:
        coded_bytes = size_bytes * _ratio(_CODED_GRADIENTS[base])
        cost = _direct(cluster, coded_bytes, by_rail=level != "flat")
        return replace(cost, optimizer_of_sgd=_QADAM_BYTES_OF_SGD) if base.startswith("qadam") else cost
    if base in _CODED_NEIGHBOURS:
        # To both neighbours; of a host's ranks the outer two have one on another host. By rail a host's ranks
        # send a shard each, and two hosts are each other's only neighbour.
        is_pair = cluster.hosts == 2 and (level != "flat" or cluster.per_host == 1)
        coded_bytes = size_bytes * _ratio(_CODED_NEIGHBOURS[base])
        # A piece is waited for when it is its turn in the next step: its trip is behind the others.
        return Cost(host_bytes=(1 if is_pair else 2) * coded_bytes, messages=0, behind=Behind.STEP)
    if base in ("decentralized_shift_one", "decentralized_exponential"):
        senders = 1.0 if level != "flat" else _senders(cluster, is_exponential=base.endswith("exponential"))
        return Cost(host_bytes=senders * size_bytes, messages=1, behind=Behind.COMPUTING)
    if base == "decentralized":
        whole = _all_reduce(cluster, size_bytes, by_rail=not is_ring or level != "flat", is_ring=is_ring)
        return replace(whole, behind=Behind.COMPUTING)
    behind = Behind.NOTHING if base in _WAITING else Behind.STEP
    if base in ("async_model_average", "local_sgd", "diloco"):
        whole = _all_reduce(cluster, size_bytes, by_rail=not is_ring or level != "flat", is_ring=is_ring)
        return _times(whole, rounds_per_step, behind=behind)
    if base in _CODED_CHANGES:
        coded = _direct(cluster, size_bytes * _ratio(_CODED_CHANGES[base]), by_rail=level != "flat")
        rounds = rounds_per_step / (_FRAGMENTS if base == "diloco_overlapped" else 1)
        return _times(coded, rounds, behind=behind)
    return None


def _all_reduce(cluster: Cluster, size_bytes: float, *, by_rail: bool, is_ring: bool) -> Cost:
    """By doubling for as many hosts as a power of two, which is what the lab has."""
    peers = cluster.hosts if by_rail else cluster.ranks
    if by_rail and size_bytes <= _DOUBLED_BYTES:
        rounds = (peers - 1).bit_length()
        return Cost(host_bytes=rounds * size_bytes, messages=rounds)
    messages = 2 * (peers - 1) if is_ring else 2
    return Cost(host_bytes=2 * (peers - 1) / peers * size_bytes, messages=messages)


def _direct(cluster: Cluster, coded_bytes: float, *, by_rail: bool) -> Cost:
    if by_rail:
        return Cost(host_bytes=2 * (cluster.hosts - 1) / cluster.hosts * coded_bytes, messages=2)
    outside = cluster.ranks - cluster.per_host
    return Cost(host_bytes=2 * cluster.per_host * outside / cluster.ranks * coded_bytes, messages=2)


def _senders(cluster: Cluster, *, is_exponential: bool) -> float:
    """How many of a host's ranks send to another host in an exchange, where ranks are the peers."""
    if not is_exponential:
        # Pairs lie across halves: for an even number of hosts, of which each is in one half.
        return cluster.per_host
    distances = [1 << power for power in range((cluster.ranks - 1).bit_length())]
    leaving = [
        (rank + distance) % cluster.ranks >= cluster.per_host
        for distance in distances
        for rank in range(cluster.per_host)
    ]
    return sum(leaving) / len(distances)


def _mean(stages: tuple[tuple[float, Cost], ...]) -> Cost:
    return Cost(
        host_bytes=sum(share * cost.host_bytes for share, cost in stages),
        messages=sum(share * cost.messages for share, cost in stages),
        stages=stages,
    )


def _times(cost: Cost, rounds_per_step: float, *, behind: Behind) -> Cost:
    return Cost(
        host_bytes=cost.host_bytes * rounds_per_step,
        messages=cost.messages * rounds_per_step,
        behind=behind,
    )


def _ratio(wire: int | str) -> float:
    return _CODED_BYTES[wire] / _BLOCK_BYTES
