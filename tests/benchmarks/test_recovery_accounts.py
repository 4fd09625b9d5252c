"""Lost and repeated steps and samples are seen in what workers wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.recovery_accounts import accounts
from tests.lab.steps import Step

SAMPLES = 8


def lines() -> list[Step]:
    """Two workers, two samples each in a step, two steps an epoch, the third epoch under way."""
    return [
        Step(0.0, 100 + rank, f"h{rank}", rank, 2, 1, 0, step, epoch, numbers(step, rank))
        for step in range(1, 6)
        for rank in range(2)
        for epoch in [(step - 1) // 2]
    ]


def numbers(step: int, rank: int) -> Sequence[int]:
    first = (step - 1) % 2 * 4 + rank * 2
    return range(first, first + 2)


def test_a_calm_job_has_nothing_wrong() -> None:
    assert accounts(lines(), "bytegrad", SAMPLES) == accounts(lines(), "diloco", SAMPLES) == []


def test_a_step_that_nobody_did_is_missing_and_so_are_its_samples() -> None:
    found = accounts([step for step in lines() if step.step != 3], "bytegrad", SAMPLES)
    assert found == ["steps [3] are missing", "4 samples are missing, of which 0 may be"]


def test_a_sample_in_two_steps_came_twice_unless_it_was_reported_as_lost() -> None:
    again = [replace(step, samples=[0, *step.samples]) if step.step == 2 else step for step in lines()]
    wrong = ["2 samples came twice, 0 were reported as lost and dealt again"]
    told = [replace(step, lost_samples=2) for step in again]
    for algorithm in ("gradient_allreduce", "diloco"):
        assert accounts(lines() + again, algorithm, SAMPLES) == [wrong[0].replace("2 ", "1 ", 1)]
    assert accounts(told, "diloco", SAMPLES) == []
    assert accounts(told, "gradient_allreduce", SAMPLES) != []


def test_a_sample_comes_twice_also_in_the_epoch_under_way() -> None:
    again = [replace(step, step=6, epoch=2) for step in lines() if step.step == 5 and step.rank == 0]
    assert accounts(lines() + again, "diloco", SAMPLES) == [
        "2 samples came twice, 0 were reported as lost and dealt again"
    ]


def test_a_sample_is_missing_unless_it_was_reported_as_not_dealt_again() -> None:
    fewer = [replace(step, samples=step.samples[1:]) if step.step == 2 else step for step in lines()]
    told = [replace(step, lost_samples=2) for step in fewer]
    assert accounts(told, "diloco", SAMPLES) == ["2 samples are missing, of which 0 may be"]
    assert accounts([replace(step, missed_samples=2) for step in told], "diloco", SAMPLES) == []
    # Nor may it have come twice then.
    again = [replace(step, samples=[0, *step.samples]) if step.step == 2 else step for step in lines()]
    told = [replace(step, lost_samples=2, missed_samples=2) for step in again]
    assert accounts(told, "diloco", SAMPLES) == [
        "1 samples came twice, 0 were reported as lost and dealt again"
    ]


def test_who_is_killed_between_its_commit_and_its_line_leaves_out_one_line_only() -> None:
    # Rank 1 wrote of steps 1 and 2; the job went on in another World.
    killed = [step for step in lines() if step.rank == 0 or step.step <= 2]
    after = [replace(step, generation=2) if step.step > 3 else step for step in killed]
    assert accounts(after, "bytegrad", SAMPLES) == ["4 samples are missing, of which 2 may be"]
    once = [step for step in lines() if step.rank == 0 or step.step != 4]
    once = [replace(step, generation=2) if step.rank == 0 and step.step > 4 else step for step in once]
    assert accounts([step for step in once if step.step < 5 or step.rank == 0], "bytegrad", SAMPLES) == []
