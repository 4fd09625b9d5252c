"""Codecs and algorithms on CUDA: kernels against the card's copy, their bits, and steps of every algorithm.

    python -m benchmarks.gpu_algorithms [--check] [--json FILE] [--sanitize]

- Each codec's kernels on 64 Mi numbers: the bytes that they must read and write, per second, over those of a
  copy on the same card; sums that are coded again on as many numbers, too, as make them move what the copy
  moves. Launches that follow each other, without the time that Python takes for them.
- The same numbers coded on the CPU and on CUDA: the same bytes, and decoded the same bits; with NaN, Inf,
  zeros and a tail.
- Three steps of every algorithm with two NCCL ranks on one GPU, which works when each has its own
  NCCL_HOSTID, against two Gloo ranks on the CPU; with three of those that go round a ring; and by rail with
  four, as two nodes of two. Gradients are
  chosen (the loss is the inner product of every parameter with a random tensor), so that kernels of other
  libraries have no part in it. One that refuses is missed: every algorithm is to take its steps there.
- The same steps of torch's DDP with the codecs as its hooks (`baguarun.comm.hooks`), with two ranks.
- `--sanitize`: the kernels again under compute-sanitizer's memcheck and racecheck.

Needs a GPU and the extension built with CUDA. `--device cpu` tries the script itself, on Gloo: its figures
mean nothing.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import functools
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
from torch.nn.parallel import DistributedDataParallel

import baguarun
from baguarun.comm import hooks
from baguarun.comm.algorithms import (
    ALGORITHMS,
    Algorithm,
    Decentralized,
    DiLoCo,
    LocalSGD,
    LowPrecisionDecentralized,
    PowerSGD,
    QAdam,
    QAdamOptimizer,
    Sparse,
    resolve,
)
from baguarun.comm.extension import load_extension
from baguarun.errors import UsageError
from benchmarks.gpu import BUCKET_CAP_MB, NCCL_ON_ONE_GPU, SHAPES, STEPS
from benchmarks.harness import REPOSITORY, Report, Row, finish, parser

_WIRES = ("F16", "BF16", "MINMAX8", "MINMAX4", "SIGN1", "TOPK", "RANDOMK")
_PLAIN = {"F16": torch.float16, "BF16": torch.bfloat16}
_NUMBERS = 64 << 20
_QUICK_NUMBERS = 4 << 20
_PARITY_NUMBERS = (1, 2047, 2048, 3_000_001)
_INPUTS = 4
_SUM = f"reduce {_INPUTS} and encode"
_WITH_FEEDBACK = ("MINMAX8", "SIGN1", "TOPK", "RANDOMK")
_REPEATS = 10
_SLEEP_CYCLES = 1_000_000
_PATIENCE_S = 60.0
_OF_ROOFLINE = 0.8
_NOT_REPEATABLE = ("async",)
# An optimizer's fused multiply-add on one device and none on the other.
_SAME = 1e-6
# Products of matrices, which libraries sum up in orders of their own.
_CLOSE = {"power_sgd": 1e-5}
_HOOKS = ("bytegrad", "onebit", "topk")


def seconds(device: str, run: Callable[[], object], repeats: int) -> float:
    """The median of `repeats` turns, each the mean of as many runs that wait for nothing between them."""
    for _ in range(3):
        run()
    return statistics.median(_turn(device, run, repeats) for _ in range(repeats))


def _turn(device: str, run: Callable[[], object], repeats: int) -> float:
    if device == "cpu":
        started = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - started) / repeats
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    # Until all runs are enqueued: how long Python takes for that is not asked.
    torch.cuda._sleep(_SLEEP_CYCLES)
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats


def kernels(device: str, count: int, repeats: int) -> list[Row]:
    """Bytes per second over a copy's; every number is read and written as seldom as possible."""
    codec = load_extension()
    values = torch.randn(count, device=device)
    target = torch.empty_like(values)
    copied = 2 * values.nbytes / seconds(device, lambda: target.copy_(values), repeats)
    rows = []
    for name in _WIRES:
        wire = getattr(codec.Wire, name)
        chunks = [codec.encode(values.roll(7 * turn), wire) for turn in range(_INPUTS)]
        coded = chunks[0].nbytes
        residual = torch.zeros_like(values)
        works: dict[str, tuple[int, Callable[[], object]]] = {
            "encode": (values.nbytes + coded, lambda w=wire: codec.encode(values, w)),
            "decode": (
                values.nbytes + coded,
                lambda w=wire, c=chunks: codec.decode(c[0], w, count, torch.float32),
            ),
            _SUM: _sum_coded_again(wire, chunks, count),
        }
        if name in _WITH_FEEDBACK:
            works["encode with residual"] = (
                3 * values.nbytes + coded,
                lambda w=wire, r=residual: codec.encode_with_residual(values, r, w),
            )
            works[f"encode the sum with {_INPUTS - 1} chunks with residual"] = (
                3 * values.nbytes + _INPUTS * coded,
                lambda w=wire, r=residual, c=chunks: codec.encode_with_residual(values, r, w, others=c[1:]),
            )
            works[f"reduce {_INPUTS} to fp32"] = (
                values.nbytes + _INPUTS * coded,
                lambda w=wire, c=chunks: codec.reduce_decode(c, w, 0.25, count, torch.float32),
            )
        for what, (moved, run) in works.items():
            rate = moved / seconds(device, run, repeats)
            rows.append(_bandwidth(f"{name} {what}", device, count, rate, copied))
        times = math.ceil(2 * values.nbytes / works[_SUM][0])
        if times > 1 and count >= _NUMBERS:
            # A launch takes some microseconds, in which a copy moves as much as few coded numbers are.
            many = times * count
            chunks = [codec.encode(torch.randn(many, device=device), wire) for _ in range(_INPUTS)]
            moved, run = _sum_coded_again(wire, chunks, many)
            rate = moved / seconds(device, run, repeats)
            rows.append(_bandwidth(f"{name} {_SUM}", device, many, rate, copied))
    return rows


