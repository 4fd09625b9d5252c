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


def places_of(landing: streaming.Landing) -> list[int]:
    return [tensor.data_ptr() for free in landing._free.values() for tensor in free]


def receive_in_memory_at_hand() -> None:
    # One is larger than what is packed together.
    weight = torch.randn(1200, 1000, generator=torch.Generator().manual_seed(3))
    sent = {"weight": weight, "more": [torch.ones(4)], "bias": torch.ones(7)}
    if dist.get_rank() == 1:
        streaming.send(sent, [0], CPU)
        return
    landing = streaming.Landing([torch.empty(1200, 1000), torch.empty(7), torch.empty(4).double()])
    room = places_of(landing)
    received = streaming.receive(1, CPU, landing)
    torch.testing.assert_close(received, sent, rtol=0, atol=0)
    taken = {received["weight"].data_ptr(), received["bias"].data_ptr()}
    assert set(room) - set(places_of(landing)) == taken
    assert len(places_of(landing)) == 7 and received["more"][0].data_ptr() not in room


def test_a_tree_comes_to_the_memory_that_is_there_for_it() -> None:
    run_ranks(receive_in_memory_at_hand, 2)


@pytest.mark.parametrize("backend", ["baguanet", "gloo"])
def test_a_tree_comes_as_it_was_sent(backend: str) -> None:
    run_ranks(send_and_receive, 3, backend=backend)
