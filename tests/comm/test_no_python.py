"""Between a gradient and its last byte no Python runs."""

from __future__ import annotations

import sys
import threading
from types import FrameType

import torch
from torch import nn

from baguarun.comm.ddp import DistributedDataParallel
from tests.comm.models import batch, mlp
from tests.comm.ranks import run_ranks


def backward_without_frames() -> None:
    engine, one = torch.autograd.Variable._execution_engine, torch.ones(())
    for algorithm in ("gradient_allreduce", "bytegrad"):
        model: nn.Module = DistributedDataParallel(mlp(), algorithm=algorithm, bucket_cap_mb=0.005)
        for _ in range(3):
            model.zero_grad()
            value = model(batch(model.module)).square().sum()
            seen: list[str] = []

            def watch(frame: FrameType, event: str, argument: object, seen: list[str] = seen) -> None:
                if event == "call":
                    seen.append(
                        frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name
                    )

            threading.setprofile(watch)
            sys.setprofile(watch)
            try:
                # The C function below Tensor.backward: it returns when all buckets are final.
                engine.run_backward(
                    (value,), (one,), False, False, (), allow_unreachable=True, accumulate_grad=True
                )
            finally:
                sys.setprofile(None)
                threading.setprofile(None)  # type: ignore[arg-type]
            assert seen == []
        assert model.stats().steps == 3


def test_no_python_frame_runs_between_a_gradient_and_its_last_byte() -> None:
    run_ranks(backward_without_frames, 2)
