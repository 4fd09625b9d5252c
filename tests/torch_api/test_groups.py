"""Groups by Bagua's names: members, ranks outside, communicators per node."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import baguarun.torch_api as bagua
from baguarun.comm.groups import find_nodes
from baguarun.comm.place import GivenPlace, find_place
from baguarun.contract import WorkerEnv
from baguarun.errors import UsageError
from baguarun.torch_api.communication import (
    ArgumentError,
    CommMember,
    Communicator,
    _get_default_group,
    _rank_not_in_comm,
    _rank_not_in_group,
)
from baguarun.torch_api.data_parallel.distributed import DistributedDataParallel, to_bagua_process_group
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


def trains_alone_outside() -> None:
    """As Bagua's programs do: all ranks wrap with a group of some, by now in unequal numbers of groups."""
    rank = bagua.get_rank()
    group = bagua.new_group([1, 2])
    assert _rank_not_in_group(group) == (rank in (0, 3)) == _rank_not_in_comm(group.get_global_communicator())
    assert not _rank_not_in_group() and not _rank_not_in_comm()
    algorithms = bagua.algorithms
    wrappers: list[Callable[[nn.Module, torch.optim.Optimizer, Any], Any]] = [
        lambda model, optimizer, algorithm: model.with_bagua([optimizer], algorithm, group),
        lambda model, optimizer, algorithm: DistributedDataParallel(
            model, process_group=group, optimizers=[optimizer], algorithm=algorithm
        ),
    ]
    for wrap in wrappers:
        for make in (
            algorithms.gradient_allreduce.GradientAllReduceAlgorithm,
            algorithms.async_model_average.AsyncModelAverageAlgorithm,
            algorithms.decentralized.LowPrecisionDecentralizedAlgorithm,
        ):
            plain = mlp()
            model = copy.deepcopy(plain)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            algorithm = make()
            wrapped = wrap(model, optimizer, algorithm)
            assert wrapped.bagua_algorithm is algorithm and wrapped.bagua_optimizers == [optimizer]
            first, second = batch(plain), batch(plain)
            with wrapped.no_sync():
                loss(wrapped(first)).backward()
            loss(wrapped(second)).backward()
            optimizer.step()
            if isinstance(algorithm, algorithms.async_model_average.AsyncModelAverageAlgorithm):
                algorithm.abort(wrapped)
                algorithm.resume(wrapped)
            if rank in (0, 3):
                loss(plain(first)).backward()
                loss(plain(second)).backward()
                torch.optim.SGD(plain.parameters(), lr=0.01).step()
                for alone, parameter in zip(plain.parameters(), model.parameters(), strict=True):
                    assert torch.equal(alone, parameter)
                assert wrapped.stats().bytes_sent == 0
            elif algorithm == algorithms.gradient_allreduce.GradientAllReduceAlgorithm():
                weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
                both = torch.empty(2 * weights.numel())
                bagua.allgather(weights, both, group)
                assert torch.equal(both[: weights.numel()], both[weights.numel() :])
                assert wrapped.stats().bytes_sent > 0
    # As when a model is wrapped again: with the group, and by all.
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for where in (group, None, group):
        model.with_bagua([optimizer], "decentralized", where)  # type: ignore[operator]
        loss(model(batch(model))).backward()
        optimizer.step()
    assert (model.stats().weight_rounds == 1) == (rank in (1, 2))
    # The World goes on together.
    ones = torch.ones(1)
    bagua.allreduce_inplace(ones)
    assert ones.item() == 4


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
    trains_alone_outside()
    trains_in_a_group()


@BACKENDS
def test_groups_work_on_their_members_and_leave_the_others_alone(backend: str) -> None:
    run_ranks(all_of_it, 4, backend=backend)


def test_without_init_process_group_there_is_a_clear_message() -> None:
    assert not bagua.is_initialized()
    for call in (bagua.barrier, bagua.new_group, _get_default_group):
        # In Bagua it is a RuntimeError.
        for kind in (UsageError, RuntimeError):
            with pytest.raises(kind, match="call init_process_group"):
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


PLACE = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "NODE_RANK",
)


