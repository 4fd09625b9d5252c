"""How long steps take: what is typical, and how much longer they are beside an exchange in the background."""

from __future__ import annotations

from collections import deque
from itertools import islice
from statistics import fmean, median

_TYPICAL_OF = 32
"""Steps whose median counts as what a step takes."""
_COMPARED = 512
"""Steps of which those beside an exchange are compared with the others: single ones differ more than these
two kinds do."""
_LEAST_COMPARED = 64
"""Of each kind; with fewer nothing is known."""
_LONGEST = 2.0
"""In medians of a kind: what takes longer is no training, and not compared."""


class StepTimes:
    """The last steps of one rank."""

    def __init__(self) -> None:
        # How many seconds, and whether beside an exchange; the newest first.
        self._steps: deque[tuple[float, bool]] = deque(maxlen=_COMPARED)

    def note(self, seconds: float, *, is_beside: bool) -> None:
        """A step took so long, with an exchange under way (`is_beside`) or without one."""
        self._steps.appendleft((seconds, is_beside))

    def typical_s(self) -> float:
        """The median, in seconds: evaluations and checkpoints between two steps are no training."""
        newest = [seconds for seconds, _ in islice(self._steps, _TYPICAL_OF)]
        return median(newest) if newest else 0.0

    def cost_beside(self) -> float:
        """By what share of a step without an exchange steps beside one are longer; 0 if not known."""
        alone_s, beside_s = self._mean_s(is_beside=False), self._mean_s(is_beside=True)
        if alone_s is None or beside_s is None or alone_s == 0:
            return 0.0
        return max(beside_s / alone_s - 1, 0.0)

    def _mean_s(self, *, is_beside: bool) -> float | None:
        """Of steps of one kind, without the longest; None if there are too few."""
        found = [seconds for seconds, was_beside in self._steps if was_beside == is_beside]
        if len(found) < _LEAST_COMPARED:
            return None
        longest_s = _LONGEST * median(found)
        return fmean(seconds for seconds in found if seconds <= longest_s)
