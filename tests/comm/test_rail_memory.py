"""What an exchange by rail holds besides the gradients: as much for a large model as for a small one."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from baguarun.comm.algorithms import ByteGrad
from baguarun.comm.ddp import DistributedDataParallel
from tests.comm.nodes import live_on_nodes
from tests.comm.ranks import run_ranks

WIDTH = 1024
MOST_MB = 20
"""Where 28 more buckets come with buffers of their own it is 60 to 240."""
LARGE_WIDTH = 2048
MOST_OF_LARGE_MB = 20
"""With 16.8 MB from each of two other ranks for one bucket, as a whole, it is 40."""

_M_MMAP_THRESHOLD = -3
"""`malloc.h`"""


def give_back_what_is_freed() -> None:
    """Else it is chance how much of what was needed for a moment the C library keeps."""
    assert ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 64 << 10) == 1


def resident_mb() -> float:
    """Memory of this process alone, without what it shares with others."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError("/proc/self/status has no RssAnon")


def held_mb(num_layers: int, dtype: torch.dtype, width: int = WIDTH) -> float:
    """What some steps leave resident besides weights and gradients, with a bucket for each layer."""
    net = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(num_layers)]).to(dtype)
    x = torch.randn(1, width).to(dtype)
    gc.collect()
    before = resident_mb()
    algorithm = ByteGrad(hierarchical=True)
    model = DistributedDataParallel(net, algorithm=algorithm, bucket_cap_mb=1, share_memory=False)
    for _ in range(3):
        model.zero_grad()
        model(x).sum().backward()
    assert len(model._session._engine.plan()) == num_layers
    gradients = sum(parameter.grad.nbytes for parameter in net.parameters()) / 1e6
    return resident_mb() - before - gradients


def growth_mb(sizes: Sequence[int], dtype: torch.dtype) -> float:
    live_on_nodes(sizes)
    give_back_what_is_freed()
    # The first also takes what torch makes once.
    _, few = held_mb(4, dtype), held_mb(4, dtype)
    return held_mb(32, dtype) - few


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_memory_does_not_grow_with_the_number_of_buckets(dtype: torch.dtype) -> None:
    found = run_ranks(growth_mb, 4, (3, 1), dtype)
    assert max(found) < MOST_MB, found
    found = run_ranks(growth_mb, 4, (2, 2), dtype)
    assert max(found) < MOST_MB, found


def held_for_one_large_mb() -> float:
    live_on_nodes((3, 1))
    give_back_what_is_freed()
    held_mb(4, torch.float32)
    return held_mb(1, torch.float32, LARGE_WIDTH)


def test_what_a_node_contributes_to_a_large_bucket_is_not_held_as_a_whole() -> None:
    found = run_ranks(held_for_one_large_mb, 4)
    assert max(found) < MOST_OF_LARGE_MB, found
