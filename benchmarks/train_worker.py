"""One rank of the benchmarks that train: all contestants train the same tasks, one after the other.

Started by `benchmarks/quality.py` and `benchmarks/time_to_loss.py` with torchrun's variables; rank 0 writes
the curves as JSON to `--out`.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import baguarun
from benchmarks import cases
from benchmarks.harness import rotated
from benchmarks.tasks import TASKS, Task


@dataclass(frozen=True)
class Curve:
    """One contestant's training with one seed."""

    task: str
    case: str
    seed: int
    steps: list[int]
    """After which the loss was taken; those of the other lists."""
    seconds: list[float]
    """From the beginning of the first step, the slowest rank's."""
    losses: list[float]
    """On data held out: each rank looks at its share with the replica that it holds, the mean over ranks.
    Where replicas differ, this is what a replica is worth, and not their average."""


def train(
    task_name: str, name: str, seed: int, gloo: dist.ProcessGroup, *, every: int, steps: int | None = None
) -> Curve:
    """Train for `steps` (None: the task's), looking at the loss every so many of them and at the end."""
    task = TASKS[task_name]
    steps = task.steps if steps is None else steps
    torch.manual_seed(seed)
    group = gloo if cases.is_on_gloo(name) else None
    model, optimizer = cases.wrap(cases.case_of(name), task.model(), task.learning_rate, group)
    rank, size = dist.get_rank(), dist.get_world_size()
    batches = task.batches(seed, rank, size)
    taken: list[tuple[int, float, list[Tensor]]] = []
    dist.barrier()
    started = time.perf_counter()
    for step in range(1, steps + 1):
        loss = task.loss(model, next(batches))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % every == 0 or step == steps:
            # Only the copy is on the clock; what it is worth is found out afterwards.
            elapsed_s = time.perf_counter() - started
            taken.append((step, elapsed_s, [weight.detach().clone() for weight in model.parameters()]))
    if isinstance(model, baguarun.DistributedDataParallel):
        # Waits for what is under way: slower ranks need it, and the next contestant has the same group.
        model.algorithm_state_dict()
    seconds = torch.tensor([elapsed_s for _, elapsed_s, _ in taken], dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    losses = [validation_loss(task, model, weights) for _, _, weights in taken]
    return Curve(task_name, name, seed, [step for step, _, _ in taken], seconds.tolist(), losses)


@torch.no_grad()
def validation_loss(task: Task, model: nn.Module, weights: list[Tensor]) -> float:
    """The ranks' mean, each with its own `weights` on its share."""
    for weight, kept in zip(model.parameters(), weights, strict=True):
        weight.copy_(kept)
    inner = model.module
    total = task.loss(inner, task.validation(dist.get_rank(), dist.get_world_size())).double()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def main() -> int:
    options = argparse.ArgumentParser()
    options.add_argument("--tasks", required=True)
    options.add_argument("--cases", required=True)
    options.add_argument("--seed", type=int, required=True)
    options.add_argument("--every", type=int, required=True)
    options.add_argument("--steps", type=int, default=None)
    options.add_argument("--out", type=Path, required=True)
    args = options.parse_args()
    torch.set_num_threads(1)
    baguarun.init_process_group()
    gloo = dist.new_group(backend="gloo")
    curves = []
    for task in args.tasks.split(","):
        for name in rotated(args.cases.split(","), args.seed):
            curve = train(task, name, args.seed, gloo, every=args.every, steps=args.steps)
            curves.append(asdict(curve))
            if dist.get_rank() == 0:
                figures = f"loss {curve.losses[-1]:.4f} after {curve.seconds[-1]:.1f} s"
                print(f"{task}, seed {args.seed}, {name}: {figures}", flush=True)
            # Its groups and threads go before the next one comes.
            gc.collect()
    if dist.get_rank() == 0:
        args.out.write_text(json.dumps(curves))
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
