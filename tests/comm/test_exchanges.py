"""How buckets are exchanged between hosts: small ones by messages to all, large fp32 ones around a ring.

The memory that this takes is that of the buckets under way, not of all.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from baguarun.comm import timeline
from baguarun.comm.algorithms import (
    Algorithm,
    ByteGrad,
    GradientAllReduce,
    QAdam,
    QAdamOptimizer,
    Sparse,
)
from baguarun.comm.ddp import DistributedDataParallel
from baguarun.comm.engine_plan import make_spec
from tests.comm.models import assert_same_on_all_ranks
from tests.comm.ranks import run_ranks, run_ranks_to_the_end


def averages_over_sockets(size: int, algorithm: str) -> None:
    torch.manual_seed(3)
    # Sums of small integers are exact in fp32, whatever their order; 24 divides by 2, 3 and 4.
    module = nn.Linear(size, size, bias=True)
    model = DistributedDataParallel(module, share_memory=False, algorithm=algorithm)
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for step in range(3):
        x = torch.full((1, size), 24.0 * (rank + step + 1))
        model.zero_grad(set_to_none=True)
        model(x).sum().backward()
        expected = 24.0 * (step + 1) + 24.0 * (world_size - 1) / 2
        if algorithm == "gradient_allreduce":
            assert torch.equal(module.weight.grad, torch.full((size, size), expected)), module.weight.grad
        else:
            assert torch.allclose(module.weight.grad, torch.full((size, size), expected), rtol=1e-2)
        assert_same_on_all_ranks([p.grad for p in model.parameters()])


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad"])
@pytest.mark.parametrize("size", [7, 601])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_rank_holds_the_same_average(world_size: int, size: int, algorithm: str) -> None:
    run_ranks(averages_over_sockets, world_size, size, algorithm)


M_MMAP_THRESHOLD = -3
CPU = torch.device("cpu")


class Layers(nn.Module):
    """Layers side by side: all of them get the gradient that the input is."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(layer(x).sum() for layer in self.layers)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def averages_in_many_large_buckets(algorithm: str) -> None:
    # What is freed goes back to the system at once, and is not counted as resident.
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20) == 1
    size, count = 1450, 12
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = DistributedDataParallel(
        Layers(count, size), share_memory=False, algorithm=algorithm, bucket_cap_mb=8
    )
    model_bytes = sum(parameter.nbytes for parameter in model.parameters())
    x = torch.empty(1, size)
    before = resident_bytes()
    for step in range(4):
        x.fill_(24.0 * (rank + step + 1))
        model.zero_grad()
        model(x).backward()
        expected = torch.full((size, size), 24.0 * (step + 1) + 24.0 * (world_size - 1) / 2)
        for parameter in model.parameters():
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-2, atol=0)
    assert model.stats().buckets == count
    # The gradients themselves, whose memory nothing has touched before, and buffers for a few of the buckets.
    grown = (resident_bytes() - before) / model_bytes
    assert 1.0 < grown < 1.4, grown


@pytest.mark.parametrize(
    "algorithm, backend", [("gradient_allreduce", "gloo"), ("bytegrad", "gloo"), ("bytegrad", "baguanet")]
)
def test_large_buckets_share_a_few_buffers(algorithm: str, backend: str) -> None:
    run_ranks(averages_in_many_large_buckets, 3, algorithm, backend=backend)


def shows_layers_of_buckets(folder: Path, algorithm: Algorithm, layer: int, wanted: list[list[int]]) -> None:
    module = Layers(sum(wanted[0]), layer)
    optimizers = []
    if isinstance(algorithm, QAdam):
        optimizers.append(QAdamOptimizer(module.parameters(), lr=1e-3, warmup_steps=1))
    path = folder / f"out.{torch.distributed.get_rank()}"
    timeline.start(path)
    model = DistributedDataParallel(module, optimizers=optimizers, algorithm=algorithm, share_memory=False)
    for _ in wanted:
        model.zero_grad()
        model(torch.ones(1, layer)).backward()
        for optimizer in optimizers:
            optimizer.step()
    timeline.stop()
    found: dict[int, dict[str, int]] = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event["ph"] == "X" and event["name"] == "bucket":
            of = event["args"]
            found.setdefault(of["round"], {})[of["of"]] = of["bytes"] // (4 * layer**2)
    assert [[layers for _, layers in sorted(step.items())] for _, step in sorted(found.items())] == wanted


