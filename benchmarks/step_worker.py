"""One rank of the step benchmark: all contestants live in the same processes and take turns.

A case is `ddp`, `ddp_fp16`, `ddp_powersgd` or `ddp_powersgd_run`, on Gloo, or, with `@baguanet` behind the
name, on baguarun's transport; `alone`, which communicates nothing; or one of baguarun's algorithms, by name
or as in `VARIANTS`: on its own transport, or, with `@gloo` behind the name, on Gloo; with `+rail` or `+flat`
before that, by rail between nodes or not, whatever its default; or `hook_bytegrad`, `hook_onebit` or
`hook_topk`, torch's DDP with that hook of `baguarun.comm.hooks`. Started by `benchmarks/step.py` with
torchrun's variables; rank 0 writes the blocks as JSON to `--out`. Jobs on other networks may be at work on
the same machine: each waits for the baton before it does what takes time.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import baguarun
from baguarun.comm import hooks
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
    Sparse,
    resolve,
)
from baguarun.comm.algorithms.async_model_average import AsyncStepper
from baguarun.comm.algorithms.diloco import OuterStepper
from baguarun.comm.algorithms.low_precision_decentralized import RingStepper
from benchmarks.baton import Baton
from benchmarks.harness import rotated

_HIERARCHICAL = {"rail": True, "flat": False}
_WARM_UP_STEPS = 3
_LEAST_STEPS = 3
_MOST_STEPS = 200
_LOOKS = 2
"""At how long a step takes, each as long as a lead, or half a turn if that is longer."""
_BATCH = 32

VARIANTS: dict[str, Algorithm] = {
    "low_precision_decentralized_4bit": LowPrecisionDecentralized(bits=4),
    "decentralized_shift_one": Decentralized(peer_selection_mode="shift_one"),
    "decentralized_exponential": Decentralized(peer_selection_mode="exponential"),
    "diloco_int8": DiLoCo(wire="int8"),
    "diloco_overlapped": DiLoCo(wire="int4", fragments=4, delay_steps=20),
    "qadam": QAdam(),
    "qadam_1bit": QAdam(bits=1),
    "qadam_run": QAdam(),
    "qadam_1bit_run": QAdam(bits=1),
    # As the peer, so that turns are of compressed steps only.
    "power_sgd": PowerSGD(start_step=2),
    "power_sgd_run": PowerSGD(start_step=2),
    "sparse": Sparse(warmup_steps=0),
    "sparse_run": Sparse(warmup_steps=3),
}
"""Contestants whose settings are not the defaults. Of those with a warm-up only compressed steps are looked
at; in a `_run`, which begins anew again and again, every tenth step is of the warm-up."""

STEPS_OF_RUN = {
    "qadam_run": 10,
    "qadam_1bit_run": 10,
    "power_sgd_run": 20,
    "ddp_powersgd_run": 20,
    "sparse_run": 30,
}
"""Ten times the warm-up: torch's PowerSGD has two steps at least, `sparse` three densities."""
_QADAM_LR = 1e-8
"""The variance is that of one step: larger steps end in infinity when gradients grow, and a step that is not
finite is left out."""
_LONGER_ALONE = 3
"""Turns of `alone`: those held against it are long, and the machine is not the same every second."""
NEARLY_ALONE = (AsyncModelAverage.name, "diloco_overlapped")
"""Held against `alone`, which has a turn right before each of theirs and one right after it: the machine is
not the same every minute, either."""
_STEPS_BESIDE = 400
"""Of those, in a turn. A hundred steps, over those of `alone` before and after, have a standard deviation of
3 %: who repeats itself so soon has several short turns in one, with `alone` in between."""
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
    sent_packets_per_step: float = 0.0
    """Of the same NIC: frames, as large as it takes them."""
    rounds_per_step: float = 1.0
    """Exchanges of weights; 1 for who exchanges something else."""
    until_gradients_s: float = 0.0
    """Of `alone`, the ranks' mean: from the begin of a step until the first gradient is there."""
    optimizer_s: float = 0.0
    """Likewise, the optimizer's part."""
    beside_s: float = 0.0
    """Of those held against `alone`: seconds of its step, before and after."""
    busy: float = 0.0
    """The share of the turn in which this machine's cores did something, whoever asked for it."""


