"""Which workers hold the others up: a pure judgement of what they tell about their steps."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_FACTOR = 1.5
"""Of the median of all: from there on a worker is a straggler."""
_LEAST_S = 0.01
"""Above the median: less per step is not worth a word."""


@dataclass(frozen=True)
class Pace:
    """How one worker's steps go."""

    rank: int
    generation: int
    """Of the World in which it has that rank."""
    steps: int
    """Committed."""
    busy_s: float | None
    """Time per step in which it does not wait for others, the median of the last ones; None: unknown."""


def paces_to_json(paces: Sequence[Pace]) -> bytes:
    rows = [[pace.rank, pace.generation, pace.steps, pace.busy_s] for pace in paces]
    return json.dumps(rows, separators=(",", ":")).encode()


def paces_from_json(data: bytes) -> tuple[Pace, ...]:
    return tuple(Pace(*row) for row in json.loads(data))


def stragglers(busy_s: Mapping[int, float]) -> tuple[int, ...]:
    """Those ranks whose steps keep them busy for far longer than most, slowest first.

    That is 1.5 times the median of all, and 10 ms. The median is the lower one of two: of two workers one
    may be the straggler.
    """
    if len(busy_s) < 2:
        return ()
    ordered = sorted(busy_s.values())
    usual_s = ordered[(len(ordered) - 1) // 2]
    limit_s = max(_FACTOR * usual_s, usual_s + _LEAST_S)
    slow = [rank for rank, each_s in busy_s.items() if each_s > limit_s]
    return tuple(sorted(slow, key=lambda rank: -busy_s[rank]))


def straggling(paces: Sequence[Pace]) -> tuple[Pace, ...]:
    """The stragglers among the workers of the newest World, slowest first."""
    newest = max((pace.generation for pace in paces), default=0)
    known = {pace.rank: pace for pace in paces if pace.generation == newest and pace.busy_s is not None}
    busy_s = {rank: pace.busy_s for rank, pace in known.items() if pace.busy_s is not None}
    return tuple(known[rank] for rank in stragglers(busy_s))