def _sum_coded_again(wire: Any, chunks: list[torch.Tensor], count: int) -> tuple[int, Callable[[], object]]:
    """The bytes that it moves, and what does it."""
    moved = (len(chunks) + 1) * chunks[0].nbytes
    return moved, lambda: load_extension().reduce_encode(chunks, wire, 0.25, count)


def _bandwidth(what: str, device: str, count: int, rate: float, copied: float) -> Row:
    """`rate` in bytes per second over that of a copy."""
    return Row(
        what=f"{what}, {count >> 20} Mi numbers",
        peer=f"copy {copied / 1e9:.0f} GB/s",
        ours=f"{rate / 1e9:.0f} GB/s",
        value=rate / copied,
        target=_OF_ROOFLINE if device == "cuda" and count >= _NUMBERS else None,
        at_least=True,
        unit="x",
    )


def parity(device: str) -> list[Row]:
    """Bytes and bits that differ between the CPU and `device`; 0 is wanted.

    But for the NaN that a sum is: codec.h leaves its sign and payload open.
    """
    codec = load_extension()
    rows = []
    for name in _WIRES:
        wire = getattr(codec.Wire, name)
        differing = compared = 0
        for count in _PARITY_NUMBERS:
            values = torch.randn(count, generator=torch.Generator().manual_seed(count))
            values[::97] = 0.0
            if count > 5000:
                values[3000], values[5000], values[9000] = torch.nan, torch.inf, -torch.nan
            here, there = codec.encode(values, wire), codec.encode(values.to(device), wire)
            pairs = [(here, there)]
            pairs.append((
                codec.decode(here, wire, count, torch.float32).view(torch.int32),
                codec.decode(there, wire, count, torch.float32).view(torch.int32),
            ))  # fmt: skip
            pairs.append((
                _one_nan(name, codec.reduce_encode([here] * _INPUTS, wire, 0.25, count)),
                _one_nan(name, codec.reduce_encode([there] * _INPUTS, wire, 0.25, count)),
            ))  # fmt: skip
            if name in _WITH_FEEDBACK:
                left = torch.zeros(count), torch.zeros(count, device=device)
                pairs.append((
                    codec.encode_with_residual(values, left[0], wire),
                    codec.encode_with_residual(values.to(device), left[1], wire),
                ))  # fmt: skip
                pairs.append((left[0].view(torch.int32), left[1].view(torch.int32)))
                others = [here] * (_INPUTS - 1), [there] * (_INPUTS - 1)
                pairs.append((
                    codec.encode_with_residual(values, left[0], wire, others=others[0]),
                    codec.encode_with_residual(values.to(device), left[1], wire, others=others[1]),
                ))  # fmt: skip
                pairs.append((left[0].view(torch.int32), left[1].view(torch.int32)))
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


