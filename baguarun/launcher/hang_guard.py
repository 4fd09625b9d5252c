"""Which worker of a node hangs, and what is done about it: a pure judgement of times and answers.

In a synchronous job all workers stand when one hangs. The others wait in communication, and say so when they
are asked; who stands and waits for nobody is the one.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from baguarun.elastic.membership.records import Process
from baguarun.launcher.step_clock import HangLimit, StepClock

_ANSWERS = 3
"""In a row that say that a worker waits for nobody, before that is believed."""
_TO_DUMP_S = 0.5
"""At least so long a worker has to write its stacks before it is removed."""
_WAITED_TOO_LONG = 2.0
"""Times the limit: if a node's workers all wait for longer, nobody has found who they wait for."""
_ALL_STAND = 5.0
"""Times the limit: if a node's workers all stand and none waits, it may be their storage, and replacements
would stand as well. They get so long."""


class Verdict(enum.Enum):
    """What a step that takes too long comes from, and so what to do. Each is said once per step."""

    HANGS = "hangs"
    """It waits for nobody: have it write its stacks."""
    REMOVE = "remove"
    """It hangs still, and its stacks are written."""
    UNKNOWN = "unknown"
    """Nobody can tell whether it waits for others: have it write its stacks, and leave it."""
    ALL_WAIT = "all wait"
    """All workers of the node wait: have them write their stacks, and leave them."""


@dataclass(frozen=True)
class Finding:
    """One worker's step that takes too long."""

    worker: Process
    verdict: Verdict
    standing_s: float
    usual_s: float | None
    """A step of its takes; None: it has done none."""


@dataclass
class _Watched:
    clock: StepClock
    answers: int = 0
    """The last ones that are alike."""
    waits: bool | None = None
    told_s: float | None = None
    """When it was found to hang in this step."""
    said: set[Verdict] = field(default_factory=set)

    def begin_step(self) -> None:
        self.answers, self.told_s = 0, None
        self.said.clear()


class HangGuard:
    """The workers of one node. Times are the caller's clock, in seconds. Threads: one at a time."""

    def __init__(self, limit: HangLimit, *, removes: bool) -> None:
        self._limit = limit
        self._removes = removes
        self._watched: dict[Process, _Watched] = {}

    def begin(self, worker: Process, now_s: float, steps: int) -> None:
        """It enters a World, or is to leave one, with so many steps done: what lies before is no step."""
        watched = self._watched.setdefault(worker, _Watched(StepClock(self._limit)))
        watched.clock.begin(now_s, steps)
        watched.begin_step()

    def progressed(self, worker: Process, now_s: float, steps: int) -> None:
        """So many steps are done by now. Means nothing before `begin`, or while it is paused."""
        watched = self._watched.get(worker)
        if watched is not None and watched.clock.is_running and watched.clock.progressed(now_s, steps):
            watched.begin_step()

    def pause(self, worker: Process) -> None:
        """It waits for a World, or has done all its steps."""
        if worker in self._watched:
            self._watched[worker].clock.pause()

    def forget(self, worker: Process) -> None:
        """It has ended."""
        self._watched.pop(worker, None)

    def answered(self, worker: Process, waits: bool | None) -> None:
        """Whether it waits for others just now; None: nobody can tell."""
        watched = self._watched.get(worker)
        if watched is not None:
            watched.answers = watched.answers + 1 if waits is watched.waits else 1
            watched.waits = waits

    def slept(self, seconds: float) -> None:
        """The caller stood for so long, and heard nobody."""
        for watched in self._watched.values():
            watched.clock.leave_out(seconds)

    def judge(self, now_s: float) -> list[Finding]:
        """What there is to do now."""
        running = {worker: each for worker, each in self._watched.items() if each.clock.is_running}
        all_stand = len(running) > 1 and all(
            each.waits is False and each.clock.overdue_s(now_s) is not None for each in running.values()
        )
        patience = _ALL_STAND if all_stand else 1.0
        found = [self._judge_one(worker, watched, now_s, patience) for worker, watched in running.items()]
        findings = [finding for finding in found if finding is not None]
        for worker, watched in running.items():
            if Verdict.ALL_WAIT not in watched.said and self._all_wait(running, now_s):
                findings.append(_finding(worker, watched, Verdict.ALL_WAIT, now_s))
        for finding in findings:
            self._watched[finding.worker].said.add(finding.verdict)
        return findings

    def _judge_one(self, worker: Process, watched: _Watched, now_s: float, patience: float) -> Finding | None:
        if watched.clock.overdue_s(now_s) is None or watched.answers < _ANSWERS or watched.waits:
            return None
        if watched.waits is None:
            verdict = Verdict.UNKNOWN
        elif watched.told_s is None:
            watched.told_s = now_s
            verdict = Verdict.HANGS
        elif (
            self._removes
            and now_s - watched.told_s >= _TO_DUMP_S
            and watched.clock.overdue_s(now_s, times=patience) is not None
        ):
            verdict = Verdict.REMOVE
        else:
            return None
        return None if verdict in watched.said else _finding(worker, watched, verdict, now_s)

    def _all_wait(self, running: dict[Process, _Watched], now_s: float) -> bool:
        return all(
            each.waits and each.clock.overdue_s(now_s, times=_WAITED_TOO_LONG) is not None
            for each in running.values()
        )


def _finding(worker: Process, watched: _Watched, verdict: Verdict, now_s: float) -> Finding:
    standing_s = watched.clock.overdue_s(now_s)
    assert standing_s is not None
    return Finding(worker, verdict, standing_s, watched.clock.usual_s)


def describe(finding: Finding, who: str, log: str, *, removes: bool) -> str:
    """One line for people. `who` names the worker; `log` is where its stacks are."""
    usual = "it has done none yet" if finding.usual_s is None else f"usually {finding.usual_s:.3g} s"
    step = f"{who} has been in one step for {finding.standing_s:.0f} s ({usual})"
    match finding.verdict:
        case Verdict.HANGS:
            then = "it is removed" if removes else "it is left alone (--on-hang remove would end it)"
            return f"{step} and waits for no other worker; {then}, its threads' stacks are in {log}"
        case Verdict.REMOVE:
            return f"{step}; killing it (if steps may take so long, give a larger --hang-timeout)"
        case Verdict.UNKNOWN:
            return (
                f"{step}; whether it hangs or waits for others cannot be told where NCCL or gloo "
                f"communicates, so it is left alone; its threads' stacks are in {log}"
            )
        case Verdict.ALL_WAIT:
            return (
                f"{step}, as all workers of this node: they wait for others, of which none was found "
                f"to hang; its threads' stacks are in {log}"
            )