@dataclass(frozen=True)
class Length:
    """Of a turn, in steps."""

    lead: int
    """Before those that count: they find connections that were idle while others had their turns, as training
    does not."""
    counted: int


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


@dataclass(frozen=True)
class Contestant:
    """A model made distributed."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    begin_anew: Callable[[], None] | None = None
    """Takes the next step for the first one; None for who has no warm-up."""


def wrap(case: str, model: torch.nn.Module, gloo: dist.ProcessGroup) -> Contestant:
    """The model made distributed as contestant `case` does it."""
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if case.startswith("ddp"):
        group = None if case.endswith("@baguanet") else gloo
        case = case.removesuffix("@baguanet")
        is_powersgd = case.startswith("ddp_powersgd")
        # On Gloo the collectives that torch's PowerSGD starts in callbacks of several buckets cross.
        cap_mb = 1024 if is_powersgd else None
        wrapped = DistributedDataParallel(
            model, process_group=group, gradient_as_bucket_view=True, bucket_cap_mb=cap_mb
        )
        if case == "ddp_fp16":
            wrapped.register_comm_hook(group, fp16_compress_hook)
        elif is_powersgd:
            state = PowerSGDState(group, start_powerSGD_iter=2)
            wrapped.register_comm_hook(state, powerSGD_hook)
            return Contestant(wrapped, optimizer, lambda: setattr(state, "iter", 0))
        return Contestant(wrapped, optimizer)
    if case == "alone":
        return Contestant(model, optimizer)
    name, _, transport = case.partition("@")
    if name.startswith("hook_"):
        group = gloo if transport == "gloo" else None
        wrapped = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
        hook = getattr(hooks, name.removeprefix("hook_"))
        wrapped.register_comm_hook(hooks.CodecState(process_group=group), hook)
        return Contestant(wrapped, optimizer)
    base = name.partition("+")[0]
    algorithm: Any = VARIANTS.get(base) or resolve(base)
    if "+" in name:
        algorithm = replace(algorithm, hierarchical=_HIERARCHICAL[name.partition("+")[2]])
    if isinstance(algorithm, QAdam):
        optimizer = QAdamOptimizer(model.parameters(), lr=_QADAM_LR, warmup_steps=1)
    ours = baguarun.DistributedDataParallel(
        model,
        optimizers=[optimizer],
        algorithm=algorithm,
        process_group=gloo if transport == "gloo" else None,
    )
    if isinstance(optimizer, QAdamOptimizer):
        return Contestant(ours, optimizer, lambda: _forget(optimizer))
    if isinstance(algorithm, (PowerSGD, Sparse)):
        return Contestant(ours, optimizer, lambda: _take_for_first(ours))
    return Contestant(ours, optimizer)


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
    watch: Callable[[], Watch]
    """Looks at the steps from now on."""


class Watch:
    """Tells when in its steps a training gets where."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._hooks: list[Any] = [
            parameter.register_post_accumulate_grad_hook(self._note_gradient)
            for parameter in model.parameters()
        ]
        self._hooks += [
            optimizer.register_step_pre_hook(self._note_optimizer),
            optimizer.register_step_post_hook(self._note_end),
        ]
        self._began_at = time.perf_counter()
        self._has_gradients = False
        self._optimizer_at = 0.0
        self._until_gradients_s: list[float] = []
        self._optimizer_s: list[float] = []

    def end(self) -> tuple[float, float]:
        """Seconds until the first gradient was there, and the optimizer's; the ranks' means."""
        for hook in self._hooks:
            hook.remove()
        means = torch.tensor([fmean(self._until_gradients_s), fmean(self._optimizer_s)], dtype=torch.float64)
        dist.all_reduce(means)
        until_gradients_s, optimizer_s = (means / dist.get_world_size()).tolist()
        return until_gradients_s, optimizer_s

    def _note_gradient(self, _: torch.Tensor) -> None:
        if not self._has_gradients:
            self._has_gradients = True
            self._until_gradients_s.append(time.perf_counter() - self._began_at)

    def _note_optimizer(self, *_: Any) -> None:
        self._optimizer_at = time.perf_counter()

    def _note_end(self, *_: Any) -> None:
        # The next step begins.
        self._began_at = time.perf_counter()
        self._optimizer_s.append(self._began_at - self._optimizer_at)
        self._has_gradients = False


