"""How the steps of this node's workers go, kept for `baguarun status` and to name stragglers."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from baguarun.elastic.membership.records import Process
from baguarun.elastic.membership.stragglers import Pace, straggling

_REMEMBERED = 50
"""Messages, each of one step or several."""
_LEAST = 5
"""Messages before a worker's time per step is believed."""


@dataclass
class _Steps:
    steps: int
    busy_s: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))


class Paces:
    """Threads: one at a time."""

    def __init__(self) -> None:
        self._of: dict[Process, _Steps] = {}
        self._named: set[tuple[int, int]] = set()

    def progressed(self, worker: Process, body: Mapping[str, Any]) -> None:
        """`body` is that of a PROGRESS, or of a PONG that tells of steps."""
        steps = body["steps"]
        if body.get("begins") or worker not in self._of:
            # What was measured in another World is of other work.
            self._of[worker] = _Steps(steps)
            return
        known = self._of[worker]
        done, known.steps = steps - known.steps, steps
        if done > 0 and body.get("busy_s") is not None:
            known.busy_s.append(body["busy_s"] / done)

    def forget(self, worker: Process) -> None:
        """It has ended."""
        self._of.pop(worker, None)

    def of(self, worker: Process, rank: int, generation: int) -> Pace | None:
        """None: it has said nothing yet."""
        known = self._of.get(worker)
        if known is None:
            return None
        busy_s = median(known.busy_s) if len(known.busy_s) >= _LEAST else None
        return Pace(rank, generation, known.steps, busy_s)

    def new_stragglers(self, paces: tuple[Pace, ...]) -> list[Pace]:
        """Those among all workers of the job that were not named in their World before."""
        found = [pace for pace in straggling(paces) if (pace.generation, pace.rank) not in self._named]
        self._named |= {(pace.generation, pace.rank) for pace in found}
        return found
