"""What each rank has to do after a change of the World, from where all of them stand. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where one rank stands when a World begins."""

    valid: bool
    """It has a whole copy of the state: not a newcomer, nor one whose transfer was cut off."""
    committed: int = 0
    """Steps it has committed."""
    sub_steps: int = 0
    """Optimizer steps it has taken since."""
    is_whole: bool = False
    """They are all that the step has."""
    node: int = 0
    """Where it runs: ranks of one node do not need the network."""

    @property
    def position(self) -> tuple[int, int]:
        return self.committed, self.sub_steps


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one rank does before it trains on."""

    receive_from: int | None = None
    """Rank that sends it the replicated state."""
    send_to: tuple[int, ...] = ()
    """Ranks that it sends the replicated state to, in this order."""
    rolls_back: bool = False
    """Puts what forward, backward and the script have touched back to its last commit."""
    begins_anew: bool = False
    """A newcomer: zero residuals, random numbers of its own."""
    is_applied: bool = False
    """All optimizer steps of the next step are taken already."""
    loads_checkpoint: bool = False
    """Nobody has a valid state: all load the newest checkpoint, or take rank 0's beginning."""


def plan(standings: Sequence[Standing], *, replicas_differ: bool = False) -> list[Part]:
    """Each rank's part, by rank.

    The highest position of a valid rank counts. With `replicas_differ` survivors keep what they have, each
    its own weights and position, and only newcomers receive.
    """
    valid = [rank for rank, standing in enumerate(standings) if standing.valid]
    if not valid:
        return [Part(loads_checkpoint=True) for _ in standings]
    target = max(standings[rank].position for rank in valid)
    sources = [rank for rank in valid if replicas_differ or standings[rank].position == target]
    receivers = [rank for rank in range(len(standings)) if rank not in sources]
    from_rank = _choose_sources(standings, sources, receivers)
    parts = []
    for rank, standing in enumerate(standings):
        is_behind = standing.valid and standing.committed < target[0] and not replicas_differ
        parts.append(
            Part(
                receive_from=from_rank.get(rank),
                send_to=tuple(other for other in receivers if from_rank[other] == rank),
                rolls_back=standing.valid and not is_behind,
                begins_anew=not standing.valid,
                is_applied=(standing if replicas_differ else standings[sources[0]]).is_whole,
            )
        )
    return parts


def _choose_sources(
    standings: Sequence[Standing], sources: Sequence[int], receivers: Sequence[int]
) -> dict[int, int]:
    """The source of each receiver: of its own node where there is one, and of those who has least to send."""
    chosen: dict[int, int] = {}
    load = dict.fromkeys(sources, 0)
    for rank in receivers:
        near = [source for source in sources if standings[source].node == standings[rank].node]
        chosen[rank] = min(near or sources, key=lambda source: load[source])
        load[chosen[rank]] += 1
    return chosen
