"""Between a gradient and its last byte no Python runs, whatever the algorithm."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from types import FrameType

import torch
from torch import nn

from baguarun.comm.algorithms import (
    Algorithm,
    ByteGrad,
    GradientAllReduce,
    PowerSGD,
    QAdam,
    QAdamOptimizer,
    Sparse,
)
from baguarun.comm.ddp import DistributedDataParallel
from tests.comm.models import batch, mlp
from tests.comm.nodes import live_on_nodes
from tests.comm.ranks import run_ranks

FLAT: tuple[Algorithm, ...] = (
    GradientAllReduce(),
    GradientAllReduce(wire="bf16"),
    ByteGrad(),
    ByteGrad(error_feedback=True),
    QAdam(bits=8),
    QAdam(bits=1),
    Sparse(warmup_steps=0),
    PowerSGD(start_step=1),
)
BY_RAIL: tuple[Algorithm, ...] = (
    GradientAllReduce(wire="bf16", hierarchical=True),
    ByteGrad(hierarchical=True),
    QAdam(bits=8, hierarchical=True),
    QAdam(bits=1, hierarchical=True),
    Sparse(warmup_steps=0, hierarchical=True),
)


def make_optimizer(algorithm: Algorithm, module: nn.Module) -> torch.optim.Optimizer:
    if isinstance(algorithm, QAdam):
        # Momentum travels from the second step on.
        return QAdamOptimizer(module.parameters(), warmup_steps=1)
    return torch.optim.SGD(module.parameters(), lr=1e-3)


def frames_in_backward(value: torch.Tensor) -> list[str]:
    """Names of the Python functions that any thread of this process calls during backward."""
    engine, one = torch.autograd.Variable._execution_engine, torch.ones(())
    seen: list[str] = []

    def watch(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            seen.append(frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name)

    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        # The C function below Tensor.backward: it returns when all buckets are final.
        engine.run_backward((value,), (one,), False, False, (), allow_unreachable=True, accumulate_grad=True)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return seen


def backward_without_frames(algorithms: Sequence[Algorithm], nodes: Sequence[int]) -> None:
    if nodes:
        live_on_nodes(nodes)
    for algorithm in algorithms:
        module = mlp()
        optimizer = make_optimizer(algorithm, module)
        model = DistributedDataParallel(
            module, optimizers=[optimizer], algorithm=algorithm, bucket_cap_mb=0.005
        )
        for step in range(3):
            optimizer.zero_grad()
            seen = frames_in_backward(model(batch(module)).square().sum())
            assert seen == [], (algorithm, step)
            optimizer.step()
        assert model.stats().steps == 3


def test_no_python_frame_runs_between_a_gradient_and_its_last_byte() -> None:
    run_ranks(backward_without_frames, 2, FLAT, ())


def test_no_python_frame_runs_on_the_way_over_rails() -> None:
    run_ranks(backward_without_frames, 3, BY_RAIL, (2, 1))


def calls_python_in_backward() -> list[str]:
    weight = nn.Parameter(torch.ones(()))
    weight.register_hook(lambda gradient: gradient)
    return frames_in_backward(weight * 2)


def test_a_python_frame_would_be_seen() -> None:
    assert calls_python_in_backward() != []
