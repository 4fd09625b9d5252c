"""Bagua's process groups and communicators, on those of torch.distributed."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from baguarun.comm.groups import group_timeout, new_local_group, read_worker_env, same_number_of_groups
from baguarun.comm.groups import init_process_group as _init_process_group
from baguarun.comm.place import GivenPlace
from baguarun.errors import ArgumentError, UsageError

__all__ = [
    "ArgumentError",
    "BaguaProcessGroup",
    "CommLike",
    "CommMember",
    "Communicator",
    "NoGroupError",
    "default_group",
    "from_torch_group",
    "group_of",
    "init_process_group",
    "is_initialized",
    "new_group",
]


class NoGroupError(UsageError, RuntimeError):
    """There is no default group yet; a `RuntimeError` too, which scripts written for Bagua may catch."""


class CommMember(enum.Enum):
    """What may stand in place of a communicator."""

    WORLD = "WORLD"
    """The global communicator of the default group."""
    NON_COMM_MEMBER = "NON_COMM_MEMBER"
    """This rank is not in the group: primitives return at once and touch nothing."""


class Communicator:
    """The ranks that a primitive works on. Ranks in its arguments count within it, from 0.

    Threads: as torch's groups, one at a time.
    """

    def __init__(self, torch_group: dist.ProcessGroup) -> None:
        self.torch_group = torch_group

    def rank(self) -> int:
        """This worker's rank in the communicator."""
        return dist.get_rank(self.torch_group)

    def nranks(self) -> int:
        """Ranks in the communicator."""
        return dist.get_world_size(self.torch_group)

    def ranks(self) -> list[int]:
        """The members by their ranks in the default group."""
        return list(dist.get_process_group_ranks(self.torch_group))


CommLike: TypeAlias = "Communicator | BaguaProcessGroup | dist.ProcessGroup | CommMember | int | None"
"""What a primitive takes as `comm`: a communicator, a group for its global one, None for the default group.
The only int is torch's `GroupMember.NON_GROUP_MEMBER`."""


class BaguaProcessGroup:
    """Some ranks of the job, with a communicator for all of them, one per node and one between nodes.

    Made by `new_group` and `from_torch_group`. `ranks` are the members by their ranks in the default group;
    it is empty on a rank outside of a group that torch made.
    """

    def __init__(self, ranks: Sequence[int], torch_group: dist.ProcessGroup | None) -> None:
        self.ranks = list(ranks)
        self.torch_group = torch_group
        self._intra: Communicator | CommMember | None = None
        self._inter: Communicator | CommMember | None = None

    def get_global_communicator(self) -> Communicator | CommMember:
        """The communicator of all members; `CommMember.NON_COMM_MEMBER` on any other rank."""
        return CommMember.NON_COMM_MEMBER if self.torch_group is None else Communicator(self.torch_group)

    def get_intra_node_communicator(self) -> Communicator | CommMember:
        """The communicator of the members on this worker's node.

        The first call is collective over the group, and so is the first one for the other kind; the handle
        keeps the communicators. A worker's node begins at RANK - LOCAL_RANK: ranks of a node are consecutive.
        """
        if self._intra is None:
            self._make_node_communicators()
        assert self._intra is not None
        return self._intra

    def get_inter_node_communicator(self) -> Communicator | CommMember:
        """The communicator of the first member on each node; `NON_COMM_MEMBER` on the others.

        Collective as `get_intra_node_communicator`. Nodes may have unequal numbers of workers.
        """
        if self._inter is None:
            self._make_node_communicators()
        assert self._inter is not None
        return self._inter

    def _make_node_communicators(self) -> None:
        if self.torch_group is None:
            self._intra = self._inter = CommMember.NON_COMM_MEMBER
            return
        me = dist.get_rank()
        nodes = [0] * dist.get_world_size(self.torch_group)
        dist.all_gather_object(nodes, me - read_worker_env().local_rank, group=self.torch_group)
        members: dict[int, list[int]] = {}
        for rank, node in zip(dist.get_process_group_ranks(self.torch_group), nodes, strict=True):
            members.setdefault(node, []).append(rank)
        same_number_of_groups(self.torch_group)
        leaders = [ranks[0] for ranks in members.values()]
        mine = next(ranks for ranks in members.values() if me in ranks)
        self._intra = Communicator(_make_torch_group(mine))
        self._inter = (
            Communicator(_make_torch_group(leaders)) if me in leaders else CommMember.NON_COMM_MEMBER
        )


