"""Time to form a World of N simulated agents through one etcd, and to re-form it after one leaves.

Each agent is a production `Session` with its own connection, lease and watch; they share four processes. The
peer is torchrun's c10d rendezvous, also in four processes, with a thread and a TCPStore client per agent.
Start-up of the interpreters is left out on both sides; connecting is part of the time.
"""

from __future__ import annotations

import multiprocessing
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import rendezvous_agents, rendezvous_peer
from benchmarks.harness import Report, Row, finish, parser
from tests.support.etcd_servers import EtcdServer, free_port, running

PROCESSES = 4
SIZES = (32, 64, 128, 256, 1024)
PEER_SIZES = (32, 64, 128)
TARGETS_S = {256: (0.5, 0.2), 1024: (1.8, 0.5)}
"""Agents to (form, re-form), on a quiet machine."""


@dataclass(frozen=True)
class Cost:
    """What etcd says that it served."""

    calls: int
    """Unary calls, keepalives aside: gets, puts, transactions, leases, version checks."""
    bytes_sent: int
    """By etcd, to all clients."""
    bytes_received: int

    @classmethod
    def between(cls, before: dict[str, float], after: dict[str, float]) -> Cost:
        def grown(*words: str) -> int:
            names = [name for name in after if all(word in name for word in words)]
            return int(sum(after[name] - before.get(name, 0.0) for name in names))

        return cls(
            calls=grown("grpc_server_started_total", 'grpc_type="unary"'),
            bytes_sent=grown("etcd_network_client_grpc_sent_bytes_total"),
            bytes_received=grown("etcd_network_client_grpc_received_bytes_total"),
        )


@dataclass(frozen=True)
class Run:
    """One forming and re-forming."""

    form_s: float
    reform_s: float
    form: Cost
    reform: Cost
    client_cpu_s: tuple[float, float]
    """Of all agents together, while forming and re-forming."""


@contextmanager
def crowds(target: Callable[..., None], crowds: list[Any]) -> Iterator[list[Connection]]:
    """A process for each; ready and waiting when the pipes are handed out."""
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        pipes = []
        for crowd in crowds:
            ours, theirs = context.Pipe()
            process = context.Process(target=target, args=(theirs, crowd), daemon=True)
            process.start()
            stack.callback(process.join, 10)
            stack.callback(process.kill)
            pipes.append(ours)
        for pipe in pipes:
            assert pipe.recv() == "ready"
        yield pipes


def dealt(num_agents: int) -> list[range]:
    """Agents' numbers by process."""
    size = -(-num_agents // PROCESSES)
    return [range(start, min(start + size, num_agents)) for start in range(0, num_agents, size)]


def run_ours(num_agents: int, binary: Path) -> Run:
    """Form and re-form once, on an etcd of its own."""
    with tempfile.TemporaryDirectory() as folder:
        server = EtcdServer(Path(folder), binary, heartbeat_ms=100, election_ms=1000)
        with running(server):
            job = partial(rendezvous_agents.Crowd, server.url, "bench", num_agents)
            with crowds(rendezvous_agents.live, [job(numbers) for numbers in dealt(num_agents)]) as pipes:
                return _form_and_reform(pipes, server, leaver=num_agents // 2)


def _form_and_reform(pipes: list[Connection], server: EtcdServer, leaver: int) -> Run:
    def all_do(message: object) -> list[rendezvous_agents.Phase]:
        for pipe in pipes:
            pipe.send(message)
        return [pipe.recv() for pipe in pipes]

    before = server.metrics()
    started = time.monotonic()
    formed = all_do("go")
    between = server.metrics()
    reformed = all_do(leaver)
    after = server.metrics()
    for pipe in pipes:
        pipe.send("end")
    left_at = next(phase.left_at for phase in reformed if phase.left_at is not None)
    return Run(
        form_s=max(phase.last_start for phase in formed) - started,
        reform_s=max(phase.last_start for phase in reformed) - left_at,
        form=Cost.between(before, between),
        reform=Cost.between(between, after),
        client_cpu_s=(sum(p.cpu_s for p in formed), sum(p.cpu_s for p in reformed)),
    )


def run_peer(num_agents: int) -> float:
    """Seconds in which torchrun's rendezvous forms once; infinity if it fails."""
    job = partial(rendezvous_peer.PeerCrowd, free_port(), "bench", num_agents)
    with crowds(rendezvous_peer.live, [job(numbers) for numbers in dealt(num_agents)]) as pipes:
        started = time.monotonic()
        for pipe in pipes:
            pipe.send("go")
        phases: list[rendezvous_peer.PeerPhase] = [pipe.recv() for pipe in pipes]
        for pipe in pipes:
            pipe.send("end")
    for phase in phases:
        if phase.error:
            print(f"peer, {num_agents} agents: {phase.error}", file=sys.stderr)
            return float("inf")
    return max(phase.last_start for phase in phases) - started


def rows_of(num_agents: int, runs: list[Run], peer_s: list[float]) -> list[Row]:
    """Two lines of the table: form and re-form."""
    form_s, reform_s = median(run.form_s for run in runs), median(run.reform_s for run in runs)
    form_target, reform_target = TARGETS_S.get(num_agents, (None, None))
    last = runs[-1]
    return [
        Row(
            what=f"{num_agents} agents form",
            peer=f"{median(peer_s):.1f} s" if peer_s else "-",
            ours=f"{form_s:.2f} s, {last.form.calls} calls, {last.form.bytes_sent / 1e3:.0f} kB sent",
            value=form_s,
            target=form_target,
            unit=" s",
        ),
        Row(
            what=f"{num_agents} agents re-form",
            peer="-",
            ours=f"{reform_s:.2f} s, {last.reform.calls} calls, {last.reform.bytes_sent / 1e3:.0f} kB sent",
            value=reform_s,
            target=reform_target,
            unit=" s",
        ),
    ]


def main(argv: list[str] | None = None) -> int:
    options = parser("rendezvous", __doc__ or "").parse_args(argv)
    binary = Path(shutil.which("etcd") or sys.exit("no etcd on PATH: apt-get install etcd-server"))
    sizes, peer_sizes, repeats = (SIZES, PEER_SIZES, 3)
    if options.quick:
        sizes, peer_sizes, repeats = (32, 64), (32,), 1
    report = Report(
        name="rendezvous", title="agents form a World through one etcd, and re-form it", quick=options.quick
    )
    raw: dict[str, Any] = {"etcd": str(binary), "ours": {}, "torchrun_form_s": {}}
    for num_agents in sizes:
        runs, peer_s = [], []
        for _ in range(repeats):
            if num_agents in peer_sizes:
                peer_s.append(run_peer(num_agents))
            runs.append(run_ours(num_agents, binary))
        raw["ours"][num_agents] = [asdict(run) for run in runs]
        raw["torchrun_form_s"][num_agents] = peer_s
        report.rows += rows_of(num_agents, runs, peer_s)
    report.raw = raw
    return finish(report, options)


if __name__ == "__main__":
    sys.exit(main())
