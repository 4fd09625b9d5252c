"""Losses while all leave a World together at one commit: before, amid and after what they do there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from baguarun.comm.algorithms import (
    Algorithm,
    AsyncModelAverage,
    ByteGrad,
    Decentralized,
    DiLoCo,
    LocalSGD,
    LowPrecisionDecentralized,
)
from tests.elastic.training.fake_agent import FakeAgent
from tests.elastic.training.jobs import leave_at, samples_dealt_again, train
from tests.elastic.training.resized import At, Script, Story, all_samples

TOLD, LAST = 2, 5
"""Committed steps when ranks out of step are told of the next World, and where they leave: they ask each
other at the commits 1, 3 and 5, and look at the answer where they ask again."""
RELAXED = [
    (LocalSGD(local_steps=3), [2]),
    (DiLoCo(local_steps=3), [2]),
    (Decentralized(), [1]),
    # One that had no peer in the fifth step knows of three.
    (Decentralized(peer_selection_mode="shift_one"), [2]),
    (LowPrecisionDecentralized(), [1]),
    # Rounds start after the steps 1 and 4, and the second may have ended.
    (AsyncModelAverage(sync_interval_ms=10**6, max_staleness_steps=3), [4, 1]),
]
"""With how many of its steps a rank had not shared at that commit."""


def lose_while_parting(
    folder: Path, members: Sequence[int], lost: Sequence[At], told: int = TOLD, **settings: Any
) -> Story:
    """Of three workers, who are told of a World of `members`; some of them die on the way into it."""

    def during(agent: FakeAgent, folder: Path) -> None:
        agent.run_until(lambda: Story.read(folder).holding() == 3)
        agent.change(members, polite=True)

    held = [At(local_rank=rank, point="begin", step=told, action="hold") for rank in range(3)]
    return train(Script(folder=folder, happenings=[*held, *lost], **settings), 3, during)


def ends(story: Story) -> list[dict[str, Any]]:
    """What must not depend on how many Worlds there were."""
    assert story.ends()
    return [{**end, "pid": 0, "generation": 0} for end in story.ends()]


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Story:
    return leave_at(tmp_path_factory.mktemp("left") / "job", step=4, algorithm=ByteGrad(error_feedback=True))


@pytest.mark.parametrize("members", [[0, 2], [0, 1, 2]], ids=["who leaves", "who stays"])
@pytest.mark.parametrize("point", ["parts", "farewell", "over"])
def test_a_loss_at_the_commit_where_all_part_ends_with_the_bits_of_a_polite_leave(
    tmp_path: Path, left: Story, point: str, members: list[int]
) -> None:
    # Told before their optimizers step they leave behind that step.
    lost, algorithm = At(local_rank=1, point=point, step=4, generation=1), ByteGrad(error_feedback=True)
    story = lose_while_parting(tmp_path / "lost", members, [lost], told=3, algorithm=algorithm)
    assert ends(story) == ends(left)
    assert sorted(story.applied_samples()) == sorted(left.applied_samples()) == all_samples(1)


@pytest.mark.parametrize(
    ("point", "members"),
    [
        pytest.param("parts", [0, 2], id="who leaves, before the average"),
        pytest.param("averaged", [0, 1, 2], id="who stays, with the average there"),
        pytest.param("farewell", [0, 2], id="who leaves, with the average"),
        pytest.param("over", [0, 1, 2], id="who stays, on the way to the next World"),
    ],
)
@pytest.mark.parametrize(("algorithm", "unshared"), RELAXED, ids=str)
def test_what_who_is_lost_at_a_parting_had_trained_on_is_in_the_average_or_dealt_again(
    tmp_path: Path, algorithm: Algorithm, unshared: list[int], point: str, members: list[int]
) -> None:
    lost = At(local_rank=1, point=point, step=LAST, generation=1)
    story = lose_while_parting(tmp_path / "job", members, [lost], **of_relaxed(algorithm))
    have_average = survivors_with_the_average(story)
    lost_samples = samples_dealt_again(story)
    if point in ("farewell", "over"):
        assert have_average == [True, True] and lost_samples == 0
    elif point == "parts":
        assert have_average == [False, False] and lost_samples in unshared
    elif algorithm.exchanges_with_few():
        # Who has not been given it does not know what was in it.
        assert lost_samples in ([0] if all(have_average) else unshared)
    else:
        assert lost_samples in ([0] if any(have_average) else unshared)


@pytest.mark.parametrize(
    ("algorithm", "unshared"),
    [(LocalSGD(local_steps=1000), 0), (Decentralized(peer_selection_mode="shift_one"), 2)],
    ids=str,
)
def test_a_loss_amid_the_average_at_a_parting_gives_it_to_one_and_leaves_another_its_own(
    tmp_path: Path, algorithm: Algorithm, unshared: int
) -> None:
    # Of weights of over 64 KiB, in three blocks that each rank sends four times.
    lost = At(local_rank=1, point="parts", step=LAST, action="die in the ring", num_sends=3)
    story = lose_while_parting(
        tmp_path / "job", [0, 2], [lost], **of_relaxed(algorithm), width=2200, is_alone=True
    )
    assert sorted(survivors_with_the_average(story)) == [False, True]
    assert samples_dealt_again(story) == unshared


def of_relaxed(algorithm: Algorithm) -> dict[str, Any]:
    # An epoch is longer than ranks can be apart.
    return {"algorithm": algorithm, "epochs": 3, "batch_size": 1, "shows_weights": True}


def survivors_with_the_average(story: Story) -> list[bool]:
    """Of each that came to the end: whether it went on with the average of all at their last commit in the
    first World, or with what it had there itself."""
    logs = list(story.logs.values())
    before = [weights_where(log, "committed", step=LAST, generation=1) for log in logs]
    average = [sum(values) / len(logs) for values in zip(*before, strict=True)]
    assert not are_alike(before[0], average)
    found = []
    for log, own in zip(logs, before, strict=True):
        if log[-1]["what"] == "end":
            entered = weights_where(log, "enters", generation=log[-1]["generation"])
            found.append(are_alike(entered, average))
            assert found[-1] or are_alike(entered, own)
    return found


def weights_where(log: list[dict[str, Any]], what: str, **wanted: int) -> list[torch.Tensor]:
    (entry,) = [
        entry
        for entry in log
        if entry["what"] == what and all(entry[key] == value for key, value in wanted.items())
    ]
    return [torch.tensor(value) for value in entry["weights"]]


def are_alike(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """But for roundings of a sum."""
    return all(
        (one - other).abs().max() <= 1e-5 * max(1.0, float(other.abs().max()))
        for one, other in zip(some, others, strict=True)
    )
