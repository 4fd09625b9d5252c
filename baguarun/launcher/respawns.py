"""When a local rank gets its next process, after others of it have failed; pure.

Who has trained for a while is replaced at once. A newcomer that fails before, as its data are missing on this
node or its GPU is broken, costs all others two changes of the World: the next one waits, longer each time.
"""

from __future__ import annotations

from dataclasses import dataclass

_FIRST_PAUSE_S = 1.0
_MAX_PAUSE_S = 30.0
_PROVEN_STEPS = 10
_PROVEN_S = 5.0
"""Who has done so many steps, for so long, was well: what it fails of is not how this node is."""


@dataclass
class _Failures:
    in_a_row: int
    pause_s: float
    until_s: float


class Respawns:
    """The local ranks of one node. Times are the caller's clock, in seconds. Threads: one at a time."""

    def __init__(self) -> None:
        self._failures: dict[int, _Failures] = {}

    def failed(
        self, local_rank: int, now_s: float, *, is_newcomer: bool, steps: int, trained_s: float
    ) -> bool:
        """A process has failed that had committed so many steps, in Worlds, in `trained_s`. Returns whether
        the pause has grown by that. A process that was started for a World is replaced at once."""
        if steps >= _PROVEN_STEPS and trained_s >= _PROVEN_S:
            self._failures.pop(local_rank, None)
            return False
        if not is_newcomer:
            return False
        before = self._failures.get(local_rank)
        in_a_row = before.in_a_row + 1 if before else 1
        pause_s = min(2 * before.pause_s, _MAX_PAUSE_S) if before else _FIRST_PAUSE_S
        self._failures[local_rank] = _Failures(in_a_row, pause_s, now_s + pause_s)
        return before is None or pause_s > before.pause_s

    def wait_s(self, local_rank: int, now_s: float) -> float:
        """How long its next process is to wait yet; 0 if it may be started."""
        known = self._failures.get(local_rank)
        return max(known.until_s - now_s, 0.0) if known else 0.0

    def describe(self, local_rank: int, why: str) -> str:
        """One line for people, after `failed`."""
        known = self._failures[local_rank]
        which = "the newcomer has" if known.in_a_row == 1 else f"{known.in_a_row} newcomers in a row have"
        every = known.pause_s >= _MAX_PAUSE_S
        then = "one more is started every" if every else "the next is started in"
        return (
            f"local rank {local_rank}: {which} failed without having trained for long ({why}); "
            f"{then} {known.pause_s:g} s"
        )
