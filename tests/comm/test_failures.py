"""A peer that dies or stalls is an error that names bucket, stage and peer; nothing hangs, nothing aborts."""

from __future__ import annotations

import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from baguarun.comm.ddp import DistributedDataParallel
from baguarun.errors import CommunicationError
from tests.comm.models import loss, mlp
from tests.comm.ranks import run_ranks, run_ranks_to_the_end


def train_until_a_peer_dies(algorithm: str, dtype: torch.dtype) -> str:
    model = DistributedDataParallel(mlp(dtype), algorithm=algorithm, bucket_cap_mb=0.005)
    x = torch.randn(2, 37, dtype=dtype)
    for step in range(5):
        if step == 3 and dist.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            model.zero_grad()
            loss(model(x)).backward()
        except CommunicationError as first:
            # The engine is done for: every later call says the same.
            with pytest.raises(CommunicationError) as again:
                loss(model(x)).backward()
            assert str(again.value) == str(first)
            return str(first)
    raise AssertionError("the loss of a peer went unnoticed")


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad"])
def test_survivors_of_a_killed_peer_get_an_error_that_names_bucket_and_peer(algorithm: str) -> None:
    outcomes = run_ranks_to_the_end(train_until_a_peer_dies, 3, algorithm, torch.float32)
    assert outcomes[2].died
    for outcome in outcomes[:2]:
        assert outcome.error is None, outcome.traceback
        assert "bucket " in outcome.value and "rank " in outcome.value, outcome.value
        assert "weight" in outcome.value or "bias" in outcome.value
    assert any("rank 2" in outcome.value for outcome in outcomes[:2])


def test_types_without_a_codec_fail_the_same_way() -> None:
    outcomes = run_ranks_to_the_end(train_until_a_peer_dies, 3, "gradient_allreduce", torch.float64)
    for outcome in outcomes[:2]:
        assert outcome.error is None, outcome.traceback
        assert "bucket " in outcome.value, outcome.value


def one_rank_stops() -> None:
    model = DistributedDataParallel(mlp())
    x = torch.randn(2, 37)
    # The second forward settles the order of buckets.
    for _ in range(2):
        loss(model(x)).backward()
    if dist.get_rank() == 1:
        with pytest.raises(RuntimeError):
            # Takes no part: waits for a message that never comes, as long as the group's timeout lets it.
            dist.recv(torch.zeros(1), src=0)
        return
    # Both give up after that time; whoever is first ends the other's wait.
    gave_up = r"bucket 0 of 1 .*: rank 1 \(pid \d+\): .*(in time|has ended|has left)"
    with pytest.raises(CommunicationError, match=gave_up):
        loss(model(x)).backward()


def test_a_peer_that_takes_no_part_is_an_error_after_the_timeout_of_the_group() -> None:
    run_ranks(one_rank_stops, 2, timeout=timedelta(seconds=3))


def engine_dies_in_flight() -> None:
    model = DistributedDataParallel(mlp(), bucket_cap_mb=0.0001)
    x = torch.randn(2, 37)
    # The second forward settles the order of buckets.
    for _ in range(2):
        loss(model(x)).backward()
    if dist.get_rank() == 0:
        # The last layer's bucket is launched and waits for the other rank, which never comes.
        hidden = model.module[:4](x).detach()
        model._session.before_forward()
        model._session.after_forward(None)
        loss(model.module[4](hidden)).backward()
        del model
    dist.barrier()


def test_an_engine_can_be_dropped_while_it_waits_for_others() -> None:
    run_ranks(engine_dies_in_flight, 2)
