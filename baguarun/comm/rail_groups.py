"""What one model's communication needs to go by rail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from baguarun.comm.groups import find_nodes, group_like, keeps_order, same_number_of_groups
from baguarun.comm.lanes import Lanes, join_lanes
from baguarun.comm.rails import Hierarchical, NodeLayout, goes_by_rail
from baguarun.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class RailGroups:
    """One rank's place on the rails of the engine's group."""

    layout: NodeLayout
    rank: int
    """In the engine's group, as all ranks of the layout."""
    node: dist.ProcessGroup | None
    """The ranks of this node, in the layout's order. None if collectives are not needed, as below, and on a
    single node, whose ranks are all ranks."""
    lanes: Lanes
    """Of the owners of this rank's shard, in the order of nodes; of this rank alone if it owns none. Empty as
    `node` is None."""

    @property
    def rail(self) -> dist.ProcessGroup | None:
        """The first of the lanes."""
        return self.lanes[0] if self.lanes else None

    def for_engine(self, extension: Any) -> Any:
        """As `baguarun._C.Rails`."""
        return extension.Rails(
            node=self.layout.node_of(self.rank),
            rail=self.layout.rail_of(self.rank),
            num_rails=self.layout.num_rails,
            num_nodes=len(self.layout.nodes),
            num_ranks=self.layout.world_size,
            node_group=self.node,
            rail_group=self.rail,
        )


def join_rails(
    hierarchical: Hierarchical,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    collectives: bool,
    with_few: bool = False,
) -> RailGroups | None:
    """This rank's place on the rails of `group`; None where everything goes among all ranks.

    Groups for collectives inside nodes and on rails are made if `collectives`, and on accelerators, where the
    engine needs them too. `with_few` as in `goes_by_rail`. Collective over `group` unless `hierarchical` is
    False.
    """
    if hierarchical is False or (hierarchical == "auto" and device.type != "cpu"):
        # Communicators that run beside the job's own may block each other: only for those who ask for them.
        return None
    layout, rank = find_nodes(group), dist.get_rank(group)
    if not goes_by_rail(hierarchical, layout, with_few=with_few):
        return None
    if len(layout.nodes) == 1 or (not collectives and device.type == "cpu"):
        return RailGroups(layout=layout, rank=rank, node=None, lanes=())
    members = dist.get_process_group_ranks(group)
    rails = {layout.rail_of(each) for each in range(layout.world_size)} - {()}
    if not all(keeps_order([members[each] for each in ranks]) for ranks in rails):
        # All ranks find the same.
        if hierarchical is True:
            raise UsageError(
                f"hierarchical=True: the ranks of nodes are {layout.nodes}, and this torch sorts those of a "
                "group; want ranks that rise node by node, or torch 2.13"
            )
        return None
    same_number_of_groups(group)
    node = group_like(group, layout.node_of(rank), device, "node")
    rail = group_like(group, layout.rail_of(rank) or (rank,), device, "rail")
    # Who exchanges with few has messages, which go on the first lane.
    lanes = (rail,) if with_few else join_lanes(rail, device)
    return RailGroups(layout=layout, rank=rank, node=node, lanes=lanes)
