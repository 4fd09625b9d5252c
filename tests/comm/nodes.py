"""Ranks of this machine that take each other for ranks of several nodes."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch.distributed as dist


def live_on_nodes(sizes: Sequence[int]) -> None:
    """Have this rank say that it is on one of nodes with so many workers, as a launcher would tell it."""
    live_among([node for node, size in enumerate(sizes) for _ in range(size)])


def live_among(nodes: Sequence[int]) -> None:
    """The same, with the node of each rank."""
    rank = dist.get_rank()
    node = nodes[rank]
    os.environ.update(
        GROUP_RANK=str(node),
        GROUP_WORLD_SIZE=str(len(set(nodes))),
        LOCAL_RANK=str(nodes[:rank].count(node)),
        LOCAL_WORLD_SIZE=str(nodes.count(node)),
    )