def make_training(case: str, model_name: str, gloo: dist.ProcessGroup) -> Training:
    """The contestant `case`, untrained."""
    model, width = build_model(model_name)
    contestant = wrap(case, model, gloo)
    wrapped, optimizer = contestant.model, contestant.optimizer
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs = torch.randn(_BATCH, width, generator=generator)
    # Not zero, which the last ReLU reaches by dying: then there are no gradients any more.
    wanted = torch.rand(_BATCH, width, generator=generator)
    ours = wrapped if isinstance(wrapped, baguarun.DistributedDataParallel) else None
    exchanging = None if ours is None else ours._session.stepper
    steps_of_run = STEPS_OF_RUN.get(case.partition("@")[0])
    taken = 0

    def step() -> None:
        nonlocal taken
        if steps_of_run and contestant.begin_anew and taken > 0 and taken % steps_of_run == 0:
            contestant.begin_anew()
        taken += 1
        optimizer.zero_grad()
        (wrapped(inputs) - wanted).square().mean().backward()
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
    return Training(step, finish, drain, rounds, lambda: Watch(model, optimizer))


def _forget(optimizer: QAdamOptimizer) -> None:
    """Begin the warm-up again."""
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group["steps"] = 0


def _take_for_first(model: baguarun.DistributedDataParallel) -> None:
    """The engine's memory has counted no steps; what it owes stays."""
    state = model.common_state()
    counts = {name: 0 for name in ("steps", "rounds") if name in state}
    model.adopt_common_state({**state, **counts})


def period(case: str) -> int:
    """Steps after which what a case does repeats."""
    name = case.partition("@")[0].partition("+")[0]
    if name in STEPS_OF_RUN:
        return STEPS_OF_RUN[name]
    if name == AsyncModelAverage.name:
        return _STEPS_OF_ROUNDS
    return int(getattr(VARIANTS.get(name) or ALGORITHMS.get(name), "local_steps", 1))


def sent() -> tuple[float, float]:
    """Bytes and packets that this rank's NIC has sent; on loopback its share of what all ranks sent."""
    nic = os.environ["GLOO_SOCKET_IFNAME"]
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == nic:
            share = dist.get_world_size() if nic == "lo" else 1
            count_bytes, count_packets = counters.split()[8:10]
            return int(count_bytes) / share, int(count_packets) / share
    raise RuntimeError(f"GLOO_SOCKET_IFNAME={nic}: no such interface here")


def core_ticks() -> tuple[int, int]:
    """What this machine's cores have spent idle, and in all; without what a hypervisor took from them."""
    user, nice, system, idle, iowait, irq, softirq = map(
        int, Path("/proc/stat").read_text().partition("\n")[0].split()[1:8]
    )
    waited = idle + iowait
    return waited, waited + user + nice + system + irq + softirq


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


@contextlib.contextmanager
def _turn(baton: Baton | None) -> Iterator[None]:
    """All ranks hold `baton`, which is with rank 0, and no job but this one does anything."""
    if baton is not None:
        baton.take()
    dist.barrier()
    yield
    dist.barrier()
    if baton is not None:
        baton.hand_on()


def compete(
    cases: list[str], model_name: str, rounds: int, block_s: float, lead_s: float, baton: Baton | None
) -> list[Block]:
    """Let the contestants take turns for `rounds` rounds of blocks of about `block_s`, each after a step, or
    about `lead_s`, that does not count; `baton` on rank 0."""
    gloo = dist.new_group(backend="gloo")
    with _turn(baton):
        pass  # All jobs have started: that would be in the way of who measures.
    with _turn(baton):
        trainings = {case: make_training(case, model_name, gloo) for case in cases}
        lengths = {case: _length(case, training, block_s, lead_s) for case, training in trainings.items()}
    held = [case for case in cases if case in NEARLY_ALONE and "alone" in cases]
    blocks = []
    for number in range(rounds):
        for case in rotated([case for case in cases if case != "alone" or not held], number):
            with _turn(baton):
                block = functools.partial(_block, case, number, lengths[case], trainings[case])
                if case in held:
                    blocks.append(_between(block, lengths[case], trainings["alone"], lengths["alone"]))
                else:
                    blocks.append(block())
    with _turn(baton):
        pass  # All jobs are done: so would their ends be.
    return blocks


