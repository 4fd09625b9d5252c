"""Ranks that leave while others still need what they have under way."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from baguarun.comm.algorithms import Algorithm, DiLoCo, LowPrecisionDecentralized
from tests.comm.ranks import run_ranks
from tests.comm.test_enter_world import Trainee


def leave_before_the_others(folder: str, algorithm: Algorithm) -> bool:
    trainee = Trainee(algorithm, width=3000, broadcast_buffers=False)
    leaving = Path(folder) / "leaving"
    for _ in range(3):
        trainee.step()
    if dist.get_rank() == 0:
        trainee.step()
        leaving.touch()
    else:
        while not leaving.exists():
            time.sleep(0.001)
        trainee.step()
        trainee.model.algorithm_state_dict()
    dist.destroy_process_group()
    return bool(torch.isfinite(trainee.weights()).all())


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(LowPrecisionDecentralized(), id="low_precision_decentralized"),
        pytest.param(DiLoCo(local_steps=4, delay_steps=2), id="diloco"),
    ],
)
def test_destroying_the_group_waits_for_exchanges_that_others_need(
    tmp_path: Path, algorithm: Algorithm
) -> None:
    assert run_ranks(leave_before_the_others, 3, str(tmp_path), algorithm) == [True] * 3
