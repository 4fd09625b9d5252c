"""Groups that are made by a collective of another one, without a store."""

from __future__ import annotations

import functools
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def wait_for_one_who_is_stopped(world: dist.ProcessGroup) -> str:
    first = dist.new_group(pg_options=BaguanetOptions(over=world))
    second = dist.new_group(pg_options=BaguanetOptions(over=first))
    pids: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid(), group=second)
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    started = torch.ones(4)
    work = dist.all_reduce(started, group=first, async_op=True)
    with pytest.raises(dist.DistBackendError) as raised:
        dist.all_reduce(torch.ones(4), group=second)
    assert work is not None
    with pytest.raises(dist.DistBackendError, match=re.escape("rank 2 (")):
        work.wait()
    if dist.get_rank() == 0:
        assert pids[2] is not None
        os.kill(pids[2], signal.SIGKILL)
    return str(raised.value)


def with_beats(*arguments: Any) -> object:
    os.environ["BAGUA_NET_BEAT_TIMEOUT_S"] = "0.4"
    return on_hosts(*arguments)


def test_who_is_silent_ends_groups_that_leave_signs_of_life_to_the_one_they_are_made_over(
    tmp_path: Path,
) -> None:
    outcomes = run_ranks_to_the_end(with_beats, 3, wait_for_one_who_is_stopped, 3, str(tmp_path))
    for outcome in outcomes[:2]:
        assert outcome.value is not None, outcome.traceback
        assert "rank 2 (" in outcome.value and "no sign of life for" in outcome.value


def count_threads(world: dist.ProcessGroup) -> list[int]:
    counts = []
    for over in (None, world):
        before = len(os.listdir("/proc/self/task"))
        dist.new_group(pg_options=BaguanetOptions(over=over))
        counts.append(len(os.listdir("/proc/self/task")) - before)
    return counts


def test_they_have_no_thread_that_gives_signs_of_life(tmp_path: Path) -> None:
    assert run_ranks(with_beats, 2, count_threads, 2, str(tmp_path)) == [[1, 0]] * 2


def watch_alone(world: dist.ProcessGroup) -> int:
    os.environ["BAGUA_NET_BEAT_TIMEOUT_S"] = "0.4"
    before = len(os.listdir("/proc/self/task"))
    dist.new_group(pg_options=BaguanetOptions(over=world))
    return len(os.listdir("/proc/self/task")) - before


def test_one_that_is_made_over_a_group_without_signs_of_life_gives_them_itself(tmp_path: Path) -> None:
    assert run_ranks(on_hosts, 2, watch_alone, 2, str(tmp_path)) == [1, 1]


def mismatch(world: dist.ProcessGroup) -> None:
    dist.all_reduce(torch.ones(1 + dist.get_rank()), group=world)


def abort_one(world: dist.ProcessGroup) -> None:
    if dist.get_rank() == 1:
        world._get_backend(torch.device("cpu")).abort()
    dist.barrier(group=world)


def outlive(breaks: Callable[[dist.ProcessGroup], None], world: dist.ProcessGroup) -> bool:
    group = dist.new_group(pg_options=BaguanetOptions(over=world))
    dist.barrier(group=group)  # who still joins does so over the group that is broken next
    with pytest.raises((dist.DistBackendError, RuntimeError)):
        breaks(world)
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    return total.item() == dist.get_world_size()


@pytest.mark.parametrize("hosts", [1, 3])
@pytest.mark.parametrize("breaks", [mismatch, abort_one])
def test_what_else_breaks_a_group_leaves_those_made_over_it_alone(
    tmp_path: Path, breaks: Callable[[dist.ProcessGroup], None], hosts: int
) -> None:
    function = functools.partial(outlive, breaks)
    assert run_ranks(with_beats, 3, function, hosts, str(tmp_path)) == [True] * 3
