"""Tells a worker that is frozen or stuck from one that only has to wait for a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

_ALIVE_PART = 0.2
"""Threads that ran, or wanted to, for this part of a time were not frozen in it."""
_MOST_SILENCE = 5.0
"""In detection times: a worker that runs and does not answer for so long is stuck all the same."""


def scheduled_s(pid: int) -> float | None:
    """Seconds that all threads of a process have run or waited for a CPU; None where nobody counts them.

    The first two numbers of /proc/PID/task/TID/schedstat (the kernel's scheduler/sched-stats).
    """
    total_ns, is_counted = 0, False
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            ran, waited, *_ = (task / "schedstat").read_text().split()
            total_ns += int(ran) + int(waited)
            is_counted = True
    except (OSError, ValueError):
        return None
    return 1e-9 * total_ns if is_counted else None


class VitalSigns:
    """Of one worker, who should answer often. Threads: one."""

    def __init__(
        self,
        pid: int,
        detect_timeout_s: float,
        scheduled_s: Callable[[int], float | None] = scheduled_s,
    ) -> None:
        self._pid = pid
        self._detect_timeout_s = detect_timeout_s
        self._scheduled_s = scheduled_s
        # When it was half the time silent: for how long, and what it had been scheduled for.
        self._before: tuple[float, float | None] | None = None

    def is_lost(self, silent_s: float) -> bool:
        """To be asked several times in the second half of the detection time, with the silence so far."""
        if silent_s <= self._detect_timeout_s / 2:
            self._before = None
            return False
        if self._before is None:
            # Only now: an answer is far cheaper than this.
            self._before = silent_s, self._scheduled_s(self._pid)
            return False
        if silent_s <= self._detect_timeout_s:
            return False
        since_s, before_s = self._before
        now_s = self._scheduled_s(self._pid)
        if before_s is None or now_s is None or silent_s > _MOST_SILENCE * self._detect_timeout_s:
            return True
        return now_s - before_s < _ALIVE_PART * (silent_s - since_s)
