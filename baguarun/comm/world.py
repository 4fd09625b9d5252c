"""Gives up the groups of one World and joins those of the next, in the same process."""

from __future__ import annotations

import dataclasses
import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed import distributed_c10d as c10d

from baguarun.comm.control import ControlChannel
from baguarun.comm.extension import load_extension
from baguarun.comm.groups import abort_with_others, group_timeout, read_worker_env
from baguarun.contract import World
from baguarun.errors import CommunicationError, UsageError


def enter_world(
    world: World,
    *,
    rank: int,
    listener: socket.socket | None,
    channel: ControlChannel | None,
    timeout: timedelta | None = None,
    within: timedelta | None = None,
) -> None:
    """Make the default group anew as that of `world`, in which this process is `rank`. Collective over it.

    All groups of before are given up, whatever is under way in them and whether or not their ranks live:
    groups that the script made itself are gone, and so is what it kept of the default one, unless as
    `dist.group.WORLD`, looked up when it is needed. The backend stays, and so does the bound of collectives
    if `timeout` is None; `within` bounds how long rank 0's store is waited for. `listener` is a listening
    socket, taken over: rank 0 hosts the ranks' store there, at the World's `master_port`; others close it.
    RANK, WORLD_SIZE and torchrun's other names in `os.environ` change with the World.

    An ABORT for a later generation ends every wait. Raises `CommunicationError` then, and if the ranks do not
    come together within their bound: the process is left in a World of one, and may enter another.
    """
    backend, bound = _present_group()
    bound = bound if timeout is None else timeout
    _give_up_groups(f"generation {world.generation} begins")
    if channel is not None:
        channel.arm(world.generation)
    _take_place(world, rank)
    try:
        store = _join_store(world, rank, listener, bound if within is None else min(bound, within))
        dist.init_process_group(backend, store=store, rank=rank, world_size=world.world_size, timeout=bound)
    except (RuntimeError, ValueError, ConnectionError) as error:
        _give_up_groups("the World could not be entered")
        _stay_alone(backend, bound)
        raise CommunicationError(
            f"rank {rank} of {world.world_size} could not enter generation {world.generation} at "
            f"{world.master_addr}:{world.master_port}: {error}"
        ) from error
    finally:
        if listener is not None:
            listener.close()
    abort_with_others(dist.group.WORLD)


def _present_group() -> tuple[str, timedelta]:
    """Backend and bound of the default group."""
    if not dist.is_initialized() or dist.group.WORLD is None:
        raise UsageError("there is no process group to go on from; call baguarun.init_process_group() first")
    group: Any = dist.group.WORLD
    return dist.get_backend(), group_timeout(group, group._device_types[0])


def _give_up_groups(reason: str) -> None:
    load_extension().abort_groups(reason)
    if not dist.is_initialized():
        return
    group: Any = dist.group.WORLD
    if torch.device("cuda") in group._device_types:
        # Destroying would wait for collectives that never end.
        c10d._abort_process_group()
    else:
        dist.destroy_process_group()


def _join_store(world: World, rank: int, listener: socket.socket | None, bound: timedelta) -> Any:
    if world.world_size == 1:
        return HashStore()
    hosted = None
    if rank == 0:
        if listener is None:
            raise UsageError("enter_world: rank 0 hosts the store; want a listening socket")
        hosted = listener.detach()
    try:
        store = load_extension().WorldStore(world.master_addr, world.master_port, hosted, bound)
    except RuntimeError as error:
        raise ConnectionError(
            f"rank 0 ({world.master_addr}:{world.master_port}): its store is not reached: {error}"
        ) from error
    return PrefixStore(f"generation/{world.generation}", store)


def _stay_alone(backend: str, bound: timedelta) -> None:
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=bound)


def _take_place(world: World, rank: int) -> None:
    """For what reads the environment later: our own code, and the script's."""
    env = dataclasses.replace(
        read_worker_env(),
        rank=rank,
        node_rank=world.node_rank,
        num_nodes=world.num_nodes,
        world_size=world.world_size,
        local_world_size=world.local_world_size,
        master_addr=world.master_addr,
        master_port=world.master_port,
        restart_count=world.restart_count,
        max_restarts=world.max_restarts,
        generation=world.generation,
    )
    os.environ.update(env.to_environ())
