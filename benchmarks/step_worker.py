"""One rank of the step benchmark: all contestants live in the same processes and take turns.

A case is `ddp`, `ddp_fp16` or `ddp_powersgd`, on Gloo, or, with `@baguanet` behind the name, on baguarun's
transport; `alone`, which communicates nothing; or one of baguarun's algorithms, by name or as in `VARIANTS`:
on its own transport, or, with `@gloo` behind the name, on Gloo; with `+rail` or `+flat` before that, by rail
between nodes or not, whatever its default. Started by `benchmarks/step.py` with torchrun's variables; rank 0
writes the blocks as JSON to `--out`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import baguarun
from baguarun.comm.algorithms import (
    ALGORITHMS,
    Algorithm,
    AsyncModelAverage,
    Decentralized,
    DiLoCo,
    LowPrecisionDecentralized,
    PowerSGD,
    QAdam,
    QAdamOptimizer,
    resolve,
)
from baguarun.comm.algorithms.async_model_average import AsyncStepper
from baguarun.comm.algorithms.diloco import OuterStepper
from baguarun.comm.algorithms.low_precision_decentralized import RingStepper
from benchmarks.harness import rotated

_HIERARCHICAL = {"rail": True, "flat": False}
_WARM_UP_STEPS = 3
# The first step of a turn finds connections that were idle while others had theirs; training does not.
_LEAST_STEPS = 3
_BATCH = 32

VARIANTS: dict[str, Algorithm] = {
    "low_precision_decentralized_4bit": LowPrecisionDecentralized(bits=4),
    "decentralized_shift_one": Decentralized(peer_selection_mode="shift_one"),
    "diloco_int8": DiLoCo(wire="int8"),
    "diloco_overlapped": DiLoCo(wire="int8", fragments=4, delay_steps=20),
    "qadam": QAdam(),
    "qadam_1bit": QAdam(bits=1),
    "qadam_run": QAdam(),
    "qadam_1bit_run": QAdam(bits=1),
    # As the peer, so that turns are of compressed steps only.
    "power_sgd": PowerSGD(start_step=2),
}
"""Contestants whose settings are not the defaults. Of QAdam only compressed steps are looked at; in a `_run`,
which begins anew with each turn, every tenth step is of the warm-up."""

_STEPS_OF_RUN = 10
_STEPS_OF_ROUNDS = 1000
"""Rounds of `async_model_average` start some hundred steps apart."""


@dataclass(frozen=True)
class Block:
    """One contestant's turn, the slowest rank's time."""

    case: str
    round: int
    steps: int
    step_s: float
    sent_bytes_per_step: float
    """Rank 0's NIC; on loopback all ranks' traffic divided by the ranks."""
    rounds_per_step: float = 1.0
    """Exchanges of weights; 1 for who exchanges something else."""


def build_model(name: str) -> tuple[torch.nn.Module, int]:
    """The model and the width of its input."""
    torch.manual_seed(0)
    if name == "mlp":
        layers: list[torch.nn.Module] = []
        for _ in range(8):
            layers += [torch.nn.Linear(1024, 1024), torch.nn.ReLU()]
        return torch.nn.Sequential(*layers), 1024
    if name == "small":
        return torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(200))), 32
    raise ValueError(f"model {name}: want mlp or small")


def wrap(
    case: str, model: torch.nn.Module, gloo: dist.ProcessGroup
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The model made distributed as contestant `case` does it, and its optimizer."""
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if case.startswith("ddp"):
        group = None if case.endswith("@baguanet") else gloo
        case = case.removesuffix("@baguanet")
        # On Gloo the collectives that torch's PowerSGD starts in callbacks of several buckets cross.
        cap_mb = 1024 if case == "ddp_powersgd" else None
        wrapped = DistributedDataParallel(
            model, process_group=group, gradient_as_bucket_view=True, bucket_cap_mb=cap_mb
        )
        if case == "ddp_fp16":
            wrapped.register_comm_hook(group, fp16_compress_hook)
        elif case == "ddp_powersgd":
            wrapped.register_comm_hook(PowerSGDState(group, start_powerSGD_iter=2), powerSGD_hook)
        return wrapped, optimizer
    if case == "alone":
        return model, optimizer
    name, _, transport = case.partition("@")
    base = name.partition("+")[0]
    algorithm: Any = VARIANTS.get(base) or resolve(base)
    if "+" in name:
        algorithm = replace(algorithm, hierarchical=_HIERARCHICAL[name.partition("+")[2]])
    if isinstance(algorithm, QAdam):
        optimizer = QAdamOptimizer(model.parameters(), lr=1e-5, warmup_steps=1)
    return baguarun.DistributedDataParallel(
        model,
        optimizers=[optimizer],
        algorithm=algorithm,
        process_group=gloo if transport == "gloo" else None,
    ), optimizer


