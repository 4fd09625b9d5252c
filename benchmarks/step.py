"""Step time against torch DDP on Gloo, 4 ranks: on loopback, on 4 unlimited hosts and on 4 rated ones.

baguarun's algorithms run on its own transport and, where `@gloo` stands behind the name, on Gloo.

The rated networks are labs (network namespaces, `tests/lab`): they need root.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import baton
from benchmarks.harness import REPOSITORY, Report, Row, finish, parser
from benchmarks.ratios import Summary, paired_ratio
from tests.lab import Lab

RANKS = 4
_PORT = 29500
# The C library's greatest, and more than what the contestants need.
_ON_HEAP_BYTES, _KEPT_BYTES = 32 << 20, 4 << 30
# Against ranks that hang. All algorithms take turns for an hour where two wires are slow.
_CAP_S = 7200.0


@dataclass(frozen=True)
class Network:
    """Where the ranks live."""

    name: str
    rate_mbit: float | None = None
    lab: bool = True
    hosts: int = RANKS
    delay_ms: float | None = None
    """One way, between a host and the switch."""


@dataclass(frozen=True)
class Contest:
    """One network, one model and who takes part; `ddp` is always the yardstick."""

    network: Network
    model: str
    cases: tuple[str, ...]


@dataclass(frozen=True)
class Turns:
    """How the contestants take turns."""

    rounds: int
    """Pairs against DDP."""
    block_s: float
    """Length of a turn."""
    pin: bool
    """Keep each rank on one CPU."""
    congestion_control: str
    """TCP of the lab's hosts."""
    lead_s: float = 0.0
    """How long each trains before its turn begins: one step at least."""
    keeps_windows: bool = False
    """Whether the lab's hosts leave connections that were idle their windows."""


LOOPBACK = Network("loopback", lab=False, hosts=1)
HOSTS = Network("4 hosts, unlimited")
GIGABIT = Network("4 hosts, 1 Gbit/s", 1000)
FAST_ETHERNET = Network("4 hosts, 100 Mbit/s", 100)
NETWORKS = {"loopback": LOOPBACK, "hosts": HOSTS, "1000": GIGABIT, "100": FAST_ETHERNET}

_ALL = ("ddp", "ddp_fp16", "gradient_allreduce", "gradient_allreduce@gloo", "bytegrad", "bytegrad@gloo")
CONTESTS = (
    Contest(LOOPBACK, "mlp", _ALL),
    Contest(LOOPBACK, "small", _ALL),
    Contest(HOSTS, "mlp", _ALL),
    Contest(HOSTS, "small", _ALL),
    Contest(GIGABIT, "mlp", _ALL),
    Contest(GIGABIT, "small", _ALL),
    Contest(FAST_ETHERNET, "mlp", _ALL),
)


def target(contest: Contest, case: str) -> tuple[float, str] | None:
    """The bound for `case` and what it bounds: the ratio's `upper95` or the `speedup`; None: not judged."""
    rate = contest.network.rate_mbit
    case = case.removesuffix("@gloo")
    if case == "gradient_allreduce" and rate != 100:
        return (0.95 if rate is None else 1.00, "upper95")
    if case == "bytegrad" and contest.model == "mlp" and rate is not None:
        return (3.5 if rate == 100 else 2.0, "speedup")
    return None


def rows(contest: Contest, blocks: list[dict[str, Any]]) -> list[Row]:
    """The table's lines for one contest, from the blocks its ranks measured."""
    step_s: dict[str, list[float]] = {case: [] for case in contest.cases}
    moved: dict[str, list[float]] = {case: [] for case in contest.cases}
    for block in sorted(blocks, key=lambda block: block["round"]):
        step_s[block["case"]].append(block["step_s"])
        moved[block["case"]].append(block["sent_bytes_per_step"])
    result = []
    for case in contest.cases:
        if case == "ddp":
            continue
        ratio = paired_ratio(step_s[case], step_s["ddp"])
        bound, kind = target(contest, case) or (None, "upper95")
        result.append(
            Row(
                what=f"{contest.network.name}, {contest.model}: {case} "
                f"({kind}; median ratio {ratio.median:.3f}, 95 % under {ratio.upper95:.3f})",
                peer=_figures(step_s["ddp"], moved["ddp"]),
                ours=_figures(step_s[case], moved[case]),
                value=1 / ratio.median if kind == "speedup" else ratio.upper95,
                target=bound,
                at_least=kind == "speedup",
                unit="x",
            )
        )
    return result


def _figures(step_s: list[float], moved: list[float]) -> str:
    time_ms = Summary.of([value * 1e3 for value in step_s])
    sent_mb = Summary.of(moved).median / 1e6
    return f"{time_ms.median:.1f} ms ({time_ms.low:.1f}-{time_ms.high:.1f}), {sent_mb:.2f} MB"


def run_contests(contests: Sequence[Contest], turns: Turns) -> list[list[dict[str, Any]]]:
    """Start the ranks of all contests, wait for them and return rank 0's blocks of each.

    The same contestant's turns on several networks come one after the other. Raises when a rank fails.
    """
    with baton.ring(len(contests)) as places:
        jobs = []
        for contest, pipes in zip(contests, places, strict=True):
            words = [
                *("benchmarks.step_worker", "--cases", ",".join(contest.cases), "--model", contest.model),
                *("--rounds", str(turns.rounds), "--block-s", str(turns.block_s)),
                *("--lead-s", str(turns.lead_s)),
                *("--baton", *map(str, pipes)),
            ]
            jobs.append((contest.network, words))
        return _run_jobs(
            jobs,
            pin=turns.pin,
            congestion_control=turns.congestion_control,
            keeps_windows=turns.keeps_windows,
        )


