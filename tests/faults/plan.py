"""What happens in each round. Nothing here touches a process."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum

OPERATION_TIMEOUT_S = 1.5
"""The groups' timeout once they are formed: how long who is frozen or cut off may go unnoticed."""
SLACK_S = 0.2
"""Until a rank whose time is up gets a CPU of a loaded machine: who is to blame has been found out before."""
KILL_BOUND_S = 1.0
"""How long who is killed may go unnoticed."""


class Fault(Enum):
    """What is done to a rank, or for CUT to a host."""

    KILL = "kill"
    FREEZE = "freeze"
    CUT = "cut"

    @property
    def is_silent(self) -> bool:
        """Only a timeout tells of it."""
        return self is not Fault.KILL

    @property
    def bound_s(self) -> float:
        """How long it takes until every survivor has its error."""
        return OPERATION_TIMEOUT_S + SLACK_S if self.is_silent else KILL_BOUND_S


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which ranks live on which host."""

    name: str
    hosts: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        return sum(map(len, self.hosts))

    def host_of(self, rank: int) -> int:
        return next(index for index, ranks in enumerate(self.hosts) if rank in ranks)


ONE_HOST = Layout(name="one host", hosts=((0, 1, 2, 3),))
# As many ranks as hosts allow to differ, and neighbours by number on different hosts.
THREE_HOSTS = Layout(name="three hosts", hosts=((0, 2), (1,), (3,)))

COLLECTIVES = (
    "all_reduce",
    "async all_reduce",
    "reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "all_to_all",
    "gather",
    "scatter",
    "barrier",
)
NUMBERS = (1, 1_000, 60_000, 1_000_000)
"""Elements (fp32) per rank."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """One round: `lost` ranks suffer `fault` while all run `collective` again and again."""

    fault: Fault
    lost: tuple[int, ...]
    collective: str
    count: int
    root: int
    delay_s: float
    """From the first finished collective to the fault."""
    returns: bool
    """Whether the lost come back in the same process (thawed, healed); else they are replaced."""

    def __str__(self) -> str:
        end = "returns" if self.returns else "is replaced"
        ranks = " and ".join(map(str, self.lost))
        what = f"{self.collective} of {self.count}, root {self.root}"
        return f"{self.fault.value} rank {ranks} in {what}; it {end}"


def draw(seed: int, rounds: int, layout: Layout) -> list[Round]:
    """`rounds` rounds, every fault that `layout` allows equally often."""
    chance = random.Random(f"{seed} {layout.name}")
    faults = [Fault.KILL, Fault.FREEZE] + ([Fault.CUT] if len(layout.hosts) > 1 else [])
    return [_draw_one(chance, faults[number % len(faults)], layout) for number in range(rounds)]


def _draw_one(chance: random.Random, fault: Fault, layout: Layout) -> Round:
    rank = chance.randrange(layout.size)
    return Round(
        fault=fault,
        lost=layout.hosts[layout.host_of(rank)] if fault is Fault.CUT else (rank,),
        collective=chance.choice(COLLECTIVES),
        count=chance.choice(NUMBERS),
        root=chance.randrange(layout.size),
        delay_s=chance.uniform(0, 0.05),
        returns=fault is not Fault.KILL and chance.random() < 0.5,
    )
