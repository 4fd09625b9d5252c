"""Groups that are made by a collective of another one, without a store."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from baguarun.comm.backend import BaguanetOptions
from baguarun.errors import UsageError
from tests.comm.ranks import run_ranks, run_ranks_to_the_end


def on_hosts(function: Callable[[dist.ProcessGroup], object], hosts: int, folder: str) -> object:
    """`function` of a World whose ranks take themselves for those of so many hosts."""
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ["NCCL_HOSTID"] = str(rank % hosts)
    dist.destroy_process_group()
    store = dist.FileStore(str(Path(folder) / "world"), size)
    dist.init_process_group("baguanet", store=store, rank=rank, world_size=size)
    assert dist.group.WORLD is not None
    return function(dist.group.WORLD)


def make_one(world: dist.ProcessGroup) -> tuple[float, float]:
    # What was started before is not overtaken by the collectives that make the group.
    started = torch.ones(1000)
    work = dist.all_reduce(started, async_op=True)
    group = dist.new_group(pg_options=BaguanetOptions(over=world))
    total = torch.full((1,), float(dist.get_rank()))
    dist.all_reduce(total, group=group)
    assert work is not None and work.wait()
    return started[-1].item(), total.item()


@pytest.mark.parametrize("hosts", [1, 2, 3])
def test_a_group_is_made_over_another_one_of_the_same_ranks(tmp_path: Path, hosts: int) -> None:
    assert run_ranks(on_hosts, 3, make_one, hosts, str(tmp_path)) == [(3.0, 3.0)] * 3


def make_wrong_ones(world: dist.ProcessGroup) -> None:
    with pytest.raises(ValueError, match="to be made over a group of other ranks; want the same"):
        dist.new_group(
            [dist.get_rank()], pg_options=BaguanetOptions(over=world), use_local_synchronization=True
        )
    dist.barrier()
    on_gloo = dist.new_group(backend="gloo")
    with pytest.raises(UsageError, match="the group has gloo on the CPU; want one that has baguanet there"):
        dist.new_group(pg_options=BaguanetOptions(over=on_gloo))
    dist.barrier()


def test_it_wants_the_same_ranks_and_a_group_of_baguanet(tmp_path: Path) -> None:
    run_ranks(on_hosts, 2, make_wrong_ones, 1, str(tmp_path))


def lose_one_meanwhile(world: dist.ProcessGroup) -> str:
    dist.barrier()
    if dist.get_rank() == 2:
        os._exit(1)
    with pytest.raises(dist.DistBackendError) as raised:
        dist.new_group(pg_options=BaguanetOptions(over=world))
    return str(raised.value)


@pytest.mark.parametrize("hosts", [1, 3])
def test_who_is_lost_meanwhile_is_named_without_anybody_telling(tmp_path: Path, hosts: int) -> None:
    """Long before the group's own timeout of half an hour, which the ranks are not given."""
    outcomes = run_ranks_to_the_end(on_hosts, 3, lose_one_meanwhile, hosts, str(tmp_path))
    assert outcomes[2].died
    for outcome in outcomes[:2]:
        assert outcome.value is not None, outcome.traceback
        assert "joining" in outcome.value and "rank 2" in outcome.value
