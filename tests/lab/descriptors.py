"""How many descriptors the processes of a job have open, as Worlds come and go."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.lab.host import Host
from tests.lab.job import Job
from tests.lab.steps import Step

_NEXT_STEPS_S = 2.0
_SLACK = 16
"""A state that is sent to a newcomer goes over connections of its own, which are opened when they are needed:
up to a dozen. What a World of two has open for its groups is twice as much."""


@dataclass
class Descriptors:
    """Counts of every process, in each place that it had: rank 0 hosts the World's store."""

    counts: dict[str, dict[str, list[int]]] = field(default_factory=dict)

    def count(self, job: Job, hosts: Sequence[Host]) -> None:
        """Look at the agents of `hosts` and at those of their workers that train in one World meanwhile."""
        before = _newest_steps(job)
        agents = {host.name: _open_descriptors(job.agents[host.name].pid) for host in hosts}
        workers = {name: _open_descriptors(step.pid) for name, step in before.items() if name in agents}
        counted_s = time.time()
        # One more step may be over by now. All have done the next one when anybody has done that after it.
        last = max((step.step for step in before.values()), default=0) + 3
        job.steps.wait_for(lambda step: step.step >= last, _NEXT_STEPS_S, since=counted_s)
        after = _newest_steps(job)
        for name, found in agents.items():
            self._note(f"{name}: agent {job.agents[name].pid}", "", found)
        for name, found in workers.items():
            one, other = before[name], after[name]
            # Whoever has stepped since then was not about to leave that World or to enter another one.
            if other.time > counted_s and (one.pid, one.generation) == (other.pid, other.generation):
                place = f"{'rank 0' if one.rank == 0 else 'a rank'} of {one.world_size}"
                self._note(f"{name}: worker {one.pid}", place, found)

    def grown(self) -> list[str]:
        """Processes that have more open than when they were in the same place first."""
        return [
            f"{process} {place}: {counts[0]} descriptors were open, and then {counts[-1]}"
            for process, places in self.counts.items()
            for place, counts in places.items()
            if counts[-1] > counts[0] + _SLACK
        ]

    def _note(self, process: str, place: str, found: int | None) -> None:
        if found is not None:
            self.counts.setdefault(process, {}).setdefault(place, []).append(found)


def _newest_steps(job: Job) -> dict[str, Step]:
    return {step.node: step for step in job.steps.all() if step.step > 0}


def _open_descriptors(pid: int) -> int | None:
    """None for a process that is gone."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd")) or None
    except OSError:
        return None
