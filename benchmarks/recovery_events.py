"""What may happen to a running job in the lab, and what is to be seen of the job afterwards."""

from __future__ import annotations

import itertools
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from tests.lab import Host, Lab
from tests.lab.job import ETCD_PORT, REPOSITORY, Etcd, Job, baguarun_command, torchrun_command
from tests.lab.steps import ELASTIC_WORKER, Step

CAP_S = 90.0
SAMPLES = 1600
"""In an epoch."""
NEVER = float("inf")
_TORCHFT_WORKER = Path(__file__).with_name("recovery_torchft.py")
LIGHTHOUSES = {"torchft": 5000, "torchft-tuned": 500}
"""The ms without a sign of life after which a replica is dead: torchft's default, and tuned."""
_job_numbers = itertools.count(1)
_lighthouse_ports = itertools.count(29510)


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where jobs run: two hosts with workers, or three, and a last one with the store."""

    lab: Lab
    etcd: Etcd
    scratch: Path
    per_node: int
    detect_timeout_s: float
    torchft: Path | None = None
    """Where torchft is installed."""
    wire_bytes_per_s: float = float("inf")
    """Of one stream between two hosts, with nothing else on the machine."""

    @property
    def workers(self) -> int:
        return 2 * self.per_node

    def job(
        self,
        launcher: str,
        algorithm: str,
        nnodes: str,
        *,
        mode: str = "in-place",
        records: bool = False,
    ) -> Job:
        """A new job of `launcher`, nothing started yet; `mode`: our --elastic; `records`: our --timeline."""
        job_id = f"recovery-{next(_job_numbers)}"
        folder = self.scratch / job_id
        lighthouse = self._start_lighthouse(LIGHTHOUSES[launcher]) if launcher in LIGHTHOUSES else ""

        def command(host: Host) -> list[str]:
            if launcher in LIGHTHOUSES:
                return self._torchft_command(host, lighthouse)
            common = ["--nnodes", nnodes, "--nproc-per-node", str(self.per_node)]
            script = [str(ELASTIC_WORKER), "--algorithm", algorithm, "--samples", str(SAMPLES)]
            if launcher == "torchrun":
                meet = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.lab.hosts[0].address}:29400")
                own = [*torchrun_command(), *meet, "--rdzv-id", job_id, "--local-addr", host.address]
                own += ["--max-restarts", "100"]
                script += ["--checkpoints", str(folder / "checkpoints")]
            else:
                own = [*baguarun_command(), "run", "--store", self.etcd.url, "--job-id", job_id]
                own += ["--elastic", mode, "--detect-timeout", str(self.detect_timeout_s)]
                own += ["--timeline", str(folder / "timeline.json")] if records else []
            return [*own, *common, *script]

        return Job(folder, command)

    def _torchft_command(self, host: Host, lighthouse: str) -> list[str]:
        """A torchrun of its own for each replica, which starts it again."""
        own = [*torchrun_command(), "--nnodes", "1", "--nproc-per-node", "1", "--max-restarts", "100"]
        # Replicas tell each other where their stores are.
        own += ["--master-addr", host.address]
        replicas = (
            shlex.join([*own, "--master-port", str(29600 + number), str(_TORCHFT_WORKER)])
            for number in range(self.per_node)
        )
        started = " ".join(f'{replica} & pids="$pids $!";' for replica in replicas)
        return [
            *("env", f"PYTHONPATH={self.torchft}:{REPOSITORY}", f"TORCHFT_LIGHTHOUSE=http://{lighthouse}"),
            # Who asks the node to leave asks its replicas.
            *("sh", "-c", f"trap 'kill -TERM $pids' TERM; {started} wait; wait"),
        ]

    def _start_lighthouse(self, heartbeat_ms: int) -> str:
        """One that knows no replica yet, beside the store; its address. It lives as long as the lab."""
        assert self.torchft is not None
        host = self.lab.hosts[-1]
        address = f"{host.address}:{next(_lighthouse_ports)}"
        host.popen(
            [
                *("env", f"PYTHONPATH={self.torchft}", sys.executable),
                *(str(self.torchft / "bin" / "torchft_lighthouse"), "--bind", address, "--min_replicas", "1"),
                *("--join_timeout_ms", "1000", "--heartbeat_timeout_ms", str(heartbeat_ms)),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return address


@dataclass(frozen=True)
class Running:
    """A job that trains."""

    site: Site
    job: Job
    stays: bool
    """Processes live on when another one dies; torchrun starts all of them again."""


@dataclass
class Trial:
    """What one event did to a job."""

    seconds: float
    """From the event to the next step of those who stay; infinity: none within the bound."""
    stall_s: float | None = None
    """Longest pause of the others when somebody came in, less a usual step."""
    newcomer_s: float | None = None
    """From the newcomer's being ready to its first step."""
    problems: list[str] = field(default_factory=list)
    """Steps and samples that were lost or came twice."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happens to a running job."""

    name: str
    nnodes: str
    starting_nodes: int
    inflict: Callable[[Running, int], Trial]
    bound_s: Callable[[Site], float]
    """Of every trial."""


