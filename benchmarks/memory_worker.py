"""One rank of the memory benchmark: some steps of one contestant with a large model, in a process of its own.

Started by `benchmarks/memory.py` with torchrun's variables; rank 0 writes the ranks' mean peak to `--out`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

import baguarun
from baguarun.comm.algorithms import QAdam
from benchmarks import cases

_WIDTH, _LAYERS, _BATCH = 2048, 12, 8
_STEPS = 8
_LEARNING_RATE = 1e-7
"""Nothing is learned. With more, QAdam diverges after so short a warm-up and leaves steps out."""
_SHORT = {"local_steps": 2, "max_staleness_steps": 2}
"""So that what happens now and then happens within the steps."""
_STARTS = ("warmup_steps", "start_step")
"""What algorithms call the steps before they compress."""
_START = 2


def shortened(case: cases.Case) -> cases.Case:
    """The same with every period, if its algorithm has one, of two steps, and a start of no more, be it the
    algorithm's or the optimizer's."""
    if case.algorithm is None:
        return case
    changes = {name: steps for name, steps in _SHORT.items() if hasattr(case.algorithm, name)}
    changes |= {name: _START for name in _STARTS if getattr(case.algorithm, name, 0) > _START}
    if getattr(case.algorithm, "delay_steps", 0) > 0:
        changes |= {"local_steps": case.algorithm.fragments, "delay_steps": 1}
    optimizer = case.optimizer
    if optimizer is cases.qadam:
        optimizer = functools.partial(cases.qadam, warmup_steps=_START)
    algorithm = dataclasses.replace(case.algorithm, **changes)
    return dataclasses.replace(case, algorithm=algorithm, optimizer=optimizer)


def starts_in_full(case: cases.Case) -> bool:
    """Whether its first steps send more than those behind them."""
    return isinstance(case.algorithm, QAdam) or any(getattr(case.algorithm, name, 0) for name in _STARTS)


def require_compressed(name: str, sent_bytes: Sequence[int]) -> None:
    """RuntimeError if the last step of a case that starts in full sent as much as the first."""
    if starts_in_full(cases.case_of(name)) and sent_bytes[-1] >= sent_bytes[0]:
        raise RuntimeError(
            f"{name}: step {len(sent_bytes)} sent {sent_bytes[-1]} bytes and the first {sent_bytes[0]}; want "
            "its compressed steps measured, too"
        )


def peak_mb() -> float:
    """The most that this process has had resident so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError("/proc/self/status has no VmHWM")


def train(name: str) -> float:
    """Some steps; returns the size of the model in MB."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)]
    case = shortened(cases.case_of(name))
    model, optimizer = cases.wrap(case, torch.nn.Sequential(*layers), _LEARNING_RATE, None)
    inputs = torch.randn(_BATCH, _WIDTH)
    sent_bytes = []
    for _ in range(_STEPS):
        before = _sent_bytes(model)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        sent_bytes.append(_sent_bytes(model) - before)
    require_compressed(name, sent_bytes)
    dist.barrier()
    return sum(parameter.nbytes for parameter in model.parameters()) / 1e6


def _sent_bytes(model: torch.nn.Module) -> int:
    """So far; 0 for torch's own."""
    return model.stats().bytes_sent if isinstance(model, baguarun.DistributedDataParallel) else 0


def main() -> NoReturn:
    options = argparse.ArgumentParser()
    options.add_argument("--case", required=True)
    options.add_argument("--out", type=Path, required=True)
    args = options.parse_args()
    torch.set_num_threads(1)
    # One backend only: a user of DDP would have Gloo and nothing else.
    baguarun.init_process_group("gloo" if cases.is_on_gloo(args.case) else None)
    model_mb = train(args.case)
    peaks: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(peaks, peak_mb())
    if dist.get_rank() == 0:
        mean_mb = sum(peaks) / len(peaks)
        found = {"case": args.case, "model_mb": model_mb, "peak_mb": mean_mb, "peaks_mb": peaks}
        args.out.write_text(json.dumps([found]))
    dist.barrier()
    # Not sys.exit: the end of the interpreter aborts (SIGABRT) while Gloo's threads run.
    os._exit(0)


if __name__ == "__main__":
    main()
