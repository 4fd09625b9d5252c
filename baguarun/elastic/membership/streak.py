"""Does a job whose workers fail get on? What is handed on from World to World to tell; pure.

Three ways to get nowhere: workers fail before any step is committed in between, or all fail, and start anew,
without coming further than the last time, or all live and their communication breaks again and again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from baguarun.contract import Failure

ENOUGH = 3
"""So many failures in a row, of either kind, end the job."""
ENOUGH_BREAKS = 5
"""So many Worlds in a row whose communication broke do, once a network has had its time to be mended."""


@dataclass(frozen=True, kw_only=True)
class Streak:
    """Of the Worlds up to the one before."""

    failures: int = 0
    """Worlds in a row that ended by a failing worker without a committed step."""
    restarts: int = 0
    """Times in a row that all workers were lost, by failing, no further than `steps`."""
    steps: int = 0
    """Committed steps known when that happened last."""
    first_failure: Failure | None = None
    breaks: int = 0
    """Worlds whose communication broke though nobody was lost, since a step was committed last."""
    broken_since_s: float = 0.0
    """When the first of them ended, in Unix time by the leader's clock."""

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Streak:
        """From what `dataclasses.asdict` made of it."""
        first = fields["first_failure"]
        return cls(**{**fields, "first_failure": Failure(**first) if first is not None else None})

    def go_on(self, *, has_stepped: bool) -> Streak:
        """A World ends without a failure; `has_stepped`: a step was committed in it."""
        return replace(self, failures=0, breaks=0) if has_stepped else self

    def break_off(self, time_s: float, *, has_stepped: bool) -> Streak:
        """A World ends at `time_s` because its communication broke, and all workers live."""
        before = self.go_on(has_stepped=has_stepped)
        since_s = before.broken_since_s if before.breaks else time_s
        return replace(before, breaks=before.breaks + 1, broken_since_s=since_s)

    def fail(self, failure: Failure | None, *, has_stepped: bool, had_time: bool) -> Streak:
        """A World ends by a failing worker, others go on. `had_time`: for a step, before that happened."""
        before = self.go_on(has_stepped=has_stepped)
        failures = before.failures + int(had_time)
        is_first = failures <= 1 and not self.restarts
        return replace(
            before, failures=failures, first_failure=failure if is_first else self.first_failure or failure
        )

    def restart(self, steps: int) -> Streak:
        """After `fail`: nobody is left, all start anew; `steps` is the furthest that the job has come."""
        return replace(self, restarts=1 if steps > self.steps else self.restarts + 1, steps=steps)

    @property
    def verdict(self) -> str:
        """Why the job is to end; empty if it may go on."""
        if self.failures >= ENOUGH:
            return f"no progress: {self.failures} times in a row a worker failed before a step was committed"
        if self.restarts >= ENOUGH:
            return f"no progress: all workers failed {self.restarts} times without passing step {self.steps}"
        return ""

    def broken_verdict(self, time_s: float, patience_s: float) -> str:
        """As `verdict`, of communication: a network that is cut off may be whole again in `patience_s`."""
        broken_s = time_s - self.broken_since_s
        if self.breaks < ENOUGH_BREAKS or broken_s < patience_s:
            return ""
        return (
            f"no progress: communication broke {self.breaks} times in {broken_s:.0f} s "
            "before a step was committed"
        )