def _latest(job: Job) -> dict[int, Step]:
    """The last step of every worker of the present World."""
    steps = [step for step in job.steps.all() if step.step > 0]
    last = {step.pid: step for step in steps}
    newest = max(steps, key=lambda step: step.time)
    return {pid: step for pid, step in last.items() if step.time > newest.time - 2.0}


def _until(job: Job, since_s: float, wanted: Callable[[Step], bool]) -> float:
    found = job.steps.wait_for(
        lambda step: step.step > 0 and wanted(step), CAP_S, since=since_s, alive=job.alive
    )
    return found.time - since_s if found else NEVER


def _after_loss(run: Running, lost: set[int], strike: Callable[[], object], left: int) -> Trial:
    """`strike` ends the workers `lost`; those who stay step on in a World of `left`."""
    stay = set(_latest(run.job)) - lost
    fault_s = time.time()
    strike()
    if not run.stays:
        return Trial(_until(run.job, fault_s, lambda step: step.pid not in stay | lost))
    return Trial(_until(run.job, fault_s, lambda step: step.pid in stay and step.world_size == left))


def kill_worker(run: Running, trial: int) -> Trial:
    """SIGKILL one worker, another one each time; the job is as large as before in the end."""
    victims = sorted(_latest(run.job).values(), key=lambda step: (step.node, step.rank))
    victim = victims[trial % len(victims)]
    host = next(host for host in run.site.lab.hosts if host.name == victim.node)
    workers = run.site.workers
    found = _after_loss(run, {victim.pid}, lambda: _kill(host, victim.pid), workers - 1)
    if found.seconds != NEVER and run.stays:
        _watch_join(run.job, found, {pid for pid in _latest(run.job) if pid != victim.pid}, workers)
    return found


def _kill(host: Host, pid: int) -> None:
    host.run(["kill", "-KILL", str(pid)])


def _watch_join(job: Job, found: Trial, before: set[int], workers: int) -> None:
    """Wait until somebody new steps in a World of `workers`, and see what that cost the others."""
    since_s = time.time()
    if _until(job, since_s, lambda step: step.pid not in before and step.world_size == workers) == NEVER:
        found.stall_s = NEVER
        return
    # Some steps more: the pause lies before the first of them.
    last = max(step.step for step in job.steps.all())
    job.steps.wait_for(lambda step: step.step >= last + 5, CAP_S, alive=job.alive)
    steps = job.steps.all()
    newcomers = {step.pid for step in steps if step.pid not in before and step.time > since_s}
    for pid in newcomers:
        own = [step.time for step in steps if step.pid == pid]
        if len(own) > 1:
            found.newcomer_s = max(found.newcomer_s or 0.0, own[1] - own[0])
    for pid in before:
        own = [step for step in steps if step.pid == pid and step.step > 0]
        pauses = [(later.time - earlier.time, earlier, later) for earlier, later in itertools.pairwise(own)]
        usual = median(pause for pause, _, _ in pauses)
        at_join = [
            pause for pause, one, two in pauses if one.world_size < two.world_size and two.time > since_s
        ]
        if at_join:
            found.stall_s = max(found.stall_s or 0.0, at_join[-1] - usual)


def lose_host(run: Running, trial: int) -> Trial:
    """The link of host 1 goes, then agent and workers: nobody is told."""
    return _lose(run, run.site.lab.hosts[1].power_off)


def freeze_host(run: Running, trial: int) -> Trial:
    return _lose(run, run.site.lab.hosts[1].freeze)


def cut_host(run: Running, trial: int) -> Trial:
    return _lose(run, run.site.lab.hosts[1].cut)


def freeze_worker(run: Running, trial: int) -> Trial:
    """SIGSTOP to one worker of host 1; its agent and the kernel's sockets go on."""
    victim = next(step for step in _latest(run.job).values() if step.node == run.site.lab.hosts[1].name)
    strike = lambda: os.kill(victim.pid, signal.SIGSTOP)  # noqa: E731
    found = _after_loss(run, {victim.pid}, strike, run.site.workers - 1)
    run.site.lab.hosts[1].crash()
    return found


