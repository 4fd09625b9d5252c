"""Lanes: groups of the same ranks side by side, which take turns at the parts of what is large.

A group on Gloo has one connection between two ranks, whose window bounds what it carries where the way is
long, and runs two collectives at a time, of which each waits for others while it sends nothing.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from baguarun.comm.groups import group_like

# Weights of 34 MB, averaged by four ranks on two hosts while they train: without a limit of the wire and with
# 5 ms 380 ms with one lane, 304 with 2, 174 to 200 with 4, 181 to 191 with 8; 140 to 170 without latency with
# any number. At 1 Gbit/s 515, 469 and 476 with 1, 4 and 8, 450 to 460 without latency.
_GLOO_LANES = 4
_GLOO_AT_ONCE = 2

Lanes = tuple[dist.ProcessGroup, ...]
"""The first one is the group that the others are like."""


def join_lanes(group: dist.ProcessGroup, device: torch.device) -> Lanes:
    """The lanes of `group`: on Gloo with more groups of its ranks, in their order.

    Collective over `group`, all of which must be in as many groups: see `same_number_of_groups`.
    """
    if not _is_gloo(group):
        return (group,)
    ranks = range(dist.get_world_size(group))
    return (group, *(group_like(group, ranks, device, "lane") for _ in range(_GLOO_LANES - 1)))


def most_parts(lanes: Lanes) -> int:
    """As so many parts what is large goes fastest."""
    return _GLOO_AT_ONCE * len(lanes) if _is_gloo(lanes[0]) else 1


def _is_gloo(group: dist.ProcessGroup) -> bool:
    return bool(dist.get_backend(group) == dist.Backend.GLOO)
