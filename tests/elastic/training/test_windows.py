"""Losses at the worst moments: while a World is made, several at once, with a bucket half sent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from baguarun.comm.algorithms import ByteGrad
from tests.elastic.training import jobs
from tests.elastic.training.fake_agent import FakeAgent
from tests.elastic.training.resized import At, Script, Story, all_samples, run_script


def train(folder: Path, world_size: int, happenings: list[At], **settings: Any) -> tuple[Story, FakeAgent]:
    folder.mkdir()
    with FakeAgent(run_script, Script(folder=folder, happenings=happenings, **settings)) as agent:
        agent.start(world_size)
        agent.run_to_the_end()
    return Story.read(folder), agent


def leave(
    folder: Path, world_size: int, leaves: dict[int, list[int]], nodes: Sequence[int] = (), **settings: Any
) -> Story:
    """All leave politely: by committed steps, who is left from there on."""
    folder.mkdir()
    # Told before their optimizers step they leave behind that step.
    held = [
        At(local_rank=rank, point="begin", step=step - 1, action="hold")
        for step in leaves
        for rank in range(world_size)
    ]
    holding = 0
    with FakeAgent(run_script, Script(folder=folder, happenings=held, **settings)) as agent:
        agent.node_of = dict(enumerate(nodes))
        agent.start(world_size)
        for members in leaves.values():
            holding += len(agent.members)
            wanted = holding
            agent.run_until(lambda: Story.read(folder).held() == wanted)
            agent.change(members, polite=True)
        agent.run_to_the_end()
    return Story.read(folder)


def ends(story: Story) -> list[dict[str, Any]]:
    """What must not depend on how the members were lost."""
    assert story.ends()
    return [{**end, "pid": 0, "generation": 0} for end in story.ends()]


FEEDBACK = ByteGrad(error_feedback=True)


@pytest.fixture(scope="module")
def alone_from_3(tmp_path_factory: pytest.TempPathFactory) -> Story:
    return leave(tmp_path_factory.mktemp("left") / "job", 3, {3: [0]}, algorithm=FEEDBACK)


@pytest.mark.parametrize(
    ("point", "generation"),
    [
        pytest.param("ready", 1, id="ready"),
        pytest.param("enters", 2, id="joining the World"),
        pytest.param("models", 2, id="joining the model's groups"),
        pytest.param("stands", 2, id="telling where it stands"),
        pytest.param("begin", 2, id="before the first step"),
        pytest.param("begin", 1, id="two at once"),
    ],
)
def test_a_second_loss_while_the_world_is_made_costs_nothing_more(
    tmp_path: Path, alone_from_3: Story, point: str, generation: int
) -> None:
    happenings = [
        At(local_rank=1, point="begin", step=3),
        At(local_rank=2, point=point, step=3, generation=generation),
    ]
    lost, agent = train(tmp_path / "lost", 3, happenings, algorithm=FEEDBACK)
    assert sorted(agent.losses) == [1, 2]
    assert ends(lost) == ends(alone_from_3)


def test_a_second_loss_while_an_applied_step_is_gone_through_once_more(tmp_path: Path) -> None:
    """Its optimizers have stepped, and neither the first loss nor the second has them do it again."""
    happenings = [
        At(local_rank=1, point="stepped", step=3),
        # Who talks to the lost one does not come to the commit.
        At(local_rank=0, point="stepped", step=3, action="talk"),
        At(local_rank=2, point="stepped", step=3, action="talk"),
        At(local_rank=2, point="backward", step=3, generation=2),
    ]
    lost, agent = train(tmp_path / "lost", 3, happenings, algorithm=FEEDBACK)
    assert agent.losses == [1, 2]
    assert ends(lost) == ends(leave(tmp_path / "left", 3, {4: [0]}, algorithm=FEEDBACK))


@pytest.mark.parametrize("point", ["sends", "some sent"])
def test_who_alone_has_applied_a_step_is_lost_while_it_sends_it(tmp_path: Path, point: str) -> None:
    """Who was to receive it does the step itself, from what it owed at the commit."""
    happenings = [
        At(local_rank=1, point="backward", step=3, action="hold"),
        # Who talks to the lost one does not come to the commit.
        At(local_rank=0, point="stepped", step=3, action="talk"),
        At(local_rank=2, point="backward", step=3, action="hold"),
        At(local_rank=0, point=point, step=3, generation=2),
    ]
    script = Script(folder=tmp_path / "lost", happenings=happenings, algorithm=FEEDBACK)
    lost = jobs.train(script, 3, jobs.kill_when_held(1, 3))
    assert len(lost.ends()) == 1
    assert ends(lost) == ends(leave(tmp_path / "left", 3, {3: [2]}, algorithm=FEEDBACK))


def test_two_of_four_are_lost_in_one_step(tmp_path: Path) -> None:
    happenings = [
        At(local_rank=1, point="begin", step=3),
        At(local_rank=3, point="backward", step=3),
        At(local_rank=0, point="backward", step=3, action="hold"),
        At(local_rank=2, point="backward", step=3, action="hold"),
    ]
    lost, agent = train(tmp_path / "lost", 4, happenings, algorithm=FEEDBACK)
    assert sorted(agent.losses) == [1, 3]
    assert ends(lost) == ends(leave(tmp_path / "left", 4, {3: [0, 2]}, algorithm=FEEDBACK))


def test_source_and_receiver_of_the_state_are_lost_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "lost"
    folder.mkdir()
    happenings = [
        *(At(local_rank=rank, point="begin", step=2, action="hold") for rank in range(2)),
        At(local_rank=0, point="sends", step=3),
        At(local_rank=2, point="half", step=0, started_in=0),
    ]
    with FakeAgent(run_script, Script(folder=folder, happenings=happenings)) as agent:
        agent.start(2)
        newcomer = agent.start_newcomer(2)
        agent.run_until(lambda: newcomer.ready is not None and Story.read(folder).holding() == 2)
        agent.change([0, 1, 2], polite=True)
        agent.run_to_the_end()
    assert sorted(agent.losses) == [0, 2]
    lost, left = Story.read(folder), leave(tmp_path / "left", 2, {3: [1]})
    assert ends(lost) == ends(left)
    assert sorted(lost.applied_samples()) == all_samples(1)


def test_a_loss_between_micro_batches(tmp_path: Path) -> None:
    """After the first loss shares are larger than a micro-batch; residuals are not zero."""
    happenings = [
        At(local_rank=1, point="begin", step=3),
        At(local_rank=2, point="micro", step=7, generation=2),
    ]
    lost, _ = train(tmp_path / "lost", 3, happenings, algorithm=FEEDBACK, epochs=2)
    left = leave(tmp_path / "left", 3, {3: [0, 2], 7: [0]}, algorithm=FEEDBACK, epochs=2)
    assert ends(lost) == ends(left)
    assert sorted(lost.applied_samples()) == all_samples(2)


@pytest.mark.parametrize(
    ("point", "blamed"), [pytest.param("enters", 1, id="the World"), pytest.param("stands", None, id="later")]
)
def test_ranks_that_do_not_meet_complain_and_meet_again(
    tmp_path: Path, point: str, blamed: int | None
) -> None:
    """Membership has no news of them; the group's timeout is ten times as long."""
    happenings = [
        At(local_rank=1, point="begin", step=3),
        At(local_rank=2, point=point, step=3, generation=2, action="hold"),
    ]
    lost, agent = train(tmp_path / "lost", 3, happenings, detect_timeout_s=0.5)
    assert [each.body["rank"] for each in agent.suspicions][:1] == [blamed]
    assert [end["steps"] for end in lost.ends()] == [6, 6]
    assert lost.ends()[0]["weights"] == lost.ends()[1]["weights"]
    assert sorted(lost.applied_samples()) == all_samples(1)


