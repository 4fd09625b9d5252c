"""What a step must send and how long that takes at least, from the sizes alone (docs/algorithms.md).

Bytes are what leaves one host per step. Ring, rails and direct messages between N hosts of g ranks, R in
all, with S bytes of gradients or weights: an all-reduce around a ring of ranks sends 2(R-1)/R S over the one
edge that leaves a host; one by rail 2(N-1)/N S; direct messages among all ranks 2g(R-g)/R S.
"""

from __future__ import annotations

from dataclasses import dataclass

# What a full Ethernet frame carries of TCP with timestamps, and its headers.
_SEGMENT_BYTES = 1448
_HEADER_BYTES = 66

_CODED_GRADIENTS: dict[str, int | str] = {"bytegrad": 8, "qadam": 8, "qadam_1bit": 1, "sparse": "sparse"}
_CODED_NEIGHBOURS = {"low_precision_decentralized": 8, "low_precision_decentralized_4bit": 4}
_WAITING = ("local_sgd", "diloco", "diloco_int8")
"""Who averages at the end of a step, and goes on when that is done."""
_FRAGMENTS = 4
"""Of `diloco_overlapped`, which exchanges one of them at a time."""
_BLOCK_BYTES = 4 * 2048
_CODED_BYTES: dict[int | str, int] = {8: 2048 + 8, 4: 1024 + 8, 1: 256 + 4, "sparse": 20 * 6}
"""Of a block of 2048 numbers in fp32: by bits, with its least and greatest or its mean; `sparse` keeps 20."""


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


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one step on the wire."""

    host_bytes: float
    """Payload that leaves each host."""
    messages: float
    """That follow each other, each waiting for the one before."""
    is_hidden: bool = True
    """Behind computation, as far as that is long enough; else training waits for all of it."""

    def wire_bytes(self) -> float:
        """With the headers of packets, which a limited wire takes time for.

        The hosts' NICs do not count them: they have frames whole that are cut up behind them.
        """
        return self.host_bytes * (1 + _HEADER_BYTES / _SEGMENT_BYTES)

    def seconds(self, cluster: Cluster) -> float:
        """The least that the wire needs."""
        latency_s = self.messages * 2 * cluster.delay_ms / 1e3
        if cluster.rate_mbit is None:
            return latency_s
        return self.wire_bytes() * 8e-6 / cluster.rate_mbit + latency_s


def limit_s(cost: Cost, cluster: Cluster, alone_s: float) -> float:
    """The least that a step can take that computes for `alone_s`."""
    wire_s = cost.seconds(cluster)
    return max(alone_s, wire_s) if cost.is_hidden else alone_s + wire_s


def cost_of(case: str, cluster: Cluster, size_bytes: int, rounds_per_step: float = 1.0) -> Cost | None:
    """The cost of a contestant's step; None where this model has no formula.

    `size_bytes` are those of the gradients in fp32. `rounds_per_step` is what an algorithm did that chooses
    by itself how often it exchanges.
    """
    name, _, transport = case.partition("@")
    base, _, level = name.partition("+")
    is_ring = transport == "gloo" or (base.startswith("ddp") and transport != "baguanet")
    if base in ("ddp", "ddp_fp16", "gradient_allreduce"):
        sent_bytes = size_bytes / 2 if base == "ddp_fp16" else size_bytes
        return _all_reduce(cluster, sent_bytes, by_rail=not is_ring or level == "rail")
    if base in _CODED_GRADIENTS:
        coded_bytes = size_bytes * _ratio(_CODED_GRADIENTS[base])
        return _direct(cluster, coded_bytes, by_rail=level != "flat")
    if base in _CODED_NEIGHBOURS:
        # To both neighbours; of a host's ranks the outer two have one on another host. By rail a host's ranks
        # send a shard each, and two hosts are each other's only neighbour.
        is_pair = cluster.hosts == 2 and (level != "flat" or cluster.per_host == 1)
        coded_bytes = size_bytes * _ratio(_CODED_NEIGHBOURS[base])
        return Cost(host_bytes=(1 if is_pair else 2) * coded_bytes, messages=1)
    if base == "decentralized_shift_one":
        return Cost(host_bytes=size_bytes, messages=1)
    is_hidden = base not in _WAITING
    if base in ("decentralized", "async_model_average", "local_sgd", "diloco"):
        whole = _all_reduce(cluster, size_bytes, by_rail=not is_ring or level != "flat")
        return _times(whole, rounds_per_step, is_hidden=is_hidden)
    if base in ("diloco_int8", "diloco_overlapped"):
        coded = _direct(cluster, size_bytes * _ratio(8), by_rail=level != "flat")
        rounds = rounds_per_step / (_FRAGMENTS if base == "diloco_overlapped" else 1)
        return _times(coded, rounds, is_hidden=is_hidden)
    return None


def _all_reduce(cluster: Cluster, size_bytes: float, *, by_rail: bool) -> Cost:
    peers = cluster.hosts if by_rail else cluster.ranks
    return Cost(host_bytes=2 * (peers - 1) / peers * size_bytes, messages=2 * (peers - 1))


def _direct(cluster: Cluster, coded_bytes: float, *, by_rail: bool) -> Cost:
    if by_rail:
        return Cost(host_bytes=2 * (cluster.hosts - 1) / cluster.hosts * coded_bytes, messages=2)
    outside = cluster.ranks - cluster.per_host
    return Cost(host_bytes=2 * cluster.per_host * outside / cluster.ranks * coded_bytes, messages=2)


def _times(cost: Cost, rounds_per_step: float, *, is_hidden: bool) -> Cost:
    return Cost(
        host_bytes=cost.host_bytes * rounds_per_step,
        messages=cost.messages * rounds_per_step,
        is_hidden=is_hidden,
    )


def _ratio(wire: int | str) -> float:
    return _CODED_BYTES[wire] / _BLOCK_BYTES
