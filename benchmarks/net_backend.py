"""The c10d backend baguanet against Gloo, in the same processes, by turns: all-reduce and a DDP step.

Ranks are processes of one host, pinned. All-reduces are fp32 SUM by `torch.distributed`, best of the rounds;
steps are torch's own DDP on either backend, the median of the rounds' ratios. Wants a quiet machine: load
hits the two sides unequally.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import baguarun.comm.backend
from benchmarks.harness import Report, Row, finish, interleave, parser
from benchmarks.ranks import Plan, values_of_first_rank
from benchmarks.ratios import paired_ratio
from benchmarks.step_worker import build_model

BACKENDS = ("gloo", baguarun.comm.backend.NAME)
KIB = 1024
# KiB: least ratio to Gloo, by ranks; up to 64 KiB what lies between torch and the transport counts most.
_TARGETS: dict[int, dict[int, float]] = {
    2: {4: 20, 64: 20, 1024: 15, 16384: 7, 65536: 6},
    4: {4: 20, 64: 20, 1024: 20, 16384: 5, 65536: 5},
}
_IDLE_S = 1.0
_WAIT_S = 0.5
_WAIT_CPU_MS = 0.5


def _rank(plan: Plan, rank: int, link: Connection) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[rank % len(cpus)]})
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{plan.folder}/store", rank=rank, world_size=plan.size
    )
    groups = {backend: dist.new_group(backend=backend) for backend in BACKENDS}
    outcome: dict[str, list[float]] = {}
    for kib in _TARGETS[plan.size]:
        cases = {f"{name} {kib}": _all_reduces(name, group, kib) for name, group in groups.items()}
        for case in cases.values():
            case()
        outcome.update(interleave(cases, plan.rounds))
    steps = {f"{name} step": _ddp_steps(group) for name, group in groups.items()}
    for step in steps.values():
        step()
    outcome.update(interleave(steps, plan.rounds))
    ours = groups[baguarun.comm.backend.NAME]
    outcome["idle"] = [_idle_cpu() for _ in range(3)]
    outcome["wait"] = [_waiting_cpu(ours, rank) for _ in range(3)]
    dist.barrier()
    dist.destroy_process_group()
    link.send(outcome)


def _all_reduces(name: str, group: dist.ProcessGroup, kib: int) -> Callable[[], float]:
    """Seconds per all-reduce of `kib` KiB, all ranks starting together."""
    tensor = torch.zeros(kib * KIB // 4)
    few = 20 if kib < 2000 else 3
    many = few if name == "gloo" else 200 if kib < 100 else 20 if kib < 2000 else 4

    def run() -> float:
        dist.barrier(group)
        started = time.perf_counter()
        for _ in range(many):
            dist.all_reduce(tensor, group=group)
        return (time.perf_counter() - started) / many

    return run


def _ddp_steps(group: dist.ProcessGroup) -> Callable[[], float]:
    """Seconds per training step of torch's DDP, an 8 M-parameter MLP."""
    model, width = build_model("mlp")
    wrapped = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(32, width)

    def run() -> float:
        dist.barrier(group)
        started = time.perf_counter()
        for _ in range(5):
            optimizer.zero_grad()
            wrapped(inputs).square().mean().backward()
            optimizer.step()
        return (time.perf_counter() - started) / 5

    return run


def _idle_cpu() -> float:
    """Seconds of CPU per second of the whole process, with nothing to do; Gloo's threads are idle, too."""
    dist.barrier()
    before = time.process_time()
    time.sleep(_IDLE_S)
    return (time.process_time() - before) / _IDLE_S


def _waiting_cpu(group: dist.ProcessGroup, rank: int) -> float:
    """Seconds of CPU that the thread which waits uses on rank 0 while rank 1 comes late to an all-reduce."""
    tensor = torch.zeros(1024)
    dist.barrier(group)
    if rank == 1:
        time.sleep(_WAIT_S)
    before = time.thread_time()
    dist.all_reduce(tensor, group=group)
    return time.thread_time() - before


def _rows(size: int, values: dict[str, list[float]]) -> list[Row]:
    peer, own = BACKENDS
    rows = []
    for kib, ratio in _TARGETS[size].items():
        gloo_us, ours_us = (min(values[f"{name} {kib}"]) * 1e6 for name in (peer, own))
        rows.append(
            Row(
                what=f"{size} ranks, all-reduce of {kib} KiB",
                peer=f"gloo {gloo_us:.0f} µs",
                ours=f"{ours_us:.1f} µs",
                value=gloo_us / ours_us,
                target=ratio,
                at_least=True,
                unit="x",
            )
        )
    ratio_of_steps = paired_ratio(values[f"{own} step"], values[f"{peer} step"])
    gloo_ms, ours_ms = (min(values[f"{name} step"]) * 1e3 for name in (peer, own))
    rows.append(
        Row(
            what=f"{size} ranks, torch DDP step (95 % under {ratio_of_steps.upper95:.2f})",
            peer=f"gloo {gloo_ms:.1f} ms",
            ours=f"{ours_ms:.1f} ms",
            value=ratio_of_steps.median,
            target=None,
            unit="x",
        )
    )
    for what, case, target in (
        (f"CPU of a wait of {_WAIT_S} s", "wait", _WAIT_CPU_MS),
        ("CPU of an idle rank, per second", "idle", None),
    ):
        used_ms = min(values[case]) * 1e3
        rows.append(
            Row(
                what=f"{size} ranks, {what}",
                peer="-",
                ours=f"{used_ms:.2f} ms",
                value=used_ms,
                target=target,
                unit=" ms",
            )
        )
    return rows


def main() -> int:
    options = parser("net_backend", __doc__ or "").parse_args()
    report = Report(
        name="net_backend", title="torch.distributed on baguanet and on Gloo", quick=options.quick
    )
    for size in _TARGETS:
        values = values_of_first_rank(_rank, size, 3 if options.quick else 10)
        report.raw[f"{size} ranks, s"] = values
        report.rows += _rows(size, values)
    return finish(report, options)


if __name__ == "__main__":
    sys.exit(main())
