"""A worker's place in the job where the script says it itself, beside what the environment says."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from baguarun.contract import WorkerEnv
from baguarun.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class GivenPlace:
    """What the script says of this worker; -1, as in torch, for what it leaves to the environment."""

    rank: int = -1
    world_size: int = -1
    local_world_size: int = -1
    """Workers on each node, whose ranks are consecutive. Left out it is LOCAL_WORLD_SIZE, else world_size."""

    def __bool__(self) -> bool:
        return self != GivenPlace()


def require_named(env: WorkerEnv) -> None:
    """Raise `UsageError` unless the environment says which rank this worker is of how many."""
    for name in ("rank", "world_size"):
        _require_named(env, name)


def find_place(env: WorkerEnv, given: GivenPlace) -> WorkerEnv:
    """`env` with the place that `given` and it say together.

    Raises `UsageError` if they contradict each other, leave the rank or the size open, or make no sense.
    """
    rank = _agreed(env, "rank", given.rank, env.rank)
    world_size = _agreed(env, "world_size", given.world_size, env.world_size)
    if world_size < 1:
        raise UsageError(f"init_process_group(world_size={world_size}): want at least 1")
    if not 0 <= rank < world_size:
        raise UsageError(f"init_process_group(rank={rank}): want 0 <= rank < world_size={world_size}")
    place = dataclasses.replace(env, rank=rank, world_size=world_size)
    if given.local_world_size == -1 and "LOCAL_RANK" in env.named:
        # Nodes may have unequal numbers of workers then.
        in_all = "LOCAL_WORLD_SIZE" not in env.named
        return dataclasses.replace(place, local_world_size=world_size) if in_all else place
    local_world_size = world_size
    if given.local_world_size != -1 or "LOCAL_WORLD_SIZE" in env.named:
        local_world_size = _agreed(env, "local_world_size", given.local_world_size, env.local_world_size)
    if local_world_size < 1 or world_size % local_world_size:
        raise UsageError(
            f"init_process_group: local_world_size={local_world_size}; want 1 to world_size={world_size}, of "
            "which that is a multiple"
        )
    local_rank = rank % local_world_size
    if "LOCAL_RANK" in env.named and env.local_rank != local_rank:
        raise UsageError(
            f"init_process_group: rank={rank} with local_world_size={local_world_size} has local rank "
            f"{local_rank}, but LOCAL_RANK={env.local_rank}; want the same, or one of them only"
        )
    of_launcher = {"GROUP_RANK", "NODE_RANK"} & env.named
    return dataclasses.replace(
        place,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=env.node_rank if of_launcher else rank // local_world_size,
        num_nodes=world_size // local_world_size,
    )


def _agreed(env: WorkerEnv, name: str, given: int, read: int) -> int:
    """What argument and variable of that name say, of which one may be missing."""
    if given == -1:
        _require_named(env, name)
        return read
    if name.upper() in env.named and given != read:
        raise UsageError(
            f"init_process_group({name}={given}): the environment has {name.upper()}={read}; want the same, "
            "or one of them only"
        )
    return given


def _require_named(env: WorkerEnv, name: str) -> None:
    if name.upper() not in env.named:
        raise UsageError(
            f"init_process_group: there is neither {name}=... nor {name.upper()}, so this worker would train "
            "alone; want rank and world_size, or RANK and WORLD_SIZE, which torchrun and `baguarun run` set"
        )
