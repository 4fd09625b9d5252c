"""A job that is hit every few seconds: blows drawn from a seed, and whether its books balance in the end."""

from __future__ import annotations

import enum
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.lab.descriptors import Descriptors
from tests.lab.etcd_trio import EtcdTrio
from tests.lab.host import Host
from tests.lab.job import Job
from tests.lab.lab import Lab
from tests.lab.steps import Step

LEADER_KILLED = "etcd's leader killed"
_RECENT_S = 1.0


class Blow(enum.Enum):
    """What can happen to a host."""

    KILL_WORKER = "worker killed"
    FREEZE = "host frozen"
    CUT = "host cut off"
    POWER_OFF = "host lost"
    LEAVE = "polite leave"
    JOIN = "join"


@dataclass
class Chaos:
    """Draws blows and carries them out. A host that was lost comes back by a later `JOIN`."""

    lab: Lab
    job: Job
    etcd: EtcdTrio
    hosts: Sequence[Host]
    """Where agents run: one worker each."""
    random: random.Random
    history: list[tuple[float, str, str]] = field(default_factory=list)
    """When what happened to which host."""
    descriptors: Descriptors = field(default_factory=Descriptors)
    up: set[str] = field(default_factory=set)
    """Names of the hosts that are well."""

    def begin(self) -> None:
        self.job.start(*self.hosts)
        self.up = {host.name for host in self.hosts}

    def strike(self) -> None:
        """One blow; never against the last host that has a trained state."""
        stepping = {step.node for step in self.job.steps.since(time.time() - _RECENT_S) if step.step > 0}
        up = [host for host in self.hosts if host.name in self.up & stepping]
        down = [host for host in self.hosts if host.name not in self.up]
        blows = [blow for blow in Blow if (down if blow is Blow.JOIN else len(up) > 1)]
        if not blows:
            return
        blow = self.random.choice(blows)
        host = self.random.choice(down if blow is Blow.JOIN else up)
        self._note(blow.value, host)
        self._carry_out(blow, host)

    def count_descriptors(self) -> None:
        """Of agents and workers that are well, at a quiet moment."""
        self.descriptors.count(self.job, [host for host in self.hosts if host.name in self.up])

    def _note(self, what: str, host: Host) -> None:
        self.history.append((time.time(), what, host.name))
        print(f"{what}: {host.name}", flush=True)

    def _carry_out(self, blow: Blow, host: Host) -> None:
        match blow:
            case Blow.KILL_WORKER:
                self.job.kill_worker(host)
            case Blow.FREEZE:
                host.freeze()
            case Blow.CUT:
                host.cut()
            case Blow.POWER_OFF:
                host.power_off()
            case Blow.LEAVE:
                self.job.terminate(host)
            case Blow.JOIN:
                # What is left of its former life goes first: a frozen agent would wake up beside the new one.
                host.thaw()
                host.crash()
                host.heal()
                self.job.start(host)
        if blow is Blow.JOIN:
            self.up.add(host.name)
        elif blow is not Blow.KILL_WORKER:
            self.up.discard(host.name)

    def run(self, seconds: float, every_s: float, leader_kills: int) -> None:
        """Strike every `every_s` for `seconds`, or until the job has ended; etcd's leader is hit as well."""
        began = time.monotonic()
        kills = [seconds * (number + 1) / (leader_kills + 1) for number in range(leader_kills)]
        for number in itertools.count(1):
            while time.monotonic() < began + number * every_s:
                if not self.job.alive():
                    return
                time.sleep(0.1)
            if number * every_s >= seconds:
                return
            if kills and number * every_s >= kills[0]:
                kills.pop(0)
                self._note(LEADER_KILLED, self.etcd.host)
                self.etcd.kill_leader()
                self.etcd.start()
            self.count_descriptors()
            self.strike()


def unbalanced(steps: Sequence[Step], length: int, global_batch: int) -> list[str]:
    """What is wrong with the books of a job of synchronous steps: nothing lost, nothing done twice.

    A worker that is killed between its commit and its line leaves no line; such a step may lack its samples.
    """
    problems = []
    by_step: dict[int, list[Step]] = {}
    for step in steps:
        if step.step > 0:
            by_step.setdefault(step.step, []).append(step)
    if sorted(by_step) != list(range(1, len(by_step) + 1)):
        missing = sorted(set(range(1, max(by_step) + 1)) - set(by_step))
        problems.append(f"steps without a line: {missing[:10]}")
    seen: dict[int, dict[int, int]] = {}
    per_epoch = length // global_batch
    for number, group in sorted(by_step.items()):
        epochs, sizes = {step.epoch for step in group}, {step.world_size for step in group}
        if epochs != {(number - 1) // per_epoch}:
            problems.append(f"step {number} was done in epochs {sorted(epochs)}")
        if len(sizes) != 1:
            problems.append(f"step {number} was done in Worlds of {sorted(sizes)}")
        if len({step.weights for step in group}) > 1:
            problems.append(f"step {number} left replicas that differ")
        if len(group) > max(sizes):
            problems.append(f"step {number} was done by {len(group)} workers in a World of {max(sizes)}")
        samples = [sample for step in group for sample in step.samples]
        if len(group) == max(sizes) and len(samples) != global_batch:
            problems.append(f"step {number} had {len(samples)} samples")
        for sample in samples:
            first = seen.setdefault(min(epochs), {}).setdefault(sample, number)
            if first != number:
                problems.append(f"sample {sample} came in steps {first} and {number} of one epoch")
    return problems


def shared_memory() -> set[str]:
    """Names there that are ours; other programs and tests have some, too."""
    return {path.name for path in Path("/dev/shm").iterdir() if "baguarun" in path.name}


def listening(host: Host) -> set[str]:
    """Addresses and ports of `host` where somebody listens."""
    lines = host.run(["ss", "--listening", "--tcp", "--numeric", "--no-header"]).stdout.splitlines()
    return {line.split()[3] for line in lines}
