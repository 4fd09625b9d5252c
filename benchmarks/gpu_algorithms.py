"""Codecs and algorithms on CUDA: kernels against the card's copy, their bits, and steps of every algorithm.

    python -m benchmarks.gpu_algorithms [--check] [--json FILE] [--sanitize]

- Each codec's kernels on 64 Mi numbers: the bytes that they must read and write, per second, over those of a
  copy on the same card.
- The same numbers coded on the CPU and on CUDA: the same bytes, and decoded the same bits; with NaN, Inf,
  zeros and a tail.
- Three steps of every algorithm with two NCCL ranks on one GPU, which works when each has its own
  NCCL_HOSTID, against two Gloo ranks on the CPU. Gradients are chosen (the loss is the inner product of every
  parameter with a random tensor), so that kernels of other libraries have no part in it. One that refuses is
  missed: every algorithm is to take its steps there.
- `--sanitize`: the kernels again under compute-sanitizer's memcheck and racecheck.

Needs a GPU and the extension built with CUDA. `--device cpu` tries the script itself, on Gloo: its figures
mean nothing.
"""

from __future__ import annotations

import math
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import baguarun
from baguarun.comm.algorithms import (
    ALGORITHMS,
    Algorithm,
    DiLoCo,
    LocalSGD,
    QAdam,
    QAdamOptimizer,
    Sparse,
    resolve,
)
from baguarun.comm.extension import load_extension
from baguarun.errors import UsageError
from benchmarks.gpu import NCCL_ON_ONE_GPU, RANKS, SHAPES, STEPS
from benchmarks.harness import REPOSITORY, Report, Row, finish, parser

_WIRES = ("F16", "BF16", "MINMAX8", "MINMAX4", "SIGN1", "TOPK", "RANDOMK")
_NUMBERS = 64 << 20
_QUICK_NUMBERS = 1 << 20
_PARITY_NUMBERS = (1, 2047, 2048, 1_000_003)
_INPUTS = 4
_TURNS = 20
_OF_ROOFLINE = 0.8
_NOT_REPEATABLE = ("async_model_average", "async")
# An optimizer's fused multiply-add on one device and none on the other.
_CLOSE = 1e-6


def seconds(device: str, run: Callable[[], object]) -> float:
    """The median of several runs, the first ones aside."""
    times = []
    for _ in range(_TURNS + 3):
        if device == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            started = time.perf_counter()
            run()
            times.append(time.perf_counter() - started)
    return statistics.median(times[3:])


def kernels(device: str, count: int) -> list[Row]:
    """Bytes per second over a copy's; every number is read and written as seldom as possible."""
    codec = load_extension()
    values = torch.randn(count, device=device)
    target = torch.empty_like(values)
    copied = 2 * values.nbytes / seconds(device, lambda: target.copy_(values))
    rows = []
    for name in _WIRES:
        wire = getattr(codec.Wire, name)
        coded = codec.encode(values, wire)
        chunks = [coded] * _INPUTS
        residual = torch.zeros_like(values)
        works: dict[str, tuple[int, Callable[[], object]]] = {
            "encode": (values.nbytes + coded.nbytes, lambda w=wire: codec.encode(values, w)),
            "decode": (
                values.nbytes + coded.nbytes,
                lambda w=wire, c=coded: codec.decode(c, w, count, torch.float32),
            ),
            f"reduce {_INPUTS} and encode": (
                (_INPUTS + 1) * coded.nbytes,
                lambda w=wire, c=chunks: codec.reduce_encode(c, w, 0.25, count),
            ),
        }
        if name in ("MINMAX8", "SIGN1", "TOPK", "RANDOMK"):
            works["encode with residual"] = (
                3 * values.nbytes + coded.nbytes,
                lambda w=wire, r=residual: codec.encode_with_residual(values, r, w),
            )
        for what, (moved, run) in works.items():
            rate = moved / seconds(device, run)
            rows.append(
                Row(
                    what=f"{name} {what}, {count >> 20} Mi numbers",
                    peer=f"copy {copied / 1e9:.0f} GB/s",
                    ours=f"{rate / 1e9:.0f} GB/s",
                    value=rate / copied,
                    target=_OF_ROOFLINE if device == "cuda" and count == _NUMBERS else None,
                    at_least=True,
                    unit="x",
                )
            )
    return rows


def parity(device: str) -> list[Row]:
    """Bytes and bits that differ between the CPU and `device`; 0 is wanted."""
    codec = load_extension()
    rows = []
    for name in _WIRES:
        wire = getattr(codec.Wire, name)
        differing = compared = 0
        for count in _PARITY_NUMBERS:
            values = torch.randn(count, generator=torch.Generator().manual_seed(count))
            values[::97] = 0.0
            if count > 5000:
                values[3000], values[5000] = float("nan"), float("inf")
            here, there = codec.encode(values, wire), codec.encode(values.to(device), wire)
            pairs = [(here, there)]
            pairs.append((
                codec.decode(here, wire, count, torch.float32).view(torch.int32),
                codec.decode(there, wire, count, torch.float32).view(torch.int32),
            ))  # fmt: skip
            pairs.append((
                codec.reduce_encode([here] * _INPUTS, wire, 0.25, count),
                codec.reduce_encode([there] * _INPUTS, wire, 0.25, count),
            ))  # fmt: skip
            for one, other in pairs:
                differing += int((one != other.cpu()).sum())
                compared += one.numel()
        rows.append(
            Row(
                what=f"{name}: bytes and bits that differ from the CPU's",
                peer=f"{compared} compared",
                ours=f"{differing} differ",
                value=differing,
                target=0,
            )
        )
    return rows


