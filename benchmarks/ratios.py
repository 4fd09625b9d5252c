"""Medians, spreads and what can be said of a ratio from few pairs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

_RESAMPLES = 10_000


@dataclass(frozen=True)
class Summary:
    """A series in four numbers, in the series' own unit."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        if not values:
            raise ValueError("a summary of no values")
        return cls(median=median(values), low=min(values), high=max(values), count=len(values))


@dataclass(frozen=True)
class Ratio:
    """The median of paired ratios ours / theirs, and the bound it stays under with 95 % confidence."""

    median: float
    upper95: float
    pairs: int


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Median of `ours[i] / theirs[i]` with its one-sided 95 % upper bound.

    Pairs that ran next to each other cancel what the machine did meanwhile. The bound is the 95th percentile
    of the bootstrapped median (Efron, 1979), with a fixed seed: the same series give the same bound.
    """
    if len(ours) != len(theirs) or not ours:
        raise ValueError(f"{len(ours)} against {len(theirs)} values: want as many of each, and one at least")
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    rng = random.Random(20)
    medians = sorted(median(rng.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES))
    return Ratio(median=median(ratios), upper95=medians[int(0.95 * _RESAMPLES)], pairs=len(ratios))
