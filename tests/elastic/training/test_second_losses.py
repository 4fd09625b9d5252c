"""Ranks out of step lose another one while they settle the loss of the first, or soon after."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from baguarun.comm.algorithms import (
    Algorithm,
    AsyncModelAverage,
    Decentralized,
    DiLoCo,
    LocalSGD,
    LowPrecisionDecentralized,
)
from tests.elastic.training.fake_agent import FakeAgent
from tests.elastic.training.jobs import samples_dealt_again
from tests.elastic.training.resized import At, Script, Story, run_script

FIRST = 5
"""Committed steps when the first one is lost, in each of which every rank was given a sample."""
RELAXED = [
    (LocalSGD(local_steps=1000), [5]),
    (DiLoCo(local_steps=1000), [5]),
    (Decentralized(communication_interval=1000), [5]),
    (Decentralized(communication_interval=1000, peer_selection_mode="shift_one"), [5]),
    (LowPrecisionDecentralized(communication_interval=1000), [5]),
    # The first round, of what the first step has made, may have ended.
    (AsyncModelAverage(sync_interval_ms=10**6, max_staleness_steps=1000), [4, 5]),
]
"""With how many of its steps a rank had not shared then."""


def lose_two(
    folder: Path,
    algorithm: Algorithm,
    second: Sequence[At],
    *,
    world_size: int = 3,
    is_replaced: bool,
    width: int = 8,
) -> Story:
    """Rank 1 is lost, and its place is taken by rank 9 if it `is_replaced`; then comes the `second` loss."""
    survivors = [rank for rank in range(world_size) if rank != 1]
    # All have come there when the first one is lost: what a slower one has not trained on would count, too.
    happenings = [
        At(local_rank=rank, point="begin", step=FIRST, generation=1, action="hold")
        for rank in range(world_size)
    ]
    happenings += second
    happenings += [
        At(local_rank=rank, point="begin", step=FIRST, generation=1, action="break") for rank in survivors
    ]
    for action in ("hold", "break"):
        # Who has come so far waits there until membership knows of the second loss.
        happenings += [
            At(local_rank=rank, point="begin", step=FIRST, generation=2, action=action)
            for rank in [*survivors, 9]
            if all(rank != loss.local_rank for loss in second)
        ]
    script = Script(
        folder=folder,
        happenings=happenings,
        algorithm=algorithm,
        epochs=3,
        batch_size=1,
        shows_weights=True,
        width=width,
        is_alone=width > 8,
    )
    folder.mkdir()
    with FakeAgent(run_script, script) as agent:
        agent.at_loss = lambda _lost: None
        agent.start(world_size)
        agent.run_until(lambda: Story.read(folder).holding() == world_size)
        agent.workers[1].process.kill()
        members = survivors
        if is_replaced:
            newcomer = agent.start_newcomer(9)
            agent.run_until(lambda: newcomer.ready is not None)
            members = [*survivors, 9]
        agent.run_until(lambda: agent.losses == [1])
        agent.at_loss = agent.shrink
        agent.change(members, polite=False)
        agent.run_to_the_end()
    assert agent.losses == [1, second[0].local_rank]
    return Story.read(folder)


@pytest.mark.parametrize(("algorithm", "unshared"), RELAXED, ids=str)
def test_what_a_second_lost_one_had_not_shared_before_the_first_loss_is_dealt_again(
    tmp_path: Path, algorithm: Algorithm, unshared: list[int]
) -> None:
    second = At(local_rank=2, point="begin", step=FIRST, generation=2)
    story = lose_two(tmp_path / "job", algorithm, [second], is_replaced=False)
    assert samples_dealt_again(story) in [2 * steps for steps in unshared]


@pytest.mark.parametrize(
    "second",
    [
        pytest.param(At(local_rank=0, point="sends", step=FIRST, generation=2), id="who sends"),
        pytest.param(At(local_rank=0, point="some sent", step=FIRST, generation=2), id="who has sent some"),
        pytest.param(At(local_rank=2, point="newcomers", step=FIRST, generation=2), id="who averages"),
    ],
)
@pytest.mark.parametrize(("algorithm", "unshared"), RELAXED, ids=str)
def test_a_survivor_s_loss_while_another_is_replaced_costs_what_both_had_trained_on_alone(
    tmp_path: Path, algorithm: Algorithm, unshared: list[int], second: At
) -> None:
    story = lose_two(tmp_path / "job", algorithm, [second], is_replaced=True)
    assert len(story.ends()) == 2
    assert samples_dealt_again(story) in [2 * steps for steps in unshared]


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("half", id="to whom no tensor has come"),
        pytest.param("some come", id="to whom some have come"),
        pytest.param("receives", id="to whom all have come"),
        pytest.param("newcomers", id="before the average"),
    ],
)
@pytest.mark.parametrize(("algorithm", "unshared"), RELAXED, ids=str)
def test_a_newcomer_s_loss_costs_nothing_more(
    tmp_path: Path, algorithm: Algorithm, unshared: list[int], point: str
) -> None:
    second = At(local_rank=9, point=point, step=0, started_in=0, generation=2)
    story = lose_two(tmp_path / "job", algorithm, [second], is_replaced=True)
    assert len(story.ends()) == 2
    assert samples_dealt_again(story) in unshared


@pytest.mark.parametrize(
    ("lost", "newcomer_enters", "mode", "dealt_again"),
    [
        pytest.param(0, [2, 3], "all", FIRST, id="the newcomer has it, and so all that was trained on"),
        # Who has least of an exchange with few is heard.
        pytest.param(0, [2, 3], "shift_one", 2 * FIRST, id="the newcomer has it, in an exchange with few"),
        pytest.param(2, [3], "all", 2 * FIRST, id="a survivor has it, and keeps its own"),
        pytest.param(2, [3], "shift_one", 2 * FIRST, id="a survivor has it, in an exchange with few"),
    ],
)
def test_a_survivor_is_lost_amid_the_newcomer_s_average(
    tmp_path: Path, lost: int, newcomer_enters: list[int], mode: str, dealt_again: int
) -> None:
    # Of weights of over 64 KiB, in three blocks that each rank sends four times.
    second = At(
        local_rank=lost, point="newcomers", step=FIRST, generation=2, action="die in the ring", num_sends=3
    )
    algorithm = Decentralized(communication_interval=1000, peer_selection_mode=mode)
    story = lose_two(tmp_path / "job", algorithm, [second], is_replaced=True, width=2200)
    (newcomer,) = [log for name, log in story.logs.items() if name.startswith("9-")]
    assert [entry["generation"] for entry in newcomer if entry["what"] == "enters"] == newcomer_enters
    assert samples_dealt_again(story) == dealt_again


def test_a_survivor_is_lost_while_it_is_told_of_the_furthest_one_s_state(tmp_path: Path) -> None:
    """Another one has been told, and has gone on."""
    second = At(local_rank=3, point="half", step=FIRST, generation=2)
    algorithm = LocalSGD(local_steps=1000)
    story = lose_two(tmp_path / "job", algorithm, [second], world_size=4, is_replaced=False)
    assert len(story.ends()) == 2
    assert samples_dealt_again(story) == 2 * FIRST
