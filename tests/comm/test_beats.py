"""Signs of life of ranks that work all the time, and never have to wait for anybody."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.comm.ranks import run_ranks

BEAT_TIMEOUT_S = 0.8


def give_and_never_wait(folder: str, asynchronous: bool, period_s: float) -> int:
    """Rank 0 is the root, rank 1 on its host gives it something every `period_s`, and so does rank 2."""
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ.update(NCCL_HOSTID=str(rank // 2), BAGUA_NET_BEAT_TIMEOUT_S=str(BEAT_TIMEOUT_S))
    dist.destroy_process_group()
    store = dist.FileStore(str(Path(folder) / "world"), size)
    dist.init_process_group("baguanet", store=store, rank=rank, world_size=size)
    done = 0
    end_s = time.monotonic() + 5 * BEAT_TIMEOUT_S
    # All count alike: rank 0's clock ends it.
    more = torch.ones(1)
    while more.item():
        # The root is there first.
        time.sleep(period_s if rank else period_s / 2)
        work = dist.reduce(torch.ones(8), dst=0, async_op=asynchronous)
        if work is not None:
            work.wait()
        done += 1
        if done % 64 == 0:
            more.fill_(time.monotonic() < end_s)
            dist.broadcast(more, src=0)
    return done


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("period_s", [0.002, 0.03])
def test_who_never_waits_in_a_collective_is_not_silent(
    tmp_path: Path, asynchronous: bool, period_s: float
) -> None:
    counts = run_ranks(give_and_never_wait, 3, str(tmp_path), asynchronous, period_s)
    assert len(set(counts)) == 1