class _Chosen(nn.Module):
    """Its gradients are what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.ones(shape) for shape in SHAPES])

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        pairs = zip(self.weights, gradients, strict=True)
        return torch.stack([(weight * gradient).sum() for weight, gradient in pairs]).sum()


def _settings(name: str) -> Algorithm:
    """For a run of three steps: all exchange something in it."""
    chosen: dict[str, Algorithm] = {
        "sparse": Sparse(warmup_steps=0),
        "local_sgd": LocalSGD(local_steps=2),
        "diloco": DiLoCo(local_steps=2),
    }
    return chosen.get(name) or resolve(name)


def weights_after_steps(name: str, device: str) -> list[torch.Tensor] | str:
    """On the CPU; or what the algorithm said in refusing."""
    module = _Chosen().to(device)
    algorithm = _settings(name)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), lr=0.125)
    if isinstance(algorithm, QAdam):
        optimizer = QAdamOptimizer(module.parameters(), lr=0.125, warmup_steps=1)
    try:
        model = baguarun.DistributedDataParallel(module, optimizers=[optimizer], algorithm=algorithm)
    except UsageError as error:
        return str(error)
    generator = torch.Generator().manual_seed(17 + dist.get_rank())
    for _ in range(STEPS):
        gradients = [torch.randn(shape, generator=generator).to(device) for shape in SHAPES]
        optimizer.zero_grad()
        model(gradients).backward()
        optimizer.step()
    model.algorithm_state_dict()  # waits for what is under way
    return [parameter.detach().cpu().clone() for parameter in module.parameters()]


def work(device: str, folder: Path) -> None:
    """One rank."""
    if device == "cuda":
        torch.cuda.set_device(0)
    baguarun.init_process_group(backend="nccl" if device == "cuda" else "gloo")
    found = {name: weights_after_steps(name, device) for name in ALGORITHMS}
    torch.save(found, folder / f"{device}-{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(device: str, folder: Path) -> list[dict[str, Any]]:
    """What each rank found."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(RANKS):
        env = os.environ | NCCL_ON_ONE_GPU | {"NCCL_HOSTID": f"baguarun-rank{rank}"}
        env |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": "1"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        argv = [
            sys.executable,
            "-m",
            "benchmarks.gpu_algorithms",
            "--device",
            device,
            "--worker",
            str(folder),
        ]
        processes.append(subprocess.Popen(argv, env=env, cwd=REPOSITORY))
    try:
        codes = [process.wait(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        raise SystemExit(f"{device}: ranks ended with {codes}")
    return [torch.load(folder / f"{device}-{rank}.pt") for rank in range(RANKS)]


def steps(device: str) -> list[Row]:
    """Largest difference between weights on `device` and on the CPU, by algorithm."""
    with tempfile.TemporaryDirectory() as folder:
        here, there = run_ranks("cpu", Path(folder)), run_ranks(device, Path(folder))
    return [
        _step_row(name, device, [rank[name] for rank in here], [rank[name] for rank in there])
        for name in ALGORITHMS
    ]


def _step_row(
    name: str,
    device: str,
    here: Sequence[list[torch.Tensor] | str],
    there: Sequence[list[torch.Tensor] | str],
) -> Row:
    """By rank, weights or why there are none: whoever refuses on some rank has not taken the steps."""
    gap = 0.0
    refusal = ""
    for one, other in zip(here, there, strict=True):
        if isinstance(one, str) or isinstance(other, str):
            refusal = other if isinstance(other, str) else str(one)
        else:
            gap = max(gap, *(float((a - b).abs().max()) for a, b in zip(one, other, strict=True)))
    is_compared = name not in _NOT_REPEATABLE
    return Row(
        what=f"{name}: {STEPS} steps on one {device} device, largest difference of a weight",
        peer="Gloo on the CPU",
        ours=f"refused: {refusal}" if refusal else f"{gap:.1e}",
        value=math.inf if refusal else gap,
        target=_CLOSE if is_compared or refusal else None,
    )


def sanitize(device: str) -> list[Row]:
    """The exit codes of the kernels under compute-sanitizer."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        raise SystemExit("--sanitize: no compute-sanitizer in PATH; it is part of the CUDA toolkit")
    rows = []
    for tool in ("memcheck", "racecheck"):
        argv = [program, "--tool", tool, "--error-exitcode", "9", sys.executable]
        argv += ["-m", "benchmarks.gpu_algorithms", "--device", device, "--quick", "--kernels-only"]
        code = subprocess.run(argv, cwd=REPOSITORY, timeout=1800).returncode
        rows.append(
            Row(what=f"compute-sanitizer {tool}, exit code", peer="-", ours=str(code), value=code, target=0)
        )
    return rows


def main(argv: list[str] | None = None) -> int:
    options = parser("gpu_algorithms", __doc__ or "")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--sanitize", action="store_true", help="the kernels under compute-sanitizer, too")
    options.add_argument("--kernels-only", action="store_true", help="no ranks")
    options.add_argument("--worker", type=Path, metavar="FOLDER", help="one rank, started by this script")
    args = options.parse_args(argv)
    if args.worker:
        work(args.device, args.worker)
        return 0
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here: nothing was checked", file=sys.stderr)
        return 1
    report = Report(
        name="gpu_algorithms",
        title=f"codecs and algorithms on {args.device}",
        quick=args.quick or args.kernels_only,
    )
    if args.device == "cuda":
        report.facts["gpu"] = torch.cuda.get_device_name(0)
    report.rows += parity(args.device)
    report.rows += kernels(args.device, _QUICK_NUMBERS if args.quick else _NUMBERS)
    if not args.kernels_only:
        report.rows += steps(args.device)
    if args.sanitize:
        report.rows += sanitize(args.device)
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(main())
