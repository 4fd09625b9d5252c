"""NCCL over the network plugin and over its own sockets: two ranks on one GPU, started by `baguarun run`.

    python -m benchmarks.gpu_net [--out docs/results/gpu_net.json]

For both networks: all-reduces of 1 B to 256 MiB compared byte by byte, then the times, then the communicator
made anew 50 times (NCCL 2.28 and 2.29 unload plugins with the last one). NCCL's own log must show the plugin
in use in the one run and not in the other.

Two ranks share a GPU when each has its own NCCL_HOSTID; all traffic then goes through the network. They take
turns on the GPU, so the times of small messages are those of its scheduler. `--device cpu` tries the script
itself on Gloo, up to 4 MiB.
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
KIB, MIB = 1 << 10, 1 << 20
SIZES = [1, 2, 3, 4, 100, KIB, 64 * KIB - 1, 64 * KIB, MIB, MIB + 1, 3 * MIB - 1]
SIZES += [count * MIB for count in (4, 16, 64, 256)]
TIMED = [4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB]
REPETITIONS = 20
RE_CREATIONS = 50
IN_USE = "NET/BaguaNet : using"
BASE = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_DEBUG": "INFO",
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("docs/results/gpu_net.json"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--worker", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.device, args.worker)
        return 0

    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here: nothing was checked", file=sys.stderr)
        return 1
    results = {network: run_job(network, args.device) for network in ("plugin", "sockets")}
    print(f"{'bytes':>12} {'plugin ms':>10} {'sockets ms':>10}")
    for size, plugin in results["plugin"]["median_ms"].items():
        print(f"{size:>12} {plugin:10.3f} {results['sockets']['median_ms'][size]:10.3f}")
    if args.device == "cuda":
        args.out.parent.mkdir(parents=True, exist_ok=True)
        report = {
            "device": torch.cuda.get_device_name(0),
            "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            **results,
        }
        args.out.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def run_job(network: str, device: str) -> dict[str, Any]:
    """One job of two ranks; ends this program when it fails or did not use the network that was asked for."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = ["--bagua-net"] if network == "plugin" else []
        env = {**os.environ, **BASE, "NCCL_DEBUG_FILE": str(folder / "nccl-%p.log")}
        if network == "sockets":
            env |= {"NCCL_NET": "Socket", "NCCL_NET_PLUGIN": "none"}
        done = subprocess.run(
            [sys.executable, "-m", "baguarun", "run", "--nproc-per-node", str(RANKS)]
            + ["--master-port", str(port), *flags, __file__, "--device", device, "--worker", name],
            env=env,
        )
        logs = [file.read_text(errors="replace") for file in folder.glob("nccl-*.log")]
        if done.returncode != 0:
            raise SystemExit(f"{network}: the job ended with {done.returncode}\n{''.join(logs)[-4000:]}")
        if device == "cuda":
            # One line per communicator that was made.
            counts = [log.count(IN_USE) for log in logs]
            wanted = RE_CREATIONS if network == "plugin" else 0
            if len(counts) != RANKS or min(counts) < wanted or (wanted == 0 and max(counts) > 0):
                raise SystemExit(f"{network}: want {wanted} lines {IN_USE!r} in each log, found {counts}")
        result: dict[str, Any] = json.loads((folder / "times.json").read_text())
        return result


def work(device: str, folder: Path) -> None:
    rank = int(os.environ["RANK"])
    # Before torch loads NCCL: the two ranks are to take each other for different hosts.
    os.environ["NCCL_HOSTID"] = f"baguarun-rank{rank}"
    import torch
    import torch.distributed as dist

    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), RANKS, is_master=rank == 0
    )
    if device == "cuda":
        torch.cuda.set_device(0)

    def begin(life: int) -> None:
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(
            backend, store=dist.PrefixStore(f"life{life}", store), rank=rank, world_size=RANKS
        )

    most = max(SIZES) if device == "cuda" else 4 * MIB
    sizes = [size for size in SIZES if size <= most]
    begin(0)
    for size in sizes:
        check(size, device, rank)
    times = {str(size): median_ms(size, device) for size in TIMED if size <= most}
    dist.destroy_process_group()
    for life in range(1, RE_CREATIONS + 1):
        begin(life)
        check(MIB + life, device, rank)
        dist.destroy_process_group()
    if rank == 0:
        results = {"median_ms": times, "sizes_checked": sizes, "communicators_made": RE_CREATIONS + 1}
        (folder / "times.json").write_text(json.dumps(results))
        # It serves the store until the other has no more use for it.
        store.wait(["done"])
    else:
        store.set("done", "")


def check(size: int, device: str, rank: int) -> None:
    """One all-reduce of `size` bytes, modulo 256, against its sum."""
    import torch
    import torch.distributed as dist

    def share(of: int) -> Any:
        return (torch.arange(size, device=device) * 7 + 13 * of + size).to(torch.uint8)

    mine = share(rank)
    dist.all_reduce(mine)
    expected = sum((share(of) for of in range(RANKS)), start=torch.zeros_like(mine))
    if not torch.equal(mine, expected):
        raise SystemExit(f"rank {rank}: {int((mine != expected).sum())} of {size} bytes are wrong")


def median_ms(size: int, device: str) -> float:
    import torch
    import torch.distributed as dist

    def settle() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    data = torch.zeros(size // 4, dtype=torch.float32, device=device)
    times = []
    for _ in range(REPETITIONS + 3):
        dist.barrier()
        settle()
        start = time.perf_counter()
        dist.all_reduce(data)
        settle()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[3:])


if __name__ == "__main__":
    sys.exit(main())
