"""A rank dies where one peer has got its part of a bucket and another has not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from baguarun.comm.algorithms import Algorithm, ByteGrad
from baguarun.comm.extension import load_extension
from baguarun.errors import CommunicationError
from tests.comm.nodes import live_on_nodes
from tests.comm.ranks import run_ranks_to_the_end
from tests.comm.test_enter_world import Meeting, Trainee, assert_equal_on_all_ranks

VICTIM = 1


def survive_a_death_between_two_sends(
    folder: str, algorithm: Algorithm, nodes: list[int], num_sends: int
) -> None:
    live_on_nodes(nodes)
    meeting, rank, size = Meeting(folder), dist.get_rank(), dist.get_world_size()
    settings: dict[str, Any] = {"width": 3000, "bucket_cap_mb": 100, "share_memory": False}
    trainee = Trainee(algorithm, **settings)
    for _ in range(3):
        trainee.step()
    before = trainee.weights()
    if rank == VICTIM:
        load_extension().fail_after_sends(num_sends)
    with pytest.raises((CommunicationError, RuntimeError)):
        # Whoever got everything in the first sees it in the second.
        for _ in range(2):
            trainee.backward()
    assert (trainee.weights() == before).all()
    meeting.enter(2, rank - (rank > VICTIM), size - 1)
    trainee.model.enter_world()
    trainee.step()
    assert_equal_on_all_ranks(trainee.weights())
    # Whoever ends first would end the others.
    dist.barrier()


def survive_a_death_in_the_ring(folder: str, num_messages: int) -> int:
    """How many buckets this rank got whole while the victim died."""
    meeting, rank, size = Meeting(folder), dist.get_rank(), dist.get_world_size()
    # Links only: between processes of one host there is no ring.
    os.environ["NCCL_HOSTID"] = str(rank)
    meeting.enter(2, rank, size)
    trainee = Trainee("gradient_allreduce", width=3000, bucket_cap_mb=100, share_memory=False)
    trainee.step()
    before = trainee.weights()
    dist.barrier()
    if rank == VICTIM:
        load_extension().fail_after_messages(num_messages)
    whole = 0
    with pytest.raises((CommunicationError, RuntimeError)):
        for _ in range(2):
            trainee.backward()
            whole += 1
    assert (trainee.weights() == before).all()
    meeting.enter(3, rank - (rank > VICTIM), size - 1)
    trainee.model.enter_world()
    trainee.step()
    assert_equal_on_all_ranks(trainee.weights())
    dist.barrier()
    return whole


def test_a_survivor_that_has_the_ring_s_last_block_goes_on_with_one_that_has_not(tmp_path: Path) -> None:
    # 700 KB in three blocks of four segments, which a rank sends four times: the last but two are missing.
    outcomes = run_ranks_to_the_end(survive_a_death_in_the_ring, 3, str(tmp_path), 14)
    assert [outcome.died for outcome in outcomes] == [False, True, False]
    for outcome in outcomes:
        assert outcome.error is None, outcome.traceback
    assert [outcome.value for outcome in outcomes] == [1, None, 0]


@pytest.mark.parametrize(
    ("algorithm", "nodes", "num_sends"),
    [
        pytest.param(ByteGrad(), [1, 1, 1], 3, id="scatter-gather"),
        pytest.param(ByteGrad(hierarchical=True), [2, 2], 2, id="rail"),
    ],
)
def test_survivors_of_a_half_sent_bucket_go_on(
    tmp_path: Path, algorithm: Algorithm, nodes: list[int], num_sends: int
) -> None:
    outcomes = run_ranks_to_the_end(
        survive_a_death_between_two_sends,
        sum(nodes),
        str(tmp_path),
        algorithm,
        nodes,
        num_sends,
    )
    assert [outcome.died for outcome in outcomes] == [rank == VICTIM for rank in range(sum(nodes))]
    for outcome in outcomes:
        assert outcome.error is None, outcome.traceback