def kill_agent(run: Running, trial: int) -> Trial:
    return _lose(run, lambda: run.job.agents[run.site.lab.hosts[1].name].kill())


def freeze_agent(run: Running, trial: int) -> Trial:
    agent = run.job.agents[run.site.lab.hosts[1].name]
    return _lose(run, lambda: agent.send_signal(signal.SIGSTOP))


def cut_worker(run: Running, trial: int) -> Trial:
    """What host 1's worker says is dropped; its agent has the store and is heard by the others."""
    return _lose(run, lambda: run.site.lab.hosts[1].cut_tcp_except(ETCD_PORT))


def cut_agent(run: Running, trial: int) -> Trial:
    """Host 1's agent reaches neither the store nor another agent; its worker trains on with the others."""
    return _lose(run, lambda: run.site.lab.hosts[1].cut_udp_and_tcp(ETCD_PORT))


def cut_from_peers(run: Running, trial: int) -> Trial:
    """Host 1 reaches the store alone."""
    victim, peers = run.site.lab.hosts[1], [host for host in run.job.hosts if host.name != "h1"]
    found = _lose(run, lambda: [victim.cut_from(peer) for peer in peers])
    for peer in peers:
        victim.heal_to(peer)
    return found


def leave_politely(run: Running, trial: int) -> Trial:
    """SIGTERM to host 1's agent."""
    return _lose(run, lambda: run.job.terminate(run.site.lab.hosts[1]))


def _lose(run: Running, strike: Callable[[], object]) -> Trial:
    host = run.site.lab.hosts[1]
    lost = {step.pid for step in _latest(run.job).values() if step.node == host.name}
    found = _after_loss(run, lost, strike, (len(run.job.hosts) - 1) * run.site.per_node)
    host.thaw()
    host.crash()
    host.heal()
    return found


def join(run: Running, trial: int) -> Trial:
    """Host 1's agent is started beside a running job."""
    before = set(_latest(run.job))
    found = Trial(0.0)
    since_s = time.time()
    run.job.start(run.site.lab.hosts[1])
    if run.stays:
        _watch_join(run.job, found, before, run.site.workers)
    found.seconds = _until(run.job, since_s, lambda step: step.world_size == run.site.workers)
    return found


def _detection(site: Site) -> float:
    return site.detect_timeout_s + 0.5


EVENTS = {
    "kill": Event(
        name="worker killed", nnodes="2", starting_nodes=2, inflict=kill_worker, bound_s=lambda _: 1.0
    ),
    "lost": Event(name="host lost", nnodes="1:2", starting_nodes=2, inflict=lose_host, bound_s=_detection),
    "frozen": Event(
        name="host frozen", nnodes="1:2", starting_nodes=2, inflict=freeze_host, bound_s=_detection
    ),
    "cut": Event(name="host cut off", nnodes="1:2", starting_nodes=2, inflict=cut_host, bound_s=_detection),
    "worker-frozen": Event(
        name="worker frozen", nnodes="1:2", starting_nodes=2, inflict=freeze_worker, bound_s=_detection
    ),
    "agent-killed": Event(
        name="agent killed", nnodes="1:2", starting_nodes=2, inflict=kill_agent, bound_s=_detection
    ),
    "agent-frozen": Event(
        name="agent frozen", nnodes="1:2", starting_nodes=2, inflict=freeze_agent, bound_s=_detection
    ),
    # Three hosts: of two whose workers cannot talk, either may go.
    "worker-cut": Event(
        name="worker cut off, of 3 hosts",
        nnodes="1:3",
        starting_nodes=3,
        inflict=cut_worker,
        bound_s=_detection,
    ),
    "agent-cut": Event(
        name="agent cut off", nnodes="1:2", starting_nodes=2, inflict=cut_agent, bound_s=_detection
    ),
    "peers-cut": Event(
        name="host cut off from its peers, of 3 hosts",
        nnodes="1:3",
        starting_nodes=3,
        inflict=cut_from_peers,
        bound_s=_detection,
    ),
    "leave": Event(
        name="polite leave", nnodes="1:2", starting_nodes=2, inflict=leave_politely, bound_s=lambda _: 0.6
    ),
    "join": Event(name="join", nnodes="1:2", starting_nodes=1, inflict=join, bound_s=lambda _: CAP_S),
}
