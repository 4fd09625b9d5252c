"""Plays many rounds and counts."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.plan import Fault, Layout, draw
from tests.faults.world import Life, Played, RoundError, World, complaints, leaks
from tests.lab import Lab


@dataclass
class Report:
    """What came of the rounds on one layout."""

    layout: Layout
    played: list[Played] = field(default_factory=list)
    reformed: dict[Fault, int] = field(default_factory=lambda: dict.fromkeys(Fault, 0))
    failures: list[str] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        longest = max(self.lives, key=lambda life: life.groups)
        assert longest.first is not None and longest.last is not None
        return {
            "layout": self.layout.name,
            "ranks_by_host": self.layout.hosts,
            "rounds": len(self.played),
            "faults": {fault.value: self._of(fault) for fault in Fault if self._times(fault)},
            "processes": len(self.lives),
            "longest_life": {
                "groups": longest.groups,
                "after_first_group": asdict(longest.first),
                "after_last_group": asdict(longest.last),
            },
            "failures": self.failures,
        }

    def _times(self, fault: Fault) -> list[list[float]]:
        return [[*each.detected_s.values()] for each in self.played if each.round.fault is fault]

    def _of(self, fault: Fault) -> dict[str, Any]:
        times = self._times(fault)
        every = sorted(time for of_round in times for time in of_round)
        return {
            "rounds": len(times),
            "errors_of_survivors": len(every),
            "bound_s": fault.bound_s,
            "median_s": round(every[len(every) // 2], 3),
            "slowest_s": round(every[-1], 3),
            "beyond_bound": sum(time > fault.bound_s for time in every),
            "reformed": self.reformed[fault],
        }


def run(layout: Layout, rounds: int, seed: int, patience_s: float) -> Report:
    """`rounds` rounds on `layout`, in a lab if it has several hosts; a round that fails ends only itself."""
    report = Report(layout)
    several = len(layout.hosts) > 1
    with (
        Lab(hosts=len(layout.hosts)) if several else nullcontext() as lab,
        tempfile.TemporaryDirectory() as at,
    ):
        world = World(layout, lab.hosts if lab is not None else [], Path(at))
        with world:
            _play_all(world, report, rounds, seed, patience_s)
        report.lives = world.ended
    report.failures += leaks(report.lives)
    return report


def _play_all(world: World, report: Report, rounds: int, seed: int, patience_s: float) -> None:
    _form(world, report, "the first group")
    for number, round_ in enumerate(draw(seed, rounds, world.layout)):
        name = f"round {number} ({round_})"
        try:
            played = world.play(round_)
        except RoundError as error:
            report.failures.append(f"{name}: {error}")
            world.reset()
            _form(world, report, f"after {name}")
            continue
        report.played.append(played)
        report.failures += [f"{name}: {complaint}" for complaint in complaints(played, patience_s)]
        report.reformed[round_.fault] += _form(world, report, f"after {name}")
    world.leave(world.lives)


def _form(world: World, report: Report, when: str) -> bool:
    """Whether all formed a new group; if not, new processes do."""
    try:
        world.form()
    except RoundError as error:
        report.failures.append(f"{when}: {error}")
        world.reset()
        world.form()
        return False
    return True
