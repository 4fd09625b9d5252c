"""Which ranks share a node, and by which rails nodes are joined: decided alike on every rank."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from baguarun.errors import UsageError

Hierarchical = bool | Literal["auto"]
"""Exchange by rail: True, False, or "auto", where several nodes have several workers."""


@dataclass(frozen=True, kw_only=True)
class NodeLayout:
    """The ranks of a group by node.

    What is exchanged by rail is dealt out in `num_rails` shards, as many as the smallest node has ranks.
    Shard i belongs to the i-th rank of every node; these ranks are rail i. Further ranks of a larger node own
    nothing: they give to the owners of their node and get from them.
    """

    nodes: tuple[tuple[int, ...], ...]
    """Ranks of each node in rising order; nodes in the order of their first ranks."""

    @property
    def num_rails(self) -> int:
        return min(len(node) for node in self.nodes)

    @property
    def world_size(self) -> int:
        return sum(len(node) for node in self.nodes)

    def node_index(self, rank: int) -> int:
        return next(index for index, node in enumerate(self.nodes) if rank in node)

    def node_of(self, rank: int) -> tuple[int, ...]:
        """The ranks of the node of `rank`."""
        return self.nodes[self.node_index(rank)]

    def rail_of(self, rank: int) -> tuple[int, ...]:
        """The owners of the shard that `rank` owns, one per node; empty if it owns none."""
        place = self.node_of(rank).index(rank)
        return tuple(node[place] for node in self.nodes) if place < self.num_rails else ()


def lay_out(node_of_rank: Sequence[Hashable]) -> NodeLayout:
    """The layout of ranks 0, 1, ... from what each calls its node."""
    nodes: dict[Hashable, list[int]] = {}
    for rank, node in enumerate(node_of_rank):
        nodes.setdefault(node, []).append(rank)
    return NodeLayout(nodes=tuple(tuple(ranks) for ranks in nodes.values()))


def goes_by_rail(hierarchical: Hierarchical, layout: NodeLayout, *, with_few: bool = False) -> bool:
    """Whether ranks laid out so exchange by rail; never where that would be the exchange among all ranks.

    `with_few`: ranks, or nodes, exchange with some others only, so that a single node differs from its ranks.
    """
    if hierarchical == "auto":
        return sum(len(node) > 1 for node in layout.nodes) > 1
    return hierarchical and len(layout.nodes) < layout.world_size and (with_few or len(layout.nodes) > 1)


def require_hierarchical(algorithm: str, value: object) -> None:
    """Raise `UsageError` unless `value` is a `Hierarchical`."""
    if value is True or value is False or value == "auto":
        return
    raise UsageError(f"{algorithm}: hierarchical={value!r}; want True, False or 'auto'")
