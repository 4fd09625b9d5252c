"""How long steps take: what is typical, and how much longer they are beside an exchange in the background."""

from __future__ import annotations

from collections import deque
from statistics import fmean, median

_TYPICAL_OF = 32
"""Steps whose median counts as what a step takes."""
_COMPARED = 128
"""Steps of each kind whose means are compared: single ones differ more than the kinds do."""
_LEAST_COMPARED = 16
"""Of each kind; with fewer nothing is known."""
_LONGEST = 4.0
"""In typical steps: what takes longer is no training, and not compared."""


class StepTimes:
    """The last steps of one rank."""

    def __init__(self) -> None:
        self._all: deque[float] = deque(maxlen=_TYPICAL_OF)
        self._beside: deque[float] = deque(maxlen=_COMPARED)
        self._alone: deque[float] = deque(maxlen=_COMPARED)

    def note(self, seconds: float, *, is_beside: bool) -> None:
        """A step took so long, with an exchange under way (`is_beside`) or without one."""
        self._all.append(seconds)
        (self._beside if is_beside else self._alone).append(seconds)

    def typical_s(self) -> float:
        """The median, in seconds: evaluations and checkpoints between two steps are no training."""
        return median(self._all) if self._all else 0.0

    def cost_beside(self) -> float:
        """By what share of a step without an exchange steps beside one are longer; 0 if not known."""
        longest_s = _LONGEST * self.typical_s()
        beside, alone = (
            [seconds for seconds in kind if seconds <= longest_s] for kind in (self._beside, self._alone)
        )
        if min(len(beside), len(alone)) < _LEAST_COMPARED or sum(alone) == 0:
            return 0.0
        return max(fmean(beside) / fmean(alone) - 1, 0.0)
