from __future__ import annotations

from baguarun.contract import WorkerEnv, World
from baguarun.launcher.rendezvous import Static, choose_rendezvous
from baguarun.launcher.settings import RunSettings
from baguarun.launcher.static import static_world


def test_the_world_of_a_static_job_follows_from_the_flags() -> None:
    settings = RunSettings(script="x", min_nodes=3, max_nodes=3, node_rank=2, master_addr="n0", job_id="j")
    assert static_world(settings, 4) == World(
        job_id="j",
        generation=1,
        node_rank=2,
        num_nodes=3,
        first_rank=8,
        local_world_size=4,
        world_size=12,
        master_addr="n0",
        master_port=29500,
        restart_count=0,
        max_restarts=0,
    )


def test_a_secret_is_not_shown_where_a_world_is_printed() -> None:
    world = static_world(RunSettings(script="x", master_port=1), 1, net_secret="hush")
    assert world.net_secret == "hush"
    assert "hush" not in repr(world)
    assert "hush" not in repr(WorkerEnv.for_worker(world, 0, extra={"BAGUA_NET_SECRET": "hush"}))


def test_the_nodes_of_a_static_job_share_out_all_ranks() -> None:
    worlds = [
        static_world(RunSettings(script="x", min_nodes=3, max_nodes=3, node_rank=n, master_addr="n0"), 2)
        for n in range(3)
    ]
    ranks = [world.first_rank + local for world in worlds for local in range(world.local_world_size)]
    assert ranks == list(range(worlds[0].world_size))


def test_every_restart_of_a_single_static_node_is_a_generation() -> None:
    settings = RunSettings(script="x", master_port=29501, max_restarts=3)
    assert choose_rendezvous(settings) == Static("127.0.0.1", 29501, 0)
    world = static_world(settings, 2, restart_count=2)
    assert (world.generation, world.restart_count, world.max_restarts) == (3, 2, 3)