@pytest.mark.parametrize(
    ("algorithm", "nodes", "action", "settings"),
    [
        pytest.param(ByteGrad(), [0, 1, 2], "die in a bucket", {}, id="scatter-gather"),
        pytest.param(FEEDBACK, [0, 1, 2], "die in a bucket", {}, id="scatter-gather, error feedback"),
        pytest.param(ByteGrad(hierarchical=True), [0, 0, 1, 1], "die in a bucket", {}, id="rail"),
        # A bucket of over 64 KiB, in three blocks that each rank sends four times.
        pytest.param(None, [0, 1, 2], "die in the ring", {"width": 2200, "is_alone": True}, id="ring"),
    ],
)
def test_one_survivor_has_the_bucket_and_another_has_not(
    tmp_path: Path, algorithm: ByteGrad | None, nodes: list[int], action: str, settings: dict[str, Any]
) -> None:
    """Whoever has it goes on and applies the step, which the others are sent."""
    world_size = len(nodes)
    survivors = [rank for rank in range(world_size) if rank != 1]
    half_sent = At(local_rank=1, point="begin", step=3, action=action, num_sends=3)
    applied = [At(local_rank=rank, point="stepped", step=3, action="hold") for rank in survivors]
    folder = tmp_path / "lost"
    folder.mkdir()
    settings = {**settings, "algorithm": algorithm, "epochs": 2}
    script = Script(folder=folder, happenings=[half_sent, *applied], **settings)
    with FakeAgent(run_script, script) as agent:
        agent.node_of = dict(enumerate(nodes))
        # Membership hears of it when somebody has applied the step.
        agent.at_loss = lambda _lost: None
        agent.at_suspicion = lambda _suspicion: None
        agent.start(world_size)
        agent.run_until(lambda: Story.read(folder).holding() > 0 and agent.losses == [1])
        agent.shrink(1)
        agent.run_to_the_end()
    lost = Story.read(folder)
    assert 0 < lost.holding() < len(survivors)
    left = leave(tmp_path / "left", world_size, {4: survivors}, nodes=nodes, **settings)
    assert ends(lost) == ends(left)