@dataclass(frozen=True)
class Training:
    """One contestant's model at work."""

    step: Callable[[], None]
    """Trains one step."""
    finish: Callable[[], None]
    """Waits for messages that are still under way: they belong to the turn that sent them, and so does the
    time."""
    drain: Callable[[], None]
    """Waits for what nobody would wait for in training: it must not be in the next one's way, and its bytes
    belong to the turn."""
    rounds: Callable[[], int] | None
    """Exchanges of weights so far; None for who exchanges something else."""


def make_training(case: str, model_name: str, gloo: dist.ProcessGroup) -> Training:
    """The contestant `case`, untrained."""
    model, width = build_model(model_name)
    wrapped, optimizer = wrap(case, model, gloo)
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs = torch.randn(_BATCH, width, generator=generator)
    ours = wrapped if isinstance(wrapped, baguarun.DistributedDataParallel) else None
    exchanging = None if ours is None else ours._session.stepper
    begins_anew = case.partition("@")[0].endswith("_run")

    def step() -> None:
        if begins_anew and isinstance(optimizer, QAdamOptimizer) and optimizer.steps == _STEPS_OF_RUN:
            _forget(optimizer)
        optimizer.zero_grad()
        wrapped(inputs).square().mean().backward()
        optimizer.step()

    def finish() -> None:
        if isinstance(exchanging, RingStepper):
            exchanging.finish()

    def drain() -> None:
        if isinstance(exchanging, AsyncStepper):
            exchanging.pause()
            exchanging.resume()
        elif isinstance(exchanging, OuterStepper):
            exchanging.finish()

    rounds = None if ours is None or exchanging is None else lambda: ours.stats().weight_rounds
    return Training(step, finish, drain, rounds)


def _forget(optimizer: QAdamOptimizer) -> None:
    """Begin the warm-up again."""
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group["steps"] = 0


def period(case: str) -> int:
    """Steps after which what a case does repeats."""
    name = case.partition("@")[0].partition("+")[0]
    if name.endswith("_run"):
        return _STEPS_OF_RUN
    if name == AsyncModelAverage.name:
        return _STEPS_OF_ROUNDS
    return int(getattr(VARIANTS.get(name) or ALGORITHMS.get(name), "local_steps", 1))


def sent_bytes() -> float:
    """What this rank's NIC has sent; on loopback its share of what all ranks sent."""
    nic = os.environ["GLOO_SOCKET_IFNAME"]
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == nic:
            return int(counters.split()[8]) / (dist.get_world_size() if nic == "lo" else 1)
    raise RuntimeError(f"GLOO_SOCKET_IFNAME={nic}: no such interface here")


def slowest(seconds: float) -> float:
    """The largest of all ranks' values."""
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


def timed(training: Training, steps: int) -> float:
    """Seconds per step on the slowest rank, with all that the steps sent; all ranks begin together."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(steps):
        training.step()
    training.finish()
    took_s = time.perf_counter() - started
    training.drain()
    return slowest(took_s / steps)


def compete(cases: list[str], model_name: str, rounds: int, block_s: float) -> list[Block]:
    """Let the contestants take turns for `rounds` rounds of blocks of about `block_s`."""
    gloo = dist.new_group(backend="gloo")
    trainings = {case: make_training(case, model_name, gloo) for case in cases}
    steps = {}
    for case, found in trainings.items():
        # Turns are whole periods, from the first step on.
        timed(found, math.ceil(_WARM_UP_STEPS / period(case)) * period(case) - 1)
        wanted = max(_LEAST_STEPS, min(200, math.ceil(block_s / timed(found, 1))))
        steps[case] = math.ceil(wanted / period(case)) * period(case)
    blocks = []
    for number in range(rounds):
        for case in rotated(cases, number):
            dist.barrier()
            rounds = trainings[case].rounds or (lambda: 0)
            before, rounds_before = sent_bytes(), rounds()
            step_s = timed(trainings[case], steps[case])
            moved = (sent_bytes() - before) / steps[case]
            rate = (rounds() - rounds_before) / steps[case] if trainings[case].rounds else 1.0
            blocks.append(Block(case, number, steps[case], step_s, moved, rate))
    return blocks


def main() -> int:
    options = argparse.ArgumentParser()
    options.add_argument("--cases", required=True)
    options.add_argument("--model", required=True)
    options.add_argument("--rounds", type=int, required=True)
    options.add_argument("--block-s", type=float, required=True)
    options.add_argument("--out", type=Path, required=True)
    args = options.parse_args()
    torch.set_num_threads(1)
    baguarun.init_process_group()
    blocks = compete(args.cases.split(","), args.model, args.rounds, args.block_s)
    if dist.get_rank() == 0:
        args.out.write_text(json.dumps([asdict(block) for block in blocks]))
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