def joins_as_told(path: str, ports: list[str], local_world_size: int) -> tuple[int, ...]:
    """As Bagua's own tests do: processes without any variable of a launcher."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    for name in PLACE:
        os.environ.pop(name, None)
    with pytest.raises(UsageError, match=r"neither rank=\.\.\. nor RANK, so this worker would train alone"):
        bagua.init_process_group(dist.HashStore())
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=ports[0])
    for kind in ("file", "tcp", "address"):
        store: dist.Store | None = None
        if kind == "file":
            store = dist.FileStore(path, size)
        elif kind == "tcp":
            store = dist.TCPStore("127.0.0.1", int(ports[1]), size, is_master=rank == 0)
        bagua.init_process_group(store=store, rank=rank, world_size=size, local_world_size=local_world_size)
        tensor = torch.ones(1)
        bagua.allreduce_inplace(tensor)
        assert tensor.item() == size and (bagua.get_rank(), bagua.get_world_size()) == (rank, size)
        places = [None] * size
        dist.all_gather_object(places, (bagua.get_local_rank(), bagua.get_node_rank()))
        assert places == [(each % local_world_size, each // local_world_size) for each in range(size)]
        intra = _get_default_group().get_intra_node_communicator()
        first = rank // local_world_size * local_world_size
        assert member(intra).ranks() == list(range(first, first + local_world_size))
        assert len(find_nodes(_get_default_group().torch_group).nodes) == size // local_world_size
        # Again with the same, and with nothing, it does nothing.
        bagua.init_process_group(rank=rank, world_size=size)
        bagua.init_process_group()
        with pytest.raises(UsageError, match=f"this worker is rank {rank} of {size} in it"):
            bagua.init_process_group(rank=(rank + 1) % size, world_size=size)
        found = bagua.get_local_rank(), bagua.get_local_size(), bagua.get_node_rank()
        dist.barrier()
        dist.destroy_process_group()
        # What was said holds for that group only, and is not in the environment.
        assert bagua.get_world_size() == 1 and not set(PLACE) & os.environ.keys()
    return found


def test_ranks_join_by_bagua_s_arguments_and_no_variable(tmp_path: Path) -> None:
    ports = [str(bagua.env.find_free_network_port()) for _ in range(2)]
    places = run_ranks(joins_as_told, 4, f"{tmp_path}/store", ports, 2)
    assert places == [(0, 2, 0), (1, 2, 0), (0, 2, 1), (1, 2, 1)]


def takes_the_device_of_the_local_rank(path: str) -> list[int]:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    for name in PLACE:
        os.environ.pop(name, None)
    chosen: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.cuda.is_available", lambda: True)
        patch.setattr("torch.cuda.device_count", lambda: 2)
        patch.setattr("torch.cuda.set_device", chosen.append)
        bagua.init_process_group(dist.FileStore(path, size), rank, size, 2, backend="baguanet")
    return chosen


def test_the_device_is_the_local_rank_s(tmp_path: Path) -> None:
    assert run_ranks(takes_the_device_of_the_local_rank, 4, f"{tmp_path}/store") == [[0], [1], [0], [1]]


def with_variables(**variables: str) -> WorkerEnv:
    return WorkerEnv.from_environ(variables)


@pytest.mark.parametrize(
    ("variables", "given", "place"),
    [
        ({}, {"rank": 3, "world_size": 4}, (3, 4, 3, 4, 0)),
        ({"LOCAL_WORLD_SIZE": "2"}, {"rank": 3, "world_size": 4}, (3, 4, 1, 2, 1)),
        ({"RANK": "3"}, {"world_size": 4, "local_world_size": 2}, (3, 4, 1, 2, 1)),
        # Nodes of three workers and one: the launcher's word.
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "1"},
            {"rank": 3, "world_size": 4},
            (3, 4, 0, 1, 1),
        ),
        ({"LOCAL_RANK": "1", "NODE_RANK": "7"}, {"rank": 3, "world_size": 4}, (3, 4, 1, 4, 7)),
        ({"NODE_RANK": "7"}, {"rank": 3, "world_size": 4, "local_world_size": 2}, (3, 4, 1, 2, 7)),
    ],
)
def test_arguments_and_variables_make_up_one_place(
    variables: dict[str, str], given: dict[str, int], place: tuple[int, ...]
) -> None:
    found = find_place(with_variables(**variables), GivenPlace(**given))
    assert place == (
        *(found.rank, found.world_size),
        *(found.local_rank, found.local_world_size, found.node_rank),
    )


@pytest.mark.parametrize(
    ("variables", "given", "message"),
    [
        ({}, {"rank": 0}, r"neither world_size=\.\.\. nor WORLD_SIZE"),
        ({}, {"local_world_size": 1}, r"neither rank=\.\.\. nor RANK"),
        ({}, {"rank": 2, "world_size": 2}, r"rank=2\): want 0 <= rank < world_size=2"),
        ({}, {"rank": -2, "world_size": 2}, r"rank=-2\): want 0 <= rank < world_size=2"),
        ({}, {"rank": 0, "world_size": 0}, r"world_size=0\): want at least 1"),
        ({}, {"rank": 0, "world_size": 4, "local_world_size": 3}, r"=3; want 1 to world_size=4, of which"),
        ({}, {"rank": 0, "world_size": 4, "local_world_size": 0}, r"=0; want 1 to world_size=4"),
        ({"LOCAL_WORLD_SIZE": "3"}, {"rank": 0, "world_size": 4}, r"=3; want 1 to world_size=4"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, {"rank": 0, "world_size": 2}, r"the environment has RANK=1"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, {"rank": 1, "world_size": 3}, r"has WORLD_SIZE=2"),
        (
            {"LOCAL_WORLD_SIZE": "4"},
            {"rank": 1, "world_size": 4, "local_world_size": 2},
            r"the environment has LOCAL_WORLD_SIZE=4; want the same, or one of them only",
        ),
        (
            {"LOCAL_RANK": "0"},
            {"rank": 3, "world_size": 4, "local_world_size": 2},
            r"has local rank 1, but LOCAL_RANK=0",
        ),
    ],
)
def test_a_place_that_cannot_be_is_refused_with_what_is_wanted(
    variables: dict[str, str], given: dict[str, int], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        find_place(with_variables(**variables), GivenPlace(**given))


def test_an_older_launcher_s_node_rank_counts_where_the_newer_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NODE_RANK", "3")
    assert bagua.get_node_rank() == 3
    monkeypatch.setenv("GROUP_RANK", "1")
    monkeypatch.setenv("NODE_RANK", "gpu-17")
    assert bagua.get_node_rank() == 1
