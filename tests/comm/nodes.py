"""Ranks of this machine that take each other for ranks of several nodes."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch.distributed as dist


def live_on_nodes(sizes: Sequence[int]) -> None:
    """Have this rank say that it is on one of nodes with so many workers, as a launcher would tell it."""
    rank = dist.get_rank()
    for node, size in enumerate(sizes):
        if rank < size:
            os.environ.update(
                GROUP_RANK=str(node),
                GROUP_WORLD_SIZE=str(len(sizes)),
                LOCAL_RANK=str(rank),
                LOCAL_WORLD_SIZE=str(size),
            )
            return
        rank -= size
    raise ValueError(f"rank {dist.get_rank()} has no place on nodes of {list(sizes)}")