def _one_nan(wire: str, chunk: torch.Tensor) -> torch.Tensor:
    """The bytes, with the same ones for each NaN where numbers travel as they are."""
    if wire not in _PLAIN:
        return chunk
    numbers = chunk.view(_PLAIN[wire])
    return torch.where(numbers.isnan(), torch.nan, numbers).view(torch.uint8)


class _Chosen(nn.Module):
    """Its gradients are what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.ones(shape) for shape in SHAPES])

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        pairs = zip(self.weights, gradients, strict=True)
        return torch.stack([(weight * gradient).sum() for weight, gradient in pairs]).sum()


def _runs() -> dict[str, Algorithm]:
    """By name; with settings for a run of three steps, in which all exchange something."""
    chosen: dict[str, Algorithm] = {name: resolve(name) for name in ALGORITHMS}
    return chosen | {
        "sparse": Sparse(warmup_steps=0),
        "local_sgd": LocalSGD(local_steps=2),
        "diloco": DiLoCo(local_steps=2),
        "diloco, int8": DiLoCo(local_steps=2, wire="int8"),
        "power_sgd": PowerSGD(rank=2, start_step=1),
        "qadam, 1 bit": QAdam(bits=1),
        "decentralized, shift_one": Decentralized(peer_selection_mode="shift_one"),
        "low_precision_decentralized": LowPrecisionDecentralized(check_interval=2),
        "low_precision_decentralized, 4 bits": LowPrecisionDecentralized(bits=4, check_interval=2),
    }


def weights_after_steps(algorithm: Algorithm, device: str) -> list[torch.Tensor] | str:
    """On the CPU; or what the algorithm said in refusing."""
    module = _Chosen().to(device)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), lr=0.125)
    if isinstance(algorithm, QAdam):
        optimizer = QAdamOptimizer(module.parameters(), lr=0.125, warmup_steps=1)
    try:
        model = baguarun.DistributedDataParallel(
            module, optimizers=[optimizer], algorithm=algorithm, bucket_cap_mb=BUCKET_CAP_MB
        )
    except UsageError as error:
        return str(error)
    _train(model, optimizer, device)
    model.algorithm_state_dict()  # waits for what is under way
    return _weights(module)


def weights_after_steps_of_ddp(hook: str, device: str) -> list[torch.Tensor]:
    """Likewise of torch's DDP with a hook of ours."""
    module = _Chosen().to(device)
    model = DistributedDataParallel(module, bucket_cap_mb=BUCKET_CAP_MB)
    model.register_comm_hook(hooks.CodecState(), getattr(hooks, hook))
    _train(model, torch.optim.SGD(module.parameters(), lr=0.125), device)
    return _weights(module)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> None:
    generator = torch.Generator().manual_seed(17 + dist.get_rank())
    for _ in range(STEPS):
        gradients = [_exact(torch.randn(shape, generator=generator)).to(device) for shape in SHAPES]
        optimizer.zero_grad()
        model(gradients).backward()
        optimizer.step()


def _weights(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().cpu().clone() for parameter in module.parameters()]


def _runs_on_rings() -> dict[str, Algorithm]:
    """Those that with three ranks have another partner in each step, or two."""
    chosen = ("decentralized, ", "low_precision")
    return {name: algorithm for name, algorithm in _runs().items() if name.startswith(chosen)}


def _runs_by_rail() -> dict[str, Algorithm]:
    """Those that can exchange by rail, told to."""
    return {
        name: dataclasses.replace(algorithm, hierarchical=True)  # type: ignore[call-arg]
        for name, algorithm in _runs().items()
        if hasattr(algorithm, "hierarchical")
    }


