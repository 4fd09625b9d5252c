"""The engine on CUDA: two NCCL ranks on one GPU must reach what two Gloo ranks reach on the CPU, bit for bit.

    python benchmarks/gpu.py [--out docs/results/gpu.json]

Needs a GPU and the extension built with CUDA (`python setup.py build_ext --inplace`). Two ranks share one GPU
when each has its own NCCL_HOSTID. The gradients are chosen, not computed by kernels that differ between
devices: the loss is the inner product of every parameter with a random tensor, which thus is the gradient.

Then times a training step against torch's DDP. Two processes that share a GPU take turns, so those times
compare the engines with each other and say nothing about a real cluster.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RANKS = 2
ALGORITHMS = ("gradient_allreduce", "bytegrad")
# The same buckets in both cases, and so the same blocks of the codecs: by itself a CPU cuts others.
BUCKET_CAP_MB = 1
SHAPES = ((1024, 1024), (1000,), (3, 5, 7), (2048,), (513, 129), (1,), (300_000,))
STEPS = 3
TIMED_STEPS = 30
NCCL_ON_ONE_GPU = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_SOCKET_IFNAME": "lo",
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("docs/results/gpu.json"))
    parser.add_argument("--worker", nargs=2, metavar=("DEVICE", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker[0], Path(args.worker[1]))
        return 0

    import torch

    if not torch.cuda.is_available():
        print("no GPU here: nothing was checked", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        for device in ("cpu", "cuda"):
            run_ranks(device, folder)
        rows = compare(Path(folder))
        times = json.loads((Path(folder) / "times.json").read_text())
    report = {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "parity": rows,
        "step_ms": times,
    }
    for row in rows:
        name = f"{row['algorithm']} {row['dtype']}"
        print(f"{name:<28} {row['differing']} of {row['elements']} elements differ")
    for name, step_ms in times.items():
        print(f"{name:<20} {step_ms:8.2f} ms per step (median, two ranks taking turns on one GPU)")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if any(row["differing"] for row in rows) else 0


def run_ranks(device: str, folder: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(RANKS):
        env = (
            os.environ | NCCL_ON_ONE_GPU | {"NCCL_HOSTID": f"baguarun-rank{rank}", "PYTHONPATH": os.getcwd()}
        )
        env |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": "1"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        processes.append(subprocess.Popen([sys.executable, __file__, "--worker", device, folder], env=env))
    codes = [process.wait(timeout=300) for process in processes]
    if any(codes):
        raise SystemExit(f"{device} ranks exited with {codes}")


def work(device: str, folder: Path) -> None:
    import torch

    import baguarun

    if device == "cuda":
        torch.cuda.set_device(0)
    baguarun.init_process_group(backend="nccl" if device == "cuda" else "gloo")
    rank = int(os.environ["RANK"])
    for algorithm in ALGORITHMS:
        for dtype in (torch.float32, torch.bfloat16):
            gradients = averaged(torch.device(device), algorithm, dtype, rank)
            name = f"{device}-{algorithm}-{str(dtype).removeprefix('torch.')}-{rank}.pt"
            torch.save(gradients, folder / name)
    if device == "cuda":
        times = {name: step_ms(name) for name in ("ddp", *ALGORITHMS)}
        if rank == 0:
            (folder / "times.json").write_text(json.dumps(times))
    torch.distributed.destroy_process_group()


def averaged(device: Any, algorithm: str, dtype: Any, rank: int) -> list[Any]:
    """Gradients of every step after the exchange, on the CPU."""
    import torch

    import baguarun

    class Chosen(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = torch.nn.ParameterList([torch.zeros(shape, dtype=dtype) for shape in SHAPES])

        def forward(self, targets: list[torch.Tensor]) -> torch.Tensor:
            return torch.stack(
                [(w * t).sum().float() for w, t in zip(self.weights, targets, strict=True)]
            ).sum()

    model = baguarun.DistributedDataParallel(
        Chosen().to(device), algorithm=algorithm, bucket_cap_mb=BUCKET_CAP_MB
    )
    generator = torch.Generator().manual_seed(17 + rank)
    seen = []
    for _ in range(STEPS):
        targets = [torch.randn(shape, generator=generator).to(dtype).to(device) for shape in SHAPES]
        model.zero_grad(set_to_none=True)
        model(targets).backward()
        seen.append([p.grad.detach().cpu().clone() for p in model.parameters()])
    return seen


def step_ms(name: str) -> float:
    import torch

    import baguarun

    torch.manual_seed(0)
    layers = [m for _ in range(8) for m in (torch.nn.Linear(1024, 1024), torch.nn.ReLU())]
    net = torch.nn.Sequential(*layers).cuda()
    model: Any
    if name == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(net, device_ids=[0], gradient_as_bucket_view=True)
    else:
        model = baguarun.DistributedDataParallel(net, algorithm=name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(64, 1024, device="cuda")
    times = []
    for _ in range(TIMED_STEPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        optimizer.step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[5:])


def compare(folder: Path) -> list[dict[str, Any]]:
    import torch

    rows = []
    for algorithm in ALGORITHMS:
        for dtype in ("float32", "bfloat16"):
            pairs = []
            for rank in range(RANKS):
                cpu, cuda = (
                    torch.load(folder / f"{device}-{algorithm}-{dtype}-{rank}.pt")
                    for device in ("cpu", "cuda")
                )
                for on_cpu, on_cuda in zip(cpu, cuda, strict=True):
                    pairs += zip(on_cpu, on_cuda, strict=True)
            rows.append({
                "algorithm": algorithm,
                "dtype": dtype,
                "elements": sum(a.numel() for a, _ in pairs),
                "differing": sum(int((a != b).sum()) for a, b in pairs),
            })  # fmt: skip
    return rows


if __name__ == "__main__":
    sys.exit(main())
