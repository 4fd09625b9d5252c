"""The engine's own group is made by the ranks that share a model, whatever other groups they are in."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from baguarun.comm import groups
from baguarun.comm.ddp import DistributedDataParallel
from baguarun.comm.groups import group_like, new_local_group, same_number_of_groups
from tests.comm.models import assert_averaged, batch, gathered_gradients, loss, mlp
from tests.comm.ranks import run_ranks


def pairs_train_apart() -> None:
    rank = dist.get_rank()
    # Rank 0 is in three groups by now, rank 1 in one.
    dist.new_group([0, 2])
    dist.new_group([0, 3])
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    plain, model = mlp(), DistributedDataParallel(mlp(), process_group=pairs[rank // 2])
    data = batch(plain)
    reference = gathered_gradients(plain, lambda local: loss(local(data)).backward())
    loss(model(data)).backward()
    first = rank // 2 * 2
    assert_averaged(model.module, {name: found[first : first + 2] for name, found in reference.items()})


@pytest.mark.parametrize("backend", ["baguanet", "gloo"])
def test_ranks_in_unequal_numbers_of_groups_train_together(backend: str) -> None:
    run_ranks(pairs_train_apart, 4, backend=backend)


def wrap_after_groups_were_destroyed_in_turn() -> None:
    rank = dist.get_rank()
    for _ in range(2):
        both = [dist.new_group([0, 1]) for _ in range(2)]
        # One of these has a further group.
        alone = dist.new_group([1])
        DistributedDataParallel(mlp())
        for group in both:
            dist.destroy_process_group(group)
        DistributedDataParallel(mlp())
        if rank == 1:
            dist.destroy_process_group(alone)
    model = DistributedDataParallel(mlp())
    loss(model(batch(model.module))).backward()


@pytest.mark.parametrize("backend", ["baguanet", "gloo"])
def test_numbers_of_groups_may_go_up_and_down(backend: str) -> None:
    run_ranks(wrap_after_groups_were_destroyed_in_turn, 2, backend=backend)


def wrap_after_a_group_was_destroyed() -> None:
    mine = dist.new_group()
    models = [DistributedDataParallel(mlp())]
    dist.destroy_process_group(mine)
    models += [DistributedDataParallel(mlp()) for _ in range(2)]
    for model in models:
        data = batch(model.module)
        reference = gathered_gradients(model.module, lambda local, data=data: loss(local(data)).backward())
        loss(model(data)).backward()
        assert_averaged(model.module, reference)


@pytest.mark.parametrize("backend", ["baguanet", "gloo"])
def test_a_group_of_the_scripts_that_is_destroyed_leaves_no_name_to_trip_over(backend: str) -> None:
    run_ranks(wrap_after_a_group_was_destroyed, 2, backend=backend)


def counts_past_a_name_in_use() -> list[int]:
    """Rank 0 has a group of its own with the name that torch would give its next one."""
    group = dist.group.WORLD
    assert group is not None
    if dist.get_rank() == 0:
        passing = [new_local_group([0]) for _ in range(2)]
        alone = new_local_group([0])
        for each in passing:
            dist.destroy_process_group(each)
        # It has used up its count; what follows begins below it, as in a job that has destroyed groups.
        groups._used_names().count = 0
    else:
        for _ in range(5):
            new_local_group([1])
    made = len(distributed_c10d._world.pg_map)
    same_number_of_groups(group)
    # What is counted more is no group, with threads and sockets.
    assert len(distributed_c10d._world.pg_map) == made
    counts: list[object] = [None, None]
    dist.all_gather_object(counts, len(distributed_c10d._world.pg_names))
    both = group_like(group, (0, 1), torch.device("cpu"), "both")
    ones = torch.ones(1)
    dist.all_reduce(ones, group=both)
    assert ones.item() == 2
    if dist.get_rank() == 0:
        dist.all_reduce(ones, group=alone)
    dist.destroy_process_group()
    return [int(str(count)) for count in counts]


def test_ranks_in_unequal_numbers_of_groups_may_have_some_of_their_own() -> None:
    for counts in run_ranks(counts_past_a_name_in_use, 2, backend="gloo"):
        assert counts[0] == counts[1]