def work(device: str, folder: Path) -> None:
    """One rank."""
    if device == "cuda":
        torch.cuda.set_device(0)
    baguarun.init_process_group(backend="nccl" if device == "cuda" else "gloo")
    if os.environ["LOCAL_WORLD_SIZE"] != "1":
        runs = _runs_by_rail()
    else:
        runs = _runs() if dist.get_world_size() == 2 else _runs_on_rings()
    trainings: dict[str, Callable[[], Any]] = {
        name: functools.partial(weights_after_steps, algorithm, device) for name, algorithm in runs.items()
    }
    if len(trainings) == len(_runs()):
        trainings |= {
            f"hook {hook} of torch's DDP": functools.partial(weights_after_steps_of_ddp, hook, device)
            for hook in _HOOKS
        }
    found = {}
    for name, train in trainings.items():
        started = time.perf_counter()
        # One that waits for ever says where.
        faulthandler.dump_traceback_later(_PATIENCE_S, exit=True)
        found[name] = train()
        if dist.get_rank() == 0:
            seconds_taken = time.perf_counter() - started
            print(
                f"{dist.get_world_size()} ranks on {device}, {name}: {seconds_taken:.1f} s", file=sys.stderr
            )
    faulthandler.cancel_dump_traceback_later()
    torch.save(found, folder / f"{device}-{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(device: str, folder: Path, num_nodes: int, ranks_per_node: int) -> list[dict[str, Any]]:
    """What each rank found."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = range(num_nodes * ranks_per_node)
    threads = max(1, (os.cpu_count() or 1) // len(ranks))
    processes = []
    for rank in ranks:
        env = os.environ | NCCL_ON_ONE_GPU | {"NCCL_HOSTID": f"baguarun-rank{rank}"}
        env |= {"RANK": str(rank), "WORLD_SIZE": str(len(ranks)), "OMP_NUM_THREADS": str(threads)}
        env |= {"LOCAL_RANK": str(rank % ranks_per_node), "LOCAL_WORLD_SIZE": str(ranks_per_node)}
        env |= {"GROUP_RANK": str(rank // ranks_per_node), "GROUP_WORLD_SIZE": str(num_nodes)}
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
    return [torch.load(folder / f"{device}-{rank}.pt") for rank in ranks]


def steps(device: str, num_nodes: int, ranks_per_node: int) -> list[Row]:
    """Largest difference between weights on `device` and on the CPU, by algorithm."""
    with tempfile.TemporaryDirectory() as folder:
        here, there = (run_ranks(each, Path(folder), num_nodes, ranks_per_node) for each in ("cpu", device))
    way = f"{num_nodes} ranks" if ranks_per_node == 1 else "by rail"
    return [
        _step_row(
            f"{name}, {way}",
            device,
            [rank[name] for rank in here],
            [rank[name] for rank in there],
        )
        for name in here[0]
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
            gap = max(gap, *(_gap(a, b) for a, b in zip(one, other, strict=True)))
    is_compared = not name.startswith(_NOT_REPEATABLE)
    return Row(
        what=f"{name}: {STEPS} steps, largest difference of a weight",
        peer="Gloo on the CPU",
        ours=f"refused: {refusal}" if refusal else f"{gap:.1e}",
        value=math.inf if refusal else gap,
        target=_CLOSE.get(name.partition(",")[0], _SAME) if is_compared or refusal else None,
    )


def _exact(numbers: torch.Tensor) -> torch.Tensor:
    """Multiples of 2^-8, whose sums are the same in any order: NCCL's is not Gloo's."""
    return numbers.mul(256).round().div(256)


def _gap(one: torch.Tensor, other: torch.Tensor) -> float:
    """Of what is larger than 1, as a share of it: QAdam's steps are large where a gradient was small."""
    gap = float(((one - other).abs() / one.abs().clamp(min=1)).max())
    return math.inf if math.isnan(gap) else gap


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
    report.rows += kernels(args.device, *((_QUICK_NUMBERS, 1) if args.quick else (_NUMBERS, _REPEATS)))
    if not args.kernels_only:
        # Two, three on a ring with two neighbours each, and two nodes of two.
        for num_nodes, ranks_per_node in ((2, 1), (3, 1), (2, 2)):
            report.rows += steps(args.device, num_nodes, ranks_per_node)
    if args.sanitize:
        report.rows += sanitize(args.device)
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(main())