def _length(case: str, training: Training, block_s: float, lead_s: float) -> Length:
    """How many steps take about `block_s`, after a warm-up: whole periods, from the first step on, and so
    without a lead where a period is more than a step."""
    timed(training, math.ceil(_WARM_UP_STEPS / period(case)) * period(case) - 1)
    turn_s = block_s * (_LONGER_ALONE if case == "alone" else 1)
    step_s = timed(training, 1)
    if period(case) > 1:
        wanted = _steps_within(turn_s, step_s, _LEAST_STEPS)
        return Length(0, math.ceil(wanted / period(case)) * period(case))
    # A step by itself is longer than those of a turn: its messages are waited for at its end, and its
    # connections have small windows, the more so the more latency there is.
    for _ in range(_LOOKS):
        step_s = timed(training, _steps_within(max(lead_s, block_s / 2), step_s, 1))
    return Length(_steps_within(lead_s, step_s, 1), _steps_within(turn_s, step_s, _LEAST_STEPS))


def _steps_within(seconds: float, step_s: float, least: int) -> int:
    return max(least, min(_MOST_STEPS, math.ceil(seconds / step_s)))


def _block(case: str, number: int, length: Length, training: Training) -> Block:
    """One turn."""
    if length.lead:
        timed(training, length.lead)
    steps = length.counted
    dist.barrier()
    rounds = training.rounds or (lambda: 0)
    bytes_before, packets_before = sent()
    rounds_before = rounds()
    idle_before, ticks_before = core_ticks()
    step_s = timed(training, steps)
    idle_after, ticks_after = core_ticks()
    bytes_after, packets_after = sent()
    moved = (bytes_after - bytes_before) / steps
    packets = (packets_after - packets_before) / steps
    rate = (rounds() - rounds_before) / steps if training.rounds else 1.0
    ticks = ticks_after - ticks_before
    busy = 1 - (idle_after - idle_before) / ticks if ticks else 0.0
    block = Block(case, number, steps, step_s, moved, packets, rate, busy=busy)
    return take_apart(block, training) if case == "alone" else block


def _between(block: Callable[[], Block], length: Length, alone: Training, longest: Length) -> Block:
    """Short turns of `length`, each between two of `alone`'s that are no longer, as one: the means."""
    alone_steps = min(longest.counted, length.counted)
    alone_s = [timed(alone, alone_steps)]
    blocks = []
    for _ in range(math.ceil(_STEPS_BESIDE / length.counted)):
        blocks.append(block())
        alone_s.append(timed(alone, alone_steps))
    return replace(
        blocks[0],
        steps=sum(each.steps for each in blocks),
        step_s=fmean(each.step_s for each in blocks),
        sent_bytes_per_step=fmean(each.sent_bytes_per_step for each in blocks),
        sent_packets_per_step=fmean(each.sent_packets_per_step for each in blocks),
        rounds_per_step=fmean(each.rounds_per_step for each in blocks),
        beside_s=fmean(map(fmean, pairwise(alone_s))),
        busy=fmean(each.busy for each in blocks),
    )


def take_apart(block: Block, training: Training) -> Block:
    """The block with the parts of a step, from as many further ones."""
    dist.barrier()
    watch = training.watch()
    for _ in range(block.steps):
        training.step()
    until_gradients_s, optimizer_s = watch.end()
    return replace(block, until_gradients_s=until_gradients_s, optimizer_s=optimizer_s)


def main() -> int:
    options = argparse.ArgumentParser()
    options.add_argument("--cases", required=True)
    options.add_argument("--model", required=True)
    options.add_argument("--rounds", type=int, required=True)
    options.add_argument("--block-s", type=float, required=True)
    options.add_argument("--lead-s", type=float, required=True)
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--baton", type=Path, nargs=2, required=True, help="this job's pipe, the next one's")
    args = options.parse_args()
    # A step that is left out takes less time than one that trains.
    warnings.filterwarnings("error", "QAdamOptimizer: a gradient is not finite")
    torch.set_num_threads(1)
    baguarun.init_process_group()
    baton = Baton(*args.baton) if dist.get_rank() == 0 else None
    blocks = compete(args.cases.split(","), args.model, args.rounds, args.block_s, args.lead_s, baton)
    if dist.get_rank() == 0:
        args.out.write_text(json.dumps([asdict(block) for block in blocks]))
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
