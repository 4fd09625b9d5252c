"""A static job's World: from flags alone, no store and no membership."""

from __future__ import annotations

from baguarun.contract import World
from baguarun.launcher.rendezvous import Static, choose_rendezvous
from baguarun.launcher.settings import RunSettings


def static_world(settings: RunSettings, slots: int, *, restart_count: int = 0, net_secret: str = "") -> World:
    """This node's World of a static job; every node must have the same number of slots.

    Each restart (possible on a single node only) is a generation of its own. Several nodes have no way to
    agree on a `net_secret`.
    """
    place = choose_rendezvous(settings)
    assert isinstance(place, Static), place
    return World(
        job_id=settings.job_id,
        generation=restart_count + 1,
        node_rank=place.node_rank,
        num_nodes=settings.max_nodes,
        first_rank=place.node_rank * slots,
        local_world_size=slots,
        world_size=settings.max_nodes * slots,
        master_addr=place.master_addr,
        master_port=place.master_port,
        restart_count=restart_count,
        max_restarts=settings.max_restarts,
        net_secret=net_secret,
    )
