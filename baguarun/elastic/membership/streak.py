"""Does a job whose workers fail get on? What is handed on from World to World to tell; pure.

Two ways to get nowhere: workers fail before any step is committed in between, or all fail, and start anew,
without coming further than the last time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from baguarun.contract import Failure

ENOUGH = 3
"""So many failures in a row, of either kind, end the job."""


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

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Streak:
        """From what `dataclasses.asdict` made of it."""
        first = fields["first_failure"]
        return cls(**{**fields, "first_failure": Failure(**first) if first is not None else None})

    def go_on(self, *, has_stepped: bool) -> Streak:
        """A World ends without a failure; `has_stepped`: a step was committed in it."""
        return replace(self, failures=0) if has_stepped else self

    def fail(self, failure: Failure | None, *, has_stepped: bool, had_time: bool) -> Streak:
        """A World ends by a failing worker, others go on. `had_time`: for a step, before that happened."""
        failures = (0 if has_stepped else self.failures) + int(had_time)
        is_first = failures <= 1 and not self.restarts
        return replace(
            self, failures=failures, first_failure=failure if is_first else self.first_failure or failure
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