FEW, ALL_SMALL, SMALL_AT_END = [1, 2, 2, 2, 1], [1] * 8, [2, 2, 1, 1, 1, 1]


@pytest.mark.parametrize(
    "algorithm, layer, wanted",
    [
        (GradientAllReduce(), 1024, [FEW, FEW]),
        (Sparse(warmup_steps=0), 1024, [SMALL_AT_END, SMALL_AT_END]),
        # Of nine layers a quarter is more than two, and the last four are less than four eighths.
        (Sparse(warmup_steps=0, density=0.005), 1024, [[3, 3, 2, 1], [3, 3, 2, 1]]),
        (ByteGrad(), 1024, [ALL_SMALL, ALL_SMALL]),
        (QAdam(), 1024, [FEW, ALL_SMALL, ALL_SMALL]),
        (QAdam(bits=1), 1024, [FEW, ALL_SMALL, ALL_SMALL]),
        # Messages are small, but all of them are not little.
        (QAdam(bits=1), 512, [FEW, FEW, FEW]),
        (Sparse(warmup_steps=0), 512, [SMALL_AT_END, SMALL_AT_END]),
    ],
)
def test_coded_buckets_are_small_where_messages_are_large_and_at_the_end_where_little_is_sent(
    tmp_path: Path, algorithm: Algorithm, layer: int, wanted: list[list[int]]
) -> None:
    run_ranks(shows_layers_of_buckets, 2, tmp_path, algorithm, layer, wanted)


class TwoTypes(nn.Module):
    """Parameters of two types in turn, each of them a little less than a quarter of all."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Parameter(torch.ones(2**20))
        self.fourth = nn.Parameter(torch.ones(2**21, dtype=torch.bfloat16))
        self.third = nn.Parameter(torch.ones(2**20))
        self.second = nn.Parameter(torch.ones(2**21, dtype=torch.bfloat16))
        self.first = nn.Parameter(torch.ones(2**20))


def changes_operations_before_and_after_the_order() -> None:
    session = DistributedDataParallel(TwoTypes(), algorithm="bytegrad", share_memory=False)._session
    engine, dtypes = session._engine, [parameter.dtype for parameter in session._module.parameters()]
    coded = [make_spec(ByteGrad().operation(dtype, CPU), None) for dtype in dtypes]
    plain = [make_spec(GradientAllReduce().operation(dtype, CPU), None) for dtype in dtypes]
    state = engine.state()
    engine.load_state(state)
    assert engine.plan() == [[4], [3], [2], [1], [0]]
    engine.set_operations(plain)
    engine.load_state(state)
    assert len(engine.plan()) == 4
    engine.set_operations(coded)
    assert engine.plan() == [[4], [3], [2], [1], [0]]


def test_a_rank_that_enters_a_stage_later_than_others_has_the_same_buckets() -> None:
    run_ranks(changes_operations_before_and_after_the_order, 2)


def a_peer_dies_on_the_ring() -> str:
    model = DistributedDataParallel(nn.Linear(601, 601), share_memory=False)
    x = torch.ones(1, 601)
    for _ in range(2):
        model(x).sum().backward()
    if torch.distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for _ in range(3):
            model(x).sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_dead_neighbour_is_an_error_that_names_the_bucket() -> None:
    outcomes = run_ranks_to_the_end(a_peer_dies_on_the_ring, 3)
    for rank in (0, 2):
        assert outcomes[rank].error is None, outcomes[rank].traceback
        assert outcomes[rank].value.startswith("CommunicationError: "), outcomes[rank].value
        assert "bucket " in outcomes[rank].value
