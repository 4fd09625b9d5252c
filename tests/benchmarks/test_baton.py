"""Who waits for the baton, and who gets it next."""

from __future__ import annotations

import threading

from benchmarks.baton import Baton, ring

_SOON_S = 10.0


class Job(threading.Thread):
    """Takes three turns. Not waited for by the process: one that gets no turn is a failure, not a hang."""

    def __init__(self, baton: Baton, name: str, turns: list[str]) -> None:
        super().__init__(daemon=True)
        self.baton, self.label, self.turns = baton, name, turns
        self.had_one = threading.Event()
        self.start()

    def run(self) -> None:
        for _ in range(3):
            self.baton.take()
            self.turns.append(self.label)
            self.had_one.set()
            self.baton.hand_on()


def test_jobs_take_turns_in_their_order_however_late_one_comes() -> None:
    turns: list[str] = []
    with ring(3) as places:
        jobs = [Job(Baton(*places[0]), "a", turns)]
        # The others have nothing open yet.
        assert jobs[0].had_one.wait(_SOON_S)
        jobs += [Job(Baton(*place), name, turns) for place, name in zip(places[1:], "bc", strict=True)]
        for job in jobs:
            job.join(_SOON_S)
    assert turns == ["a", "b", "c"] * 3


def test_a_job_of_its_own_does_not_wait() -> None:
    turns: list[str] = []
    with ring(1) as (place,):
        Job(Baton(*place), "a", turns).join(_SOON_S)
    assert turns == ["a"] * 3
