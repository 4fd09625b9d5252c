"""Who waits for the baton, and who gets it next."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from benchmarks.baton import Baton, ring


def test_jobs_take_turns_in_their_order_however_late_one_comes() -> None:
    turns: list[str] = []

    def take_three(baton: Baton, name: str) -> None:
        for _ in range(3):
            baton.take()
            turns.append(name)
            baton.hand_on()

    with ring(3) as places, ThreadPoolExecutor() as pool:
        first = Baton(*places[0])
        started = [pool.submit(take_three, first, "a")]
        while not turns:
            pass  # The others have nothing open yet.
        others = [Baton(*place) for place in places[1:]]
        started += [pool.submit(take_three, baton, name) for baton, name in zip(others, "bc", strict=True)]
        for each in started:
            each.result(10)
        for baton in (first, *others):
            baton.close()
    assert turns == ["a", "b", "c"] * 3


def test_a_job_of_its_own_does_not_wait() -> None:
    with ring(1) as (place,):
        baton = Baton(*place)
        for _ in range(3):
            baton.take()
            baton.hand_on()
        baton.close()