def run_ranks(
    network: Network, words: list[str], *, on_heap_bytes: int = _ON_HEAP_BYTES
) -> list[dict[str, Any]]:
    """Start one `python -m words... --out FILE` per rank, wait, and return what rank 0 wrote.

    Each rank stays on one CPU. Blocks of `on_heap_bytes` go back to the kernel when they are freed.
    Raises RuntimeError when a rank fails.
    """
    (written,) = _run_jobs([(network, words)], on_heap_bytes=on_heap_bytes)
    return written


def _run_jobs(
    jobs: Sequence[tuple[Network, list[str]]],
    *,
    pin: bool = True,
    congestion_control: str = "reno",
    keeps_windows: bool = False,
    on_heap_bytes: int = _ON_HEAP_BYTES,
) -> list[list[dict[str, Any]]]:
    """Likewise for several jobs at once, each on its network; `pin` keeps each rank on one CPU."""
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        processes, outs = [], []
        for number, (network, words) in enumerate(jobs):
            address, starters = stack.enter_context(_placed(network, congestion_control, keeps_windows))
            outs.append(scratch / f"{number}.json")
            for rank, start in enumerate(starters):
                cpus = sorted(os.sched_getaffinity(0))
                pinned = ["taskset", "-c", str(cpus[rank % len(cpus)])] if pin else []
                argv = [*pinned, sys.executable, "-m", *words, "--out", str(outs[-1])]
                environment = _environment(rank, address, network, on_heap_bytes)
                processes.append(start(argv, env=environment, cwd=REPOSITORY))
        _wait(processes)
        return [json.loads(out.read_text()) for out in outs]


@contextlib.contextmanager
def _placed(
    network: Network, congestion_control: str, keeps_windows: bool
) -> Iterator[tuple[str, list[Any]]]:
    """Rank 0's address and one function per rank that starts a process in its place."""
    if not network.lab:
        yield "127.0.0.1", [subprocess.Popen] * RANKS
        return
    per_host = RANKS // network.hosts
    with Lab(
        network.hosts,
        network.rate_mbit,
        network.delay_ms,
        congestion_control=congestion_control,
        keeps_windows=keeps_windows,
        in_order=per_host > 1,
    ) as lab:
        yield lab.hosts[0].address, [lab.hosts[rank // per_host].popen for rank in range(RANKS)]


def _environment(rank: int, address: str, network: Network, on_heap_bytes: int) -> dict[str, str]:
    per_host = RANKS // network.hosts
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_RANK": str(rank % per_host),
        "LOCAL_WORLD_SIZE": str(per_host),
        "GROUP_RANK": str(rank // per_host),
        "GROUP_WORLD_SIZE": str(network.hosts),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(_PORT),
        "OMP_NUM_THREADS": "1",
        # Contestants take turns in one process. Otherwise it is chance whether the allocator gives a step's
        # gradients back to the kernel, and the turns of some take a third longer than those of others.
        "MALLOC_MMAP_THRESHOLD_": str(on_heap_bytes),
        "MALLOC_TRIM_THRESHOLD_": str(_KEPT_BYTES),
        "GLOO_SOCKET_IFNAME": "eth0" if network.lab else "lo",
    }


def _wait(processes: list[subprocess.Popen[Any]]) -> None:
    """Until all ranks are done; one that fails takes the others with it."""
    deadline = time.monotonic() + _CAP_S
    try:
        while any(process.poll() is None for process in processes):
            failed = [p.returncode for p in processes if p.returncode not in (None, 0)]
            if failed or time.monotonic() > deadline:
                raise RuntimeError(f"ranks ended with {failed} (cap {_CAP_S:.0f} s)")
            time.sleep(0.2)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    failed = [p.returncode for p in processes if p.returncode != 0]
    if failed:
        raise RuntimeError(f"ranks ended with {failed}")


def main(argv: list[str] | None = None) -> int:
    options = parser("step", __doc__ or "")
    options.add_argument("--networks", default=",".join(NETWORKS), help=f"of {', '.join(NETWORKS)}")
    options.add_argument("--models", default="mlp,small")
    options.add_argument("--cases", default=",".join(_ALL), help="contestants besides ddp")
    options.add_argument("--rounds", type=int, default=None, help="pairs per contest (default 10, quick 2)")
    options.add_argument(
        "--block-s", type=float, default=None, help="length of a turn (default 1.0, quick 0.2)"
    )
    options.add_argument("--no-pin", action="store_true", help="do not pin ranks to CPUs")
    options.add_argument("--congestion-control", default="reno", help="TCP of the lab's hosts (default reno)")
    args = options.parse_args(argv)
    turns = Turns(
        rounds=args.rounds or (2 if args.quick else 10),
        block_s=args.block_s or (0.2 if args.quick else 1.0),
        pin=not args.no_pin,
        congestion_control=args.congestion_control,
    )
    wanted = [NETWORKS[name] for name in args.networks.split(",")]
    chosen = {"ddp", *args.cases.split(",")}
    report = Report(
        name="step", title=f"seconds per step, {RANKS} ranks, against torch DDP on Gloo", quick=args.quick
    )
    report.facts["ranks_pinned"] = turns.pin
    report.facts["tcp_congestion_control_of_hosts"] = turns.congestion_control
    for contest in CONTESTS:
        if contest.network not in wanted or contest.model not in args.models.split(","):
            continue
        entered = Contest(contest.network, contest.model, tuple(c for c in contest.cases if c in chosen))
        (blocks,) = run_contests([entered], turns)
        report.raw[f"{contest.network.name}, {contest.model}"] = blocks
        for row in rows(entered, blocks):
            report.rows.append(row)
            print(f"{row.what}: {row.value:.3f}", flush=True)
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(main())
