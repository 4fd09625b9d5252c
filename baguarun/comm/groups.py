"""Process groups: the job's default group, and the engine's own.

`init_process_group` needs torchrun's variables only, whoever set them: this launcher, torchrun or a hand. Or
the script says the worker's place, which then stands beside them for as long as the default group does.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from baguarun.comm.backend import NAME as BAGUANET
from baguarun.comm.backend import BaguanetOptions, backend_of, backend_on_cpu
from baguarun.comm.extension import load_extension
from baguarun.comm.place import GivenPlace, find_place, require_named
from baguarun.comm.rails import NodeLayout, lay_out
from baguarun.contract import WorkerEnv
from baguarun.errors import UsageError


def init_process_group(
    backend: str | None = None,
    *,
    timeout: timedelta | None = None,
    store: c10d.Store | None = None,
    place: GivenPlace | None = None,
) -> None:
    """Join the job's default process group; a script started by plain `python` becomes a World of one.

    `backend` is nccl where CUDA is there, else baguanet; any other that torch knows may be named, also in
    torch's form "cpu:baguanet,cuda:nccl", whose part for CUDA is left out with a warning where there is no
    CUDA device. `timeout` bounds each collective (None: torch's own). Ranks meet in `store`, which all share
    (None: rank 0's, at MASTER_ADDR and MASTER_PORT). `place` is this worker's by the script, beside what the
    environment says. On CUDA the device of the local rank becomes the current one. A second call does nothing
    if it asks for the same. Raises `UsageError` for a broken environment, a place that contradicts it, a
    store without any place, or a second call that asks for another backend or place.
    """
    env = _read_environment()
    if place:
        env = find_place(env, place)
    has_cuda = torch.cuda.is_available()
    if backend is not None:
        backend = usable_backends(backend, has_cuda)
    chosen = backend or ("nccl" if has_cuda else BAGUANET)
    if dist.is_initialized():
        present = dist.get_backend()
        if backend is not None and backend != present:
            raise UsageError(
                f"init_process_group(backend={backend!r}): the group exists with backend {present!r}; "
                "want the same backend, or dist.destroy_process_group() first"
            )
        if place:
            _require_present(env)
        return
    if store is not None and not place:
        require_named(env)
    if has_cuda:
        _choose_device(env.local_rank)
    _join(chosen, store, env, timeout)
    if place:
        _remember(env)
    abort_with_others(dist.group.WORLD)


def _join(backend: str, store: c10d.Store | None, env: WorkerEnv, timeout: timedelta | None) -> None:
    place: dict[str, Any] = {"rank": env.rank, "world_size": env.world_size}
    if store is None and env.world_size == 1 and not env.master_port:
        store = torch._C._distributed_c10d.HashStore()
    if store is not None:
        dist.init_process_group(backend, store=store, timeout=timeout, **place)
        return
    if not env.master_port:
        raise UsageError(
            f"WORLD_SIZE={env.world_size} but MASTER_PORT is not set; want MASTER_ADDR and MASTER_PORT of "
            "rank 0 (torchrun and `baguarun run` set them)"
        )
    dist.init_process_group(backend, init_method="env://", timeout=timeout, **place)


def _require_present(env: WorkerEnv) -> None:
    """Raise `UsageError` unless the default group that exists already has this worker at that place."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if (env.rank, env.world_size) != (rank, world_size):
        raise UsageError(
            f"init_process_group(rank={env.rank}, world_size={env.world_size}): the group exists, and this "
            f"worker is rank {rank} of {world_size} in it; want the same, or "
            "dist.destroy_process_group() first"
        )
    if _told_place() is None:
        # Torch made the group, which has no word for nodes.
        _remember(env)


def usable_backends(backend: str, has_cuda: bool) -> str:
    """`backend`, for one or several device types as torch writes it, without a CUDA that is not there."""
    parts = backend.split(",")
    usable = [part for part in parts if has_cuda or not part.strip().startswith("cuda:")]
    if usable and len(usable) < len(parts):
        warnings.warn(
            f"there is no CUDA device: of backend={backend!r}, {','.join(usable)} is used", stacklevel=3
        )
        return ",".join(usable)
    return backend


def read_worker_env() -> WorkerEnv:
    """This worker's place, checked; `UsageError` names the variable that makes no sense."""
    env, told = _read_environment(), _told_place()
    if told is None:
        return env
    place = ("rank", "world_size", "local_rank", "local_world_size", "node_rank", "num_nodes")
    return dataclasses.replace(env, **{name: getattr(told, name) for name in place})


def _read_environment() -> WorkerEnv:
    try:
        env = WorkerEnv.from_environ()
    except ValueError as error:
        raise UsageError(
            f"RANK, WORLD_SIZE, LOCAL_RANK and MASTER_PORT must be whole numbers: {error}"
        ) from error
    if not 0 <= env.rank < env.world_size:
        raise UsageError(f"RANK={env.rank}: want 0 <= RANK < WORLD_SIZE={env.world_size}")
    return env


@dataclass(frozen=True)
class _ToldPlace:
    """What the script said, for the default group that was made of it."""

    world: weakref.ref[dist.ProcessGroup]
    env: WorkerEnv


_told: _ToldPlace | None = None


def _remember(env: WorkerEnv) -> None:
    global _told
    world = dist.group.WORLD
    assert world is not None
    _told = _ToldPlace(weakref.ref(world), env)


def _told_place() -> WorkerEnv | None:
    world = dist.group.WORLD
    return _told.env if _told is not None and world is not None and _told.world() is world else None


def engine_group(parent: dist.ProcessGroup, device: torch.device, *, arena_bytes: int) -> dist.ProcessGroup:
    """The group that one engine uses alone, with the members and timeout of `parent`.

    Collective over `parent`. On CPU it is a new one, so that the user's messages and ours never meet; on an
    accelerator it is `parent` itself, since communicators that run side by side may block each other. The
    backend is `parent`'s, but an engine that can use `arena_bytes` of memory that ranks of one host share,
    the same on all ranks, gets baguanet in place of Gloo where all of them are on one host. If that cannot be
    had there it is Gloo, and a warning says why.
    """
    try:
        backend = backend_of(parent, device)
    except RuntimeError as error:
        raise UsageError(
            f"the model is on {device}, for which the process group has no backend "
            f"(it has {dist.get_backend_config(parent)})"
        ) from error
    if device.type != "cpu":
        if backend.name() in ("gloo", BAGUANET):
            raise UsageError(
                f"the model is on {device}; want the nccl backend, the process group has {backend.name()}"
            )
        return parent
    same_number_of_groups(parent)
    timeout = backend.options._timeout
    if backend.name() == "gloo" and arena_bytes > 0 and on_one_host(parent):
        try:
            return _new_engine_group(parent, BAGUANET, timeout, arena_bytes)
        except dist.DistBackendError as error:
            warnings.warn(
                f"gradients go through Gloo although all ranks are on one host: {error}", stacklevel=2
            )
    return _new_engine_group(parent, backend.name(), timeout, arena_bytes)


def _new_engine_group(
    parent: dist.ProcessGroup, backend: str, timeout: timedelta, arena_bytes: int
) -> dist.ProcessGroup:
    group = new_local_group(
        dist.get_process_group_ranks(parent),
        backend=backend,
        timeout=timeout,
        pg_options=made_over(parent, arena_bytes=arena_bytes) if backend == BAGUANET else None,
        group_desc="baguarun engine",
    )
    abort_with_others(group)
    return group


def made_over(parent: dist.ProcessGroup, *, arena_bytes: int = 0) -> BaguanetOptions:
    """For a baguanet group with the members of `parent`, made by a collective of `parent` if that can be."""
    backend = backend_on_cpu(parent)
    is_over = backend is not None and backend.name() == BAGUANET
    return BaguanetOptions(arena_bytes=arena_bytes, over=parent if is_over else None)


def abort_with_others(group: dist.ProcessGroup | None) -> None:
    """Have an ABORT of the agent end what `group` does; groups of baguanet end anyway.

    Nothing in a process that has no channel to its agent.
    """
    if group is None or read_worker_env().control_fd is None:
        return
    for device in group._device_types:
        backend = backend_of(group, device)
        if backend.name() != BAGUANET:
            load_extension().abort_with_groups(backend)


def same_number_of_groups(parent: dist.ProcessGroup) -> None:
    """Let the members of `parent` make groups among themselves, whatever other groups each is in. Collective.

    With `use_local_synchronization` torch names a group by its ranks and by how many groups the process is
    in, and ranks that differ in that wait for each other in vain. Who is in fewer has torch count some more,
    which are nothing else. So does who is in fewer than before, as some have been destroyed: their names, and
    what the store has by them, are used up.
    """
    everyone = [0] * dist.get_world_size(parent)
    names: dict[Any, Any] = c10d._world.pg_names
    dist.all_gather_object(everyone, max(len(names), _used_names().count), group=parent)
    # Groups of this rank alone would do, but each has threads, and its name, of rank and number, may be that
    # of another one which lives on.
    counted: Any = dist.ProcessGroup
    while len(names) < max(everyone):
        names[counted(0, 1)] = f"counted by baguarun {len(names)}"


def new_local_group(ranks: Sequence[int], **settings: Any) -> dist.ProcessGroup:
    """`dist.new_group` by its members alone, after `same_number_of_groups` among them."""
    group: dist.ProcessGroup = dist.new_group(ranks=list(ranks), use_local_synchronization=True, **settings)
    used = _used_names()
    used.count = max(used.count, len(c10d._world.pg_names))
    return group


@dataclass
class _UsedNames:
    """In the job's default group of now."""

    world: weakref.ref[dist.ProcessGroup] | None = None
    count: int = 0
    """Groups up to so many have made names of their number."""


_used = _UsedNames()


def _used_names() -> _UsedNames:
    global _used
    world = dist.group.WORLD
    assert world is not None
    if _used.world is None or _used.world() is not world:
        _used = _UsedNames(world=weakref.ref(world))
    return _used


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long the collectives of `group` on `device` may take."""
    timeout: timedelta = backend_of(group, device).options._timeout
    return timeout


def require_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group that is meant, the default one by None. Raises `UsageError` if this rank is in none."""
    if not dist.is_initialized():
        raise UsageError("there is no process group yet; call baguarun.init_process_group() first")
    group = process_group if process_group is not None else dist.group.WORLD
    if group is None or dist.get_rank(group) < 0:
        raise UsageError("this rank is not a member of process_group")
    return group


def device_of_group(group: dist.ProcessGroup) -> torch.device:
    """Where all ranks of `group` can exchange what is not of the model, wherever each one's model is."""
    types: list[torch.device] = group._device_types
    return next((each for each in types if each.type == "cpu"), types[0])


def on_one_host(group: dist.ProcessGroup) -> bool:
    """Whether all ranks are processes of one machine that see each other and one network. Collective.

    Ranks with a network of their own (containers, network namespaces) count as separate hosts.
    """
    everyone: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(everyone, _host_identity(), group=group)
    return len(set(everyone)) == 1


def find_nodes(group: dist.ProcessGroup) -> NodeLayout:
    """Which ranks of `group` are on one node. Collective.

    Ranks are on one node if they are on one host, as `on_one_host` has it, and their launcher gave them the
    same GROUP_RANK: two agents on one machine are two nodes. A launcher that sets none is trusted with hosts.
    """
    everyone: list[object] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (_host_identity(), read_worker_env().node_rank), group=group)
    return lay_out(everyone)


def keeps_order(ranks: Sequence[int]) -> bool:
    """Whether torch can make a group of `ranks` in this order: older ones sort them."""
    return list(ranks) == sorted(ranks) or "sort_ranks" in inspect.signature(dist.new_group).parameters


def group_like(
    group: dist.ProcessGroup, ranks: Sequence[int], device: torch.device, name: str
) -> dist.ProcessGroup:
    """A group of some `ranks` of `group`, in their order, with its backend for `device` and its timeout.

    Collective over `ranks`, all of which must be in as many groups: see `same_number_of_groups`. Torch must
    be able to keep the order: see `keeps_order`.
    """
    backend = backend_of(group, device)
    all_members = dist.get_process_group_ranks(group)
    members = [all_members[rank] for rank in ranks]
    order: dict[str, Any] = {} if members == sorted(members) else {"sort_ranks": False}
    made = new_local_group(
        members,
        backend=backend.name(),
        timeout=backend.options._timeout,
        group_desc=f"baguarun {name}",
        **order,
    )
    abort_with_others(made)
    return made


def _host_identity() -> str:
    namespaces = (str(os.stat(f"/proc/self/ns/{kind}").st_ino) for kind in ("pid", "net"))
    return ":".join([_read_boot_id(), *namespaces])


def _read_boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _choose_device(local_rank: int) -> None:
    count = torch.cuda.device_count()
    if count > 1 and local_rank >= count:
        raise UsageError(
            f"LOCAL_RANK={local_rank} but this node has {count} CUDA devices; "
            f"want --nproc-per-node {count} or less"
        )
    torch.cuda.set_device(local_rank if count > 1 else 0)