def init_process_group(
    store: c10d.Store | None = None,
    rank: int = -1,
    world_size: int = -1,
    local_world_size: int = -1,
    *,
    backend: str | None = None,
    timeout: timedelta | None = None,
) -> None:
    """Join the job's default process group, over `store` if there is one, else over MASTER_ADDR's.

    What is -1 is the environment's: RANK, WORLD_SIZE, LOCAL_WORLD_SIZE; where that does not say how many
    workers a node has, all are on one. Ranks of a node are consecutive. Raises `UsageError` for a place that
    makes no sense or contradicts the environment, and for a store without any place.

    As `baguarun.init_process_group`: NCCL where CUDA is there, else baguanet; a second call does nothing,
    where Bagua raises. A group that torch has made already is used as it is, and `store` is not.
    """
    if store is not None and not isinstance(store, c10d.Store):
        raise ArgumentError(f"init_process_group(store={store!r}): want a store; a backend goes by its name")
    place = GivenPlace(rank=rank, world_size=world_size, local_world_size=local_world_size)
    _init_process_group(backend, timeout=timeout, store=store, place=place)


def is_initialized() -> bool:
    """Whether the default group is there."""
    return dist.is_initialized()


def new_group(
    ranks: Sequence[int] | None = None, stream: torch.cuda.Stream | None = None
) -> BaguaProcessGroup:
    """A group of `ranks` of the default group (None: all), in ascending order whatever their order here.

    All ranks of the default group call it, members or not, in the same order for all groups. Backend and
    timeout are the default group's. A `stream` is not used: torch runs NCCL on streams of its own, and
    results are ordered as Bagua's are; a warning says so. Raises `ArgumentError` for a rank outside of the
    default group, one that is there twice, or no rank.
    """
    world = _require_world()
    _warn_of(stream)
    size = dist.get_world_size(world)
    members = list(range(size)) if ranks is None else sorted(ranks)
    wrong = [rank for rank in members if not 0 <= rank < size]
    if wrong or not members or len(set(members)) < len(members):
        raise ArgumentError(
            f"new_group(ranks={members}): want different ranks from 0 to {size - 1}, at least one"
        )
    made = dist.new_group(ranks=members, timeout=_timeout(world))
    return BaguaProcessGroup(members, made if dist.get_rank() in members else None)


def from_torch_group(
    group: dist.ProcessGroup | int, stream: torch.cuda.Stream | None = None
) -> BaguaProcessGroup:
    """The handle by which the primitives work on a group that `torch.distributed.new_group` has made.

    Nothing new is made: the collectives of both go through the same group. On a rank outside of it, where
    torch gives `GroupMember.NON_GROUP_MEMBER`, all primitives do nothing. `stream` as in `new_group`.
    """
    _warn_of(stream)
    if group is None:
        # What torch gives to ranks outside of a group with use_local_synchronization; here, None is WORLD.
        raise ArgumentError("from_torch_group(group=None): want a group, or call it on its members only")
    found = group_of(group)
    return BaguaProcessGroup([] if found is None else dist.get_process_group_ranks(found), found)


def group_of(comm: CommLike) -> dist.ProcessGroup | None:
    """Torch's group behind `comm`, or None if this rank is not a member.

    Raises `NoGroupError` before `init_process_group`, `ArgumentError` for what is no communicator.
    """
    if isinstance(comm, Communicator):
        return comm.torch_group
    if comm is None or comm is CommMember.WORLD:
        return _require_world()
    if comm is CommMember.NON_COMM_MEMBER or comm == dist.GroupMember.NON_GROUP_MEMBER:
        return None
    if isinstance(comm, BaguaProcessGroup):
        return comm.torch_group
    if isinstance(comm, dist.ProcessGroup):
        return comm
    raise ArgumentError(f"comm={comm!r}: want a communicator, a process group or None")


def default_group() -> BaguaProcessGroup:
    """A handle of the default group; raises `NoGroupError` before `init_process_group`.

    Each handle makes its own communicators per node, so keep one that asks for them.
    """
    return from_torch_group(_require_world())


def _require_world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    if world is None:
        raise NoGroupError("there is no process group yet; call init_process_group() first")
    return world


def _make_torch_group(ranks: list[int]) -> dist.ProcessGroup:
    """A group of its own for `ranks`, made by them alone; collective over them."""
    return new_local_group(ranks, timeout=_timeout(_require_world()))


def _timeout(world: dist.ProcessGroup) -> timedelta:
    return group_timeout(world, world._device_types[0])


def _warn_of(stream: torch.cuda.Stream | None) -> None:
    if stream is not None:
        warnings.warn(
            "stream=... is not used: torch runs collectives on streams of its own, in order with the current "
            "stream",
            stacklevel=3,
        )
