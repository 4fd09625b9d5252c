"""One rank of the memory benchmark: some steps of one contestant with a large model, in a process of its own.

Started by `benchmarks/memory.py` with torchrun's variables; rank 0 writes the ranks' mean peak to `--out`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

import baguarun
from benchmarks import cases

_WIDTH, _LAYERS, _BATCH = 2048, 12, 8
_STEPS = 8
_SHORT = {"local_steps": 2, "max_staleness_steps": 2}
"""So that what happens now and then happens within the steps."""


def shortened(case: cases.Case) -> cases.Case:
    """The same with every period, if its algorithm has one, of two steps, and a warm-up of no more."""
    if case.algorithm is None:
        return case
    changes = {name: steps for name, steps in _SHORT.items() if hasattr(case.algorithm, name)}
    if getattr(case.algorithm, "warmup_steps", 0) > 2:
        changes["warmup_steps"] = 2
    return dataclasses.replace(case, algorithm=dataclasses.replace(case.algorithm, **changes))


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
    model, optimizer = cases.wrap(shortened(cases.case_of(name)), torch.nn.Sequential(*layers), 1e-3, None)
    inputs = torch.randn(_BATCH, _WIDTH)
    for _ in range(_STEPS):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    dist.barrier()
    return sum(parameter.nbytes for parameter in model.parameters()) / 1e6


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
