"""When a worker's step takes far longer than its steps used to: a pure judgement of times."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

_REMEMBERED = 50
"""Steps that say how long one may take; what was slow long ago counts no more."""
_FACTOR = 10.0
"""Of the slowest of them. NVIDIA's resiliency extension takes 5; an evaluation or a
checkpoint between two steps may take more."""
_LEAST_S = 60.0


@dataclass(frozen=True)
class HangLimit:
    """How long a step may take."""

    fixed_s: float | None = None
    """None: found out from the steps so far, at least a minute, and no limit before the second one."""

    def of(self, longest_s: float | None) -> float | None:
        """The limit, given the longest of the last steps; None: none yet."""
        if self.fixed_s is not None:
            return self.fixed_s
        return None if longest_s is None else max(_LEAST_S, _FACTOR * longest_s)


class StepClock:
    """One worker's steps. Times are the caller's clock, in seconds. Threads: one at a time."""

    def __init__(self, limit: HangLimit) -> None:
        self._limit = limit
        self._steps = 0
        self._since_s: float | None = None
        self._durations_s: deque[float] = deque(maxlen=_REMEMBERED)

    def begin(self, now_s: float, steps: int) -> None:
        """The worker enters a World with so many steps done: what lies before is no step's time."""
        self._steps, self._since_s = steps, now_s

    def progressed(self, now_s: float, steps: int) -> bool:
        """So many steps are done by now; returns whether these are more than before."""
        if self._since_s is None:
            self.begin(now_s, steps)
            return True
        if steps <= self._steps:
            return False
        self._durations_s.append((now_s - self._since_s) / (steps - self._steps))
        self._steps, self._since_s = steps, now_s
        return True

    def pause(self) -> None:
        """The worker waits for a World: nothing is late until `begin`."""
        self._since_s = None

    def leave_out(self, seconds: float) -> None:
        """So much of the time until now does not count."""
        if self._since_s is not None:
            self._since_s += seconds

    @property
    def is_running(self) -> bool:
        """Not paused."""
        return self._since_s is not None

    def overdue_s(self, now_s: float, *, times: float = 1.0) -> float | None:
        """How long the present step has taken, if that is more than the limit, so many times."""
        limit_s = self._limit.of(max(self._durations_s, default=None))
        if limit_s is None or self._since_s is None or now_s - self._since_s <= times * limit_s:
            return None
        return now_s - self._since_s

    @property
    def usual_s(self) -> float | None:
        """The median of the last steps."""
        ordered = sorted(self._durations_s)
        return ordered[len(ordered) // 2] if ordered else None
