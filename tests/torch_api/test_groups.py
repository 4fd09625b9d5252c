"""Groups by Bagua's names: members, ranks outside, communicators per node."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

import baguarun.torch_api as bagua
from baguarun.errors import UsageError
from baguarun.torch_api.communication import ArgumentError, CommMember, Communicator, _get_default_group
from baguarun.torch_api.data_parallel.distributed import to_bagua_process_group
from tests.comm.models import assert_averaged, batch, gathered_gradients, loss, mlp
from tests.comm.ranks import run_ranks

BACKENDS = pytest.mark.parametrize("backend", ["baguanet", "gloo"])


def member(found: Communicator | CommMember) -> Communicator:
    assert isinstance(found, Communicator)
    return found


def works_in_part_of_the_world() -> None:
    rank = bagua.get_rank()
    odd = bagua.new_group([3, 1])
    assert odd.ranks == [1, 3]
    comm = odd.get_global_communicator()
    tensor = torch.full((4,), float(rank))
    bagua.allreduce_inplace(tensor, comm=comm)
    # Roots count within the group: 0 is rank 1.
    bagua.broadcast(tensor, 0, comm=comm)
    everyone = torch.full((8,), -1.0)
    bagua.gather(tensor, everyone, 1, comm)
    if rank % 2:
        assert (member(comm).rank(), member(comm).nranks()) == (rank // 2, 2)
        assert member(comm).ranks() == [1, 3]
        assert tensor.tolist() == [4.0] * 4
        assert everyone.tolist() == ([4.0] * 8 if rank == 3 else [-1.0] * 8)
        assert bagua.broadcast_object(rank, 1, comm) == 3
    else:
        assert comm is CommMember.NON_COMM_MEMBER
        assert tensor.tolist() == [float(rank)] * 4 and everyone.tolist() == [-1.0] * 8
        assert bagua.broadcast_object(rank, 1, comm) is None
        assert odd.get_intra_node_communicator() is CommMember.NON_COMM_MEMBER
    bagua.barrier(odd)

    # Every primitive takes the group itself, too, and CommMember.WORLD for the default one.
    ones = torch.ones(1)
    bagua.allreduce_inplace(ones, comm=odd)
    assert ones.item() == (2 if rank % 2 else 1)
    bagua.allreduce_inplace(ones, comm=CommMember.WORLD)
    assert ones.item() == 6


def takes_torch_groups() -> None:
    rank = bagua.get_rank()
    theirs = dist.new_group([0, 2])
    ours = bagua.from_torch_group(theirs)
    comm = ours.get_global_communicator()
    tensor = torch.ones(1)
    bagua.allreduce_inplace(tensor, comm=comm)
    if rank in (0, 2):
        assert member(comm).rank() == dist.get_rank(theirs) and ours.ranks == [0, 2]
        assert member(comm).nranks() == dist.get_world_size(theirs) and tensor.item() == 2
        assert to_bagua_process_group(theirs).torch_group is theirs
    else:
        assert comm is CommMember.NON_COMM_MEMBER and tensor.item() == 1
    assert to_bagua_process_group(ours) is ours
    assert to_bagua_process_group().ranks == [0, 1, 2, 3] == _get_default_group().ranks


def finds_nodes_of_unequal_size() -> None:
    """Three workers on the first node, one on the second; a group without the first one."""
    rank = bagua.get_rank()
    os.environ.update(LOCAL_RANK=str(rank if rank < 3 else 0), LOCAL_WORLD_SIZE=str(3 if rank < 3 else 1))
    world = _get_default_group()
    assert member(world.get_intra_node_communicator()).ranks() == ([0, 1, 2] if rank < 3 else [3])
    inter = world.get_inter_node_communicator()
    assert (member(inter).ranks() == [0, 3]) if rank in (0, 3) else inter is CommMember.NON_COMM_MEMBER
    assert world.get_inter_node_communicator() is inter
    group = bagua.new_group([1, 2, 3])
    if rank:
        assert member(group.get_intra_node_communicator()).ranks() == ([1, 2] if rank < 3 else [3])
        inter = group.get_inter_node_communicator()
        tensor = torch.ones(1)
        bagua.allreduce_inplace(tensor, comm=inter)
        assert tensor.item() == (2 if rank in (1, 3) else 1)


def refuses_groups() -> None:
    for ranks in ([0, 4], [-1], [1, 1], []):
        with pytest.raises(ValueError, match=r"want different ranks from 0 to 3"):
            bagua.new_group(ranks)
    with pytest.raises(ArgumentError, match="comm='odd'"):
        bagua.from_torch_group("odd")  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="stream"):
        bagua.new_group(stream=object())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="not a member"):
        mlp().with_bagua([], "bytegrad", _outside())  # type: ignore[operator]


def _outside() -> bagua.BaguaProcessGroup:
    groups = [bagua.new_group([rank]) for rank in range(bagua.get_world_size())]
    return groups[bagua.get_rank() - 1]


def trains_in_a_group() -> None:
    """Its ranks are in unequal numbers of other groups by now."""
    pairs = [bagua.new_group([0, 1]), bagua.new_group([2, 3])]
    pair = pairs[bagua.get_rank() // 2]
    plain, model = mlp(), mlp()
    bagua.broadcast(next(plain.parameters()), 0)
    data = batch(plain)
    model = model.with_bagua([], "gradient_allreduce", pair)  # type: ignore[operator]
    reference = gathered_gradients(plain, lambda local: loss(local(data)).backward())
    first = bagua.get_rank() // 2 * 2
    loss(model(data)).backward()
    assert_averaged(model, {name: grads[first : first + 2] for name, grads in reference.items()})


def all_of_it() -> None:
    works_in_part_of_the_world()
    takes_torch_groups()
    finds_nodes_of_unequal_size()
    refuses_groups()
    trains_in_a_group()


@BACKENDS
def test_groups_work_on_their_members_and_leave_the_others_alone(backend: str) -> None:
    run_ranks(all_of_it, 4, backend=backend)


def test_without_init_process_group_there_is_a_clear_message() -> None:
    assert not bagua.is_initialized()
    for call in (bagua.barrier, bagua.new_group, _get_default_group):
        with pytest.raises(UsageError, match="call init_process_group"):
            call()
    with pytest.raises(ArgumentError, match="a backend goes by its name"):
        bagua.init_process_group("gloo")  # type: ignore[arg-type]


def joins_over_a_store(path: str) -> str:
    dist.barrier()
    dist.destroy_process_group()
    size = int(os.environ["WORLD_SIZE"])
    bagua.init_process_group(dist.FileStore(path, size), backend="gloo")
    tensor = torch.ones(1)
    bagua.allreduce_inplace(tensor)
    assert tensor.item() == size and bagua.is_initialized()
    return str(dist.get_backend())


def test_ranks_may_meet_in_a_store_of_the_script(tmp_path: object) -> None:
    assert run_ranks(joins_over_a_store, 2, f"{tmp_path}/store") == ["gloo", "gloo"]
