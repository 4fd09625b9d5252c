from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from baguarun.elastic.training import streaming
from tests.comm.ranks import run_ranks

CPU = torch.device("cpu")


def tree() -> dict[str, Any]:
    """Some messages of one tensor, and some of several that are packed together."""
    numbers = torch.Generator().manual_seed(3)
    sizes = [1, 5_000_000, 7, 0, 2_000_000, 900, 3_000_001, 1_000, 600_000, 500_000, 400_000]
    layers = [torch.randint(256, (size,), generator=numbers, dtype=torch.uint8) for size in sizes]
    others = (torch.eye(3, dtype=torch.bfloat16), torch.arange(6.0).view(2, 3).t(), torch.tensor(True))
    return {"layers": layers, "others": others, "epoch": 3}


def send_and_receive() -> None:
    rank, sent = dist.get_rank(), tree()
    if rank == 1:
        streaming.send(sent, [2, 0], CPU)
        return
    received = streaming.receive(1, CPU)
    torch.testing.assert_close(received, sent, rtol=0, atol=0)
    assert isinstance(received["others"], tuple)


@pytest.mark.parametrize("backend", ["baguanet", "gloo"])
def test_a_tree_comes_as_it_was_sent(backend: str) -> None:
    run_ranks(send_and_receive, 3, backend=backend)
