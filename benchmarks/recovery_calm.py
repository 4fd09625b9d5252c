"""What `--elastic in-place` costs a job to which nothing happens, beside one that is restarted.

What runs in place only is measured where it runs: on the thread that trains by the timeline, and by the CPU
time of the other threads of workers and of the agents, less what those of a job that is restarted take. The
two sums of a worker's CPU time differ as well, but by less than one of them varies from job to job; they are
kept beside it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from baguarun.launcher.linux import process_table
from benchmarks.harness import Row
from benchmarks.recovery_events import Site

_MODES = ("in-place", "restart")
_START_CAP_S = 120.0
_TURNS = 3
_STEP_S = 0.05
_TIMELINE_BEGAN_S = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
_IN_PLACE = ("baguanet", "bagua-control")
"""Threads that have more to do in place: the transport's and the control channel's. What the engine's reduce
in 50 ms is the same, and varies by more than these take."""
_RECORDING = "bagua-timeline"
"""The thread that writes the timeline, in both modes."""


@dataclass(frozen=True)
class Share:
    """What one worker and its part of its agent took of a step of 50 ms, in seconds."""

    commit: float
    """Of the thread that trains, all waiting included."""
    hooks: float
    """CPU time of the same thread around the optimizer's step."""
    threads: float
    """CPU time of the transport's and the control channel's threads."""
    agent: float
    """CPU time of the agent and of what it has started besides workers, by worker."""
    process: float
    """CPU time of the whole worker's process."""


class Span(NamedTuple):
    """Something that one thread did."""

    wall_s: float
    cpu_s: float


def calm_rows(site: Site, algorithm: str, seconds: float) -> tuple[list[Row], dict[str, Any]]:
    """The line of the table, and what it was made of."""
    found: dict[str, list[Share]] = {mode: [] for mode in _MODES}
    for turn, mode in itertools.product(range(_TURNS), _MODES):
        found[mode] += _shares(site, algorithm, mode, seconds)
        print(f"calm, {mode}, turn {turn + 1}: {_text(found[mode])}", flush=True)
    ours, theirs = found["in-place"], found["restart"]
    parts = {
        "commit()": median(share.commit for share in ours),
        "around the optimizer's step": median(share.hooks for share in ours),
        "other threads": _difference([share.threads for share in ours], [share.threads for share in theirs]),
        "agent": _difference([share.agent for share in ours], [share.agent for share in theirs]),
    }
    row = Row(
        what=f"{site.workers} workers, nothing happens: parts of a step of 50 ms, {', '.join(parts)}",
        peer="restart mode",
        ours=" + ".join(f"{1e3 * part:.3f}" for part in parts.values()) + " ms",
        value=sum(parts.values()) / _STEP_S,
        target=0.01,
    )
    return [row], {mode: [vars(share) for share in shares] for mode, shares in found.items()}


def _difference(ours: list[float], theirs: list[float]) -> float:
    return max(0.0, median(ours) - median(theirs))


def _text(shares: list[Share]) -> str:
    values = zip(*(vars(share).values() for share in shares), strict=True)
    return ", ".join(
        f"{name} {1e3 * median(value):.3f}" for name, value in zip(vars(shares[0]), values, strict=True)
    )


def _shares(site: Site, algorithm: str, mode: str, seconds: float) -> list[Share]:
    """Of each worker of a job of its own."""
    with site.job("baguarun", algorithm, "2", mode=mode, records=True) as job:
        job.start(*site.lab.hosts[:2])
        job.wait_for_world(site.workers, _START_CAP_S, settled=50)
        workers = {step.pid: step.rank for step in job.steps.all() if step.step > 0}
        launching = _launching([agent.pid for agent in job.agents.values()], workers)
        began_s = time.time()
        before = {pid: _threads_s(pid) for pid in [*workers, *launching]}
        time.sleep(seconds)
        after = {pid: _threads_s(pid) for pid in [*workers, *launching]}
        ended_s = time.time()
        # Until what was recorded is written.
        time.sleep(1.0)
        spans = {
            pid: _spans(job.folder / f"timeline.json.generation1.rank{rank}", began_s, ended_s)
            for pid, rank in workers.items()
        }
    of_step = _STEP_S / (ended_s - began_s)

    def used(pid: int, names: Iterable[str] = ()) -> float:
        names = names or [name for name in after[pid] if name != _RECORDING]
        return of_step * sum(after[pid].get(name, 0.0) - before[pid].get(name, 0.0) for name in names)

    agent = sum(map(used, launching)) / len(workers)
    shares = []
    for pid in workers:
        commits = spans[pid].pop("commit")
        shares.append(
            Share(
                commit=mean(span.wall_s for span in commits),
                hooks=sum(span.cpu_s for each in spans[pid].values() for span in each) / len(commits),
                threads=used(pid, _IN_PLACE),
                agent=agent,
                process=used(pid),
            )
        )
    return shares


def _launching(agents: Sequence[int], workers: Collection[int]) -> list[int]:
    """The agents and their helpers: all processes below them that are neither workers nor below these."""
    parents = {info.pid: info.ppid for info in process_table().values()}
    found = list(agents)
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid and child not in workers]
    return found


def _threads_s(pid: int) -> dict[str, float]:
    """CPU time of the threads of a process, by name."""
    found: dict[str, float] = defaultdict(float)
    for task in Path(f"/proc/{pid}/task").iterdir():
        # One may end meanwhile.
        with contextlib.suppress(OSError):
            name = (task / "comm").read_text().strip()
            found[name] += int((task / "schedstat").read_text().split()[0]) / 1e9
    return found


def _spans(path: Path, began_s: float, ended_s: float) -> dict[str, list[Span]]:
    """What in-place training adds, by name, as it began between two moments; of a recording that goes on."""
    found: dict[str, list[Span]] = defaultdict(list)
    for line in path.read_text().splitlines():
        if '"elastic"' in line:
            event = json.loads(line.strip().rstrip(","))
            if began_s <= _TIMELINE_BEGAN_S + event["ts"] / 1e6 < ended_s:
                found[event["name"]].append(Span(event["dur"] / 1e6, event["tdur"] / 1e6))
    return found
