"""Groups of some of four ranks, debugging aids, and groups that follow each other."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.comm.ranks import run_ranks
from tests.torch_suite.suite import BACKENDS, Suite, ended, place

SUITE = Suite(world_size=4)


def store() -> dist.Store:
    found: dist.Store = dist.distributed_c10d._get_default_store()
    return found


def meet(what: str) -> None:
    """A barrier that no group knows of."""
    rank, size = place()
    store().set(f"{what} {rank}", "")
    store().wait([f"{what} {peer}" for peer in range(size)])


@SUITE.behaviour
def a_group_of_some_counts_its_own_ranks() -> None:
    rank, _ = place()
    group = dist.new_group([1, 3])
    assert dist.get_rank(group) == {1: 0, 3: 1}.get(rank, -1)
    assert dist.get_world_size(group) == (2 if rank in (1, 3) else -1)
    if rank in (1, 3):
        assert dist.get_process_group_ranks(group) == [1, 3]
        assert dist.get_global_rank(group, 1) == 3 and dist.get_group_rank(group, 3) == 1
        total = torch.full((3,), float(rank))
        dist.all_reduce(total, group=group)
        assert total.tolist() == [4.0] * 3
        word = torch.full((1,), float(rank))
        # Roots and peers are ranks of the World.
        dist.broadcast(word, src=3, group=group)
        assert word.item() == 3
        if rank == 1:
            dist.send(torch.tensor([7.0]), 3, group=group)
        else:
            dist.recv(word, 1, group=group)
            assert word.item() == 7
        everyone: list[int] = [-1, -1]
        dist.all_gather_object(everyone, rank, group=group)
        assert everyone == [1, 3]


@SUITE.behaviour
def who_is_no_member_is_told_and_not_harmed() -> None:
    rank, _ = place()
    group = dist.new_group([0, 1])
    if rank > 1:
        tensor = torch.ones(1)
        with pytest.warns(UserWarning, match="not in the (given )?group|does not belong|is not part of"):
            dist.all_reduce(tensor, group=group)
        assert tensor.item() == 1
    else:
        dist.all_reduce(torch.ones(1), group=group)


@SUITE.behaviour
def a_group_of_one_does_everything_alone() -> None:
    rank, _ = place()
    group, _ = dist.new_subgroups(group_size=1)
    tensor = torch.full((3,), float(rank))
    dist.all_reduce(tensor, group=group)
    dist.broadcast(tensor, src=rank, group=group)
    dist.reduce(tensor, dst=rank, group=group)
    rows = [torch.zeros(3)]
    dist.all_gather(rows, tensor, group=group)
    dist.all_to_all_single(rows[0], tensor, group=group)
    dist.reduce_scatter_tensor(rows[0], tensor, group=group)
    dist.barrier(group=group)
    assert tensor.tolist() == rows[0].tolist() == [float(rank)] * 3


@SUITE.behaviour
def the_world_is_cut_into_groups_of_equal_size() -> None:
    rank, size = place()
    mine, all_groups = dist.new_subgroups(group_size=2)
    assert len(all_groups) == size // 2
    total = torch.tensor([rank])
    dist.all_reduce(total, group=mine)
    assert total.item() == rank // 2 * 4 + 1
    with pytest.raises(ValueError, match="divisible"):
        dist.new_subgroups(group_size=3)
    mine, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    total = torch.tensor([rank])
    dist.all_reduce(total, group=mine)
    assert total.item() == (2 if rank % 2 == 0 else 4)


@SUITE.behaviour
def members_alone_may_make_a_group() -> None:
    rank, _ = place()
    pair = [0, 2] if rank % 2 == 0 else [1, 3]
    group = dist.new_group(pair, use_local_synchronization=True)
    total = torch.tensor([rank])
    dist.all_reduce(total, group=group)
    assert total.item() == sum(pair)


@SUITE.behaviour
def groups_overlap_and_work_at_the_same_time() -> None:
    rank, size = place()
    groups = [dist.new_group([peer, (peer + 1) % size]) for peer in range(size)]
    mine = [(number, group) for number, group in enumerate(groups) if rank in (number, (number + 1) % size)]
    tensors = [torch.full((1000,), float(rank)) for _ in mine]
    works = [
        dist.all_reduce(tensor, group=group, async_op=True)
        for tensor, (_, group) in zip(tensors, mine, strict=True)
    ]
    everybody = torch.ones(1)
    dist.all_reduce(everybody)
    for work, tensor, (number, _) in zip(works, tensors, mine, strict=True):
        ended(work)
        assert tensor.eq(number + (number + 1) % size).all()
    assert everybody.item() == size


@SUITE.behaviour
def a_group_that_is_destroyed_does_not_disturb_others() -> None:
    rank, size = place()
    pair = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(torch.ones(1), group=pair)
        dist.destroy_process_group(pair)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == size
    again = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(total, group=again)
        assert total.item() == 2 * size


@SUITE.behaviour
def a_monitored_barrier_lets_all_pass_and_names_who_stays_away() -> None:
    rank, _ = place()
    # dist.monitored_barrier() asks for Gloo by name.
    group = dist.group.WORLD
    assert group is not None
    group.monitored_barrier(timedelta(seconds=10))
    meet("passed")
    said = "rank 2"
    if rank != 2:
        try:
            group.monitored_barrier(timedelta(milliseconds=300))
            said = "nothing"
        except RuntimeError as error:
            said = str(error)
    meet("ended")
    # Gloo tells the first rank only whose fault it is.
    assert "rank 2" in said.lower() or (rank != 0 and said != "nothing"), said


@SUITE.behaviour
def a_monitored_barrier_of_a_group_concerns_its_members() -> None:
    rank, _ = place()
    group = dist.new_group([0, 3])
    if rank in (0, 3):
        group.monitored_barrier(timedelta(seconds=10))


@SUITE.behaviour
def whoever_waits_too_long_gets_an_error() -> None:
    rank, _ = place()
    group = dist.new_group(timeout=timedelta(milliseconds=300))
    said = ""
    if rank == 0:
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except RuntimeError as error:
            said = str(error)
    meet("timed out")
    assert rank != 0 or "timed out" in said.lower() or "in time" in said, said
    # The other group knows nothing of it.
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 4


@SUITE.behaviour
def a_mesh_has_a_group_for_every_line() -> None:
    rank, _ = place()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    for name, wanted in (("replica", rank % 2 * 2 + 2), ("shard", rank // 2 * 4 + 1)):
        total = torch.tensor([rank])
        dist.all_reduce(total, group=mesh.get_group(name))
        assert total.item() == wanted
    assert [*(mesh.get_coordinate() or [])] == [rank // 2, rank % 2]


@SUITE.behaviour
def distributed_tensors_are_moved_between_placements() -> None:
    mesh = init_device_mesh("cpu", (4,))
    # Rows that four ranks cannot share evenly.
    whole = torch.arange(30.0).view(10, 3)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    assert torch.equal(columns.full_tensor(), whole)
    assert torch.equal(rows.redistribute(mesh, [Replicate()]).to_local(), whole)
    product = rows @ distribute_tensor(torch.ones(3, 2), mesh, [Replicate()])
    assert isinstance(product, DTensor) and torch.equal(product.full_tensor(), whole @ torch.ones(3, 2))
    assert rows.sum().full_tensor().item() == whole.sum().item()


@SUITE.behaviour
def a_distributed_layer_learns_as_a_plain_one() -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (4,))
    plain = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    model.load_state_dict(plain.state_dict())
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    data = torch.randn(5, 6)
    for each in (plain, model):
        each(data).square().sum().backward()
    found, wanted = model[0].weight.grad, plain[0].weight.grad
    assert isinstance(found, DTensor)
    torch.testing.assert_close(found.full_tensor(), wanted)


@SUITE.each()
def test_four_ranks(name: str, backend: str) -> None:
    SUITE.check(backend, name)


def follow(backend: str, folder: str) -> list[float]:
    """Groups in one process over one store, each with a prefix of its own."""
    rank, size = place()
    dist.destroy_process_group()
    one = dist.FileStore(str(Path(folder) / "store"), size)
    totals = []
    for number in range(5):
        dist.init_process_group(
            backend, store=dist.PrefixStore(f"group {number}", one), rank=rank, world_size=size
        )
        total = torch.tensor([float(rank + number)])
        dist.all_reduce(total)
        totals.append(total.item())
        dist.destroy_process_group()
    return totals


@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_follow_each_other_over_one_store(backend: str, tmp_path: Path) -> None:
    wanted = [3.0 + 3 * number for number in range(5)]
    assert run_ranks(follow, 3, backend, str(tmp_path), backend=backend) == [wanted] * 3


def differ(backend: str, folder: str) -> list[str]:
    rank, size = place()
    dist.destroy_process_group()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    said = []
    calls = [
        lambda: dist.all_reduce(torch.ones(3 + rank)),
        lambda: dist.all_reduce(torch.ones(3, dtype=(torch.float32, torch.float64)[rank])),
        lambda: dist.barrier() if rank else dist.all_reduce(torch.ones(3)),
    ]
    for number, call in enumerate(calls):
        dist.init_process_group(
            backend, store=dist.FileStore(str(Path(folder) / str(number)), size), rank=rank, world_size=size
        )
        with pytest.raises(RuntimeError) as caught:
            call()
        said.append(str(caught.value))
        dist.destroy_process_group()
    return said


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_details_whatever_differs_between_ranks_is_found(backend: str, tmp_path: Path) -> None:
    for said in run_ranks(differ, 2, backend, str(tmp_path), backend=backend):
        assert all("Detected mismatch between collectives" in text for text in said), said
