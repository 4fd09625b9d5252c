"""Workers die, leave and join while others train on: what becomes of steps, samples and weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baguarun.comm.algorithms import (
    Algorithm,
    ByteGrad,
    PowerSGD,
    QAdam,
    Sparse,
)
from baguarun.contract import Topic
from tests.elastic.training.fake_agent import FakeAgent
from tests.elastic.training.jobs import (
    kill_when_held,
    leave_at,
    replace_the_lost,
    same,
    train,
    weights_at,
)
from tests.elastic.training.resized import At, Script, Story, all_samples, run_script


@pytest.mark.parametrize(
    ("point", "held"),
    [
        pytest.param("begin", {}, id="before backward"),
        pytest.param("backward", {0: "backward", 2: "backward"}, id="after backward, as all"),
        pytest.param("stepped", {2: "stepped"}, id="between step and commit, a survivor there too"),
        pytest.param("stepped", {0: "stepped!", 2: "stepped!"}, id="between step and commit, as all"),
        pytest.param("stepped", {0: "stepped", 2: "backward"}, id="one has applied the step, one has not"),
        pytest.param("stepped", {2: "backward"}, id="a survivor a step behind"),
        pytest.param("stepped", {2: "between"}, id="a survivor a step behind, between optimizers"),
    ],
)
def test_a_loss_ends_with_the_bits_of_a_polite_leave_at_the_highest_step(
    tmp_path: Path, point: str, held: dict[int, str]
) -> None:
    # Where it matters how far the others have come, it dies when they are there.
    waits = len(held) > 0
    happenings = [At(local_rank=1, point=point, step=3, action="hold" if waits else "die")]
    for rank, where in held.items():
        action = "talk" if where.endswith("!") else "hold"
        happenings.append(At(local_rank=rank, point=where.rstrip("!"), step=3, action=action))
    dies = kill_when_held(1, 1 + len(held)) if waits else None
    lost = train(Script(folder=tmp_path / "lost", happenings=happenings), 3, dies)
    # What nobody has applied is done again.
    left = leave_at(tmp_path / "left", step=4 if point == "stepped" else 3)
    assert same(lost, left)
    assert sorted(lost.applied_samples()) == sorted(left.applied_samples()) == all_samples(1)


@pytest.mark.parametrize(("point", "step"), [("answers", 3), ("writes", 2)])
def test_what_stands_behind_a_commit_is_done_though_the_world_breaks_in_it(
    tmp_path: Path, point: str, step: int
) -> None:
    # It dies when the others have applied the step: who has not is sent it, and does not come to that commit.
    held = [At(local_rank=1, point=point, step=step, action="hold")]
    held += [At(local_rank=rank, point="stepped", step=step - 1, action="hold") for rank in (0, 2)]
    script = Script(folder=tmp_path / "job", happenings=held, checkpoints=tmp_path / "kept")
    story = train(script, 3, kill_when_held(1, 3))
    for log in story.logs.values():
        committed = [entry["step"] for entry in log if entry["what"] == "committed"]
        want = log[-1]["steps"] if log[-1]["what"] == "end" else step - 1
        assert committed == list(range(1, want + 1))
    assert len(story.ends()) == 2
    assert {end["generation"] for end in story.ends()} == {2}


def test_a_loss_between_two_optimizers_does_not_cut_the_step_in_two(tmp_path: Path) -> None:
    """All gradients are there when the first one steps: the second does, too, whatever is heard between."""
    held = [At(local_rank=rank, point="between", step=3, action="hold") for rank in (0, 1)]
    held.append(At(local_rank=2, point="backward", step=3, action="hold"))
    lost = train(Script(folder=tmp_path / "lost", happenings=held), 3, kill_when_held(1, 3))
    left = leave_at(tmp_path / "left", step=4)
    assert same(lost, left)
    assert sorted(lost.applied_samples()) == sorted(left.applied_samples()) == all_samples(1)


def test_optimizers_that_have_stepped_do_not_step_again(tmp_path: Path) -> None:
    """Of two optimizers one has stepped where the script talks to the lost one between their steps."""
    happenings = [
        At(local_rank=1, point="between", step=3, action="hold"),
        At(local_rank=0, point="between", step=3, action="talk"),
        At(local_rank=2, point="backward", step=3, action="hold"),
    ]
    script = Script(folder=tmp_path / "lost", happenings=happenings, shows_weights=True)
    lost = train(script, 3, kill_when_held(1, 3))
    assert [end["steps"] for end in lost.ends()] == [6, 6]
    assert lost.ends()[0]["weights"] == lost.ends()[1]["weights"]
    assert sorted(lost.applied_samples()) == all_samples(1)
    # What has stepped has done so once and for all, as with everybody there; the other one's gradients are
    # those of a pass in which the first has stepped already, which no polite run has.
    left = leave_at(tmp_path / "left", step=4, shows_weights=True)
    assert weights_at(lost, step=4)[:2] == weights_at(left, step=4)[:2]


OVERFLOW_IN = 3


@pytest.mark.parametrize(
    ("step", "survivors", "wanted_step"),
    [
        pytest.param(3, {0: ["backward"], 2: ["backward"]}, 4, id="both come to the commit"),
        pytest.param(3, {0: ["backward", "break"], 2: ["backward", "break"]}, 3, id="the step is done again"),
        pytest.param(3, {0: ["stepped", "break"], 2: ["stepped", "break"]}, 3, id="done again from its end"),
        pytest.param(3, {0: ["stepped"], 2: ["backward", "break"]}, 4, id="one comes to the commit"),
        pytest.param(4, {0: ["stepped"], 2: ["backward"]}, 5, id="in the next step, which one has applied"),
        pytest.param(4, {0: ["backward"], 2: ["backward"]}, 4, id="in the next step, which is done again"),
    ],
)
def test_a_loss_about_a_step_that_overflows_ends_with_the_bits_of_a_polite_leave(
    tmp_path: Path, step: int, survivors: dict[int, list[str]], wanted_step: int
) -> None:
    """All workers hold in that step, and one is killed there."""
    happenings = [At(local_rank=1, point="backward", step=step, action="hold")]
    for rank, (point, *more) in survivors.items():
        for action in ["hold", *more]:
            happenings.append(At(local_rank=rank, point=point, step=step, action=action, generation=1))
    settings: dict[str, Any] = {"overflows_in": OVERFLOW_IN, "shows_weights": True}
    lost = train(Script(folder=tmp_path / "lost", happenings=happenings, **settings), 3, kill_when_held(1, 3))
    left = leave_at(tmp_path / "left", step=wanted_step, **settings)
    assert same(lost, left)
    assert sorted(lost.applied_samples()) == sorted(left.applied_samples()) == all_samples(1)
    # It doubles in the third step and is halved in the fourth, once.
    assert [end["scale"]["scale"] for end in lost.ends()] == [2.0**10] * 2
    assert weights_at(lost, step=OVERFLOW_IN) == weights_at(lost, step=OVERFLOW_IN + 1)


def test_a_newcomer_gets_the_state_and_survivors_stay_as_they_are(tmp_path: Path) -> None:
    """One is lost, and its replacement joins at a boundary."""

    lost = At(local_rank=1, point="stepped", step=3)
    joined = At(local_rank=0, point="begin", step=9, action="hold")
    script = Script(folder=tmp_path / "job", epochs=4, happenings=[lost, joined], workers=1)
    story = train(script, 3, replace_the_lost)
    ends = story.ends()
    assert [end["steps"] for end in ends] == [24, 24, 24]
    assert {end["generation"] for end in ends} == {3}
    assert len({str(end["weights"]) for end in ends}) == 1
    assert len({end["rate"] for end in ends}) == 1
    assert len({str(end["random"]) for end in ends}) == 3
    assert sorted(story.applied_samples()) == all_samples(4)


def test_survivors_keep_their_tensors_where_they_are_through_a_loss_and_a_join(tmp_path: Path) -> None:
    # Nobody has applied the step that breaks, and so no survivor is sent anything.
    lost = At(local_rank=1, point="begin", step=3)
    joined = At(local_rank=0, point="begin", step=9, action="hold")
    story = train(Script(folder=tmp_path / "job", epochs=4, happenings=[lost, joined]), 3, replace_the_lost)
    survivors = [log for log in story.logs.values() if log[0]["generation"] == 1 and log[-1]["what"] == "end"]
    assert len(survivors) == 2
    for log in survivors:
        seen = [entry["places"] for entry in log if "places" in entry]
        assert [entry["generation"] for entry in log if "places" in entry] == [1, 2, 3, 3]
        # Where it is in the first World is not known yet.
        wanted = seen[-1]
        assert wanted["moment"] is not None
        assert seen == [{**wanted, "moment": None}, wanted, wanted, wanted]


@pytest.mark.parametrize("policy", ["constant", "fixed_per_worker", "scale_lr"])
def test_a_job_shrinks_to_one_and_grows_again(tmp_path: Path, policy: str) -> None:
    def shrink_and_grow(agent: FakeAgent, folder: Path) -> None:
        agent.run_until(lambda: agent.workers[0].generation == 2)
        newcomer = agent.start_newcomer(1)
        agent.run_until(lambda: newcomer.ready is not None and Story.read(folder).holding() == 1)
        agent.change([0, 1], polite=True)

    happenings = [
        At(local_rank=1, point="begin", step=5),
        At(local_rank=0, point="begin", step=7, action="hold"),
    ]
    script = Script(folder=tmp_path / "job", epochs=3, happenings=happenings, policy=policy)
    story = train(script, 2, shrink_and_grow)
    one, other = story.ends()
    assert one["steps"] == other["steps"]
    assert one["weights"] == other["weights"]
    assert sorted(story.applied_samples()) == all_samples(3)
    for log in story.logs.values():
        for entry in log:
            if entry["what"] == "applied":
                # As the schedule has it, and for half as many workers half of it.
                factor = 0.5 if policy == "scale_lr" and entry["generation"] == 2 else 1.0
                assert entry["rate"] == 0.01 * 0.5 ** (entry["step"] // 3) * factor
    assert one["rate"] == other["rate"] == 0.01 * 0.5 ** (one["steps"] // 3)


@pytest.mark.parametrize("policy", ["fixed_per_worker", "scale_lr"])
@pytest.mark.parametrize(
    "held",
    [
        pytest.param({0: "stepped!", 2: "stepped!"}, id="all have applied the step"),
        pytest.param({0: "stepped!", 2: "backward"}, id="one has"),
        pytest.param({0: "backward", 2: "stepped!"}, id="another one has"),
    ],
)
def test_a_step_that_is_gone_through_once_more_has_the_samples_that_it_was_applied_with(
    tmp_path: Path, policy: str, held: dict[int, str]
) -> None:
    """Though a step of the smaller World has fewer."""
    happenings = [At(local_rank=1, point="stepped", step=3, action="hold")]
    for rank, where in held.items():
        action = "talk" if where.endswith("!") else "hold"
        happenings.append(At(local_rank=rank, point=where.rstrip("!"), step=3, action=action))
    script = Script(folder=tmp_path / "lost", happenings=happenings, policy=policy, epochs=2)
    lost = train(script, 3, kill_when_held(1, 3))
    left = leave_at(tmp_path / "left", step=4, policy=policy, epochs=2)
    assert same(lost, left)
    assert sorted(lost.applied_samples()) == sorted(left.applied_samples()) == all_samples(2)


@pytest.mark.parametrize(
    "algorithm",
    [ByteGrad(error_feedback=True), "sparse", PowerSGD(start_step=2), QAdam(), QAdam(bits=1)],
    ids=str,
)
@pytest.mark.parametrize("point", ["begin", "backward", "stepped"])
def test_what_error_feedback_owes_is_that_of_the_last_commit(
    tmp_path: Path, algorithm: str | Algorithm, point: str
) -> None:
    happenings = [At(local_rank=1, point=point, step=3)]
    if point == "backward":
        # All buckets have come to them, and they apply nothing.
        happenings += [At(local_rank=rank, point=point, step=3, action="hold") for rank in (0, 2)]
    lost = train(Script(folder=tmp_path / "lost", happenings=happenings, algorithm=algorithm), 3)
    left = leave_at(tmp_path / "left", step=4 if point == "stepped" else 3, algorithm=algorithm)
    assert same(lost, left)


def test_what_a_script_does_after_a_commit_is_done_though_the_world_has_broken(tmp_path: Path) -> None:
    # They have applied the step when they hear of the loss, and have a question under way in that commit.
    held = [At(local_rank=rank, point="stepped", step=3, action="hold") for rank in range(3)]
    broken = [At(local_rank=rank, point="answers", step=4, action="break", generation=1) for rank in (0, 2)]
    story = train(Script(folder=tmp_path / "job", happenings=[*held, *broken]), 3, kill_when_held(1, 3))
    survivors = [log for log in story.logs.values() if log[-1]["what"] == "end"]
    assert len(survivors) == 2
    for log in survivors:
        assert [entry["step"] for entry in log if entry["what"] == "committed"] == list(range(1, 7))


@pytest.mark.parametrize(
    ("point", "action", "step"),
    [
        pytest.param("begin", "hold", 3, id="before backward"),
        pytest.param("backward", "hold", 3, id="after backward"),
        pytest.param("stepped", "hold", 4, id="between step and commit, to which survivors come"),
        pytest.param("stepped", "talk", 4, id="between step and commit, as survivors"),
    ],
)
@pytest.mark.parametrize("algorithm", [None, PowerSGD(start_step=2), Sparse(warmup_steps=8)], ids=str)
def test_a_newcomer_that_stands_by_takes_the_lost_one_s_place_in_the_step(
    tmp_path: Path, algorithm: Algorithm | None, point: str, action: str, step: int
) -> None:
    """The step that broke is done again, or gone through once more, with it, as if it had come politely."""

    def replace(folder: Path, happenings: list[At], *, polite: bool) -> Story:
        folder.mkdir()
        script = Script(folder=folder, happenings=happenings, algorithm=algorithm)
        with FakeAgent(run_script, script) as agent:
            agent.at_loss = lambda _lost: None
            agent.at_suspicion = lambda _suspicion: None
            agent.start(3)
            newcomer = agent.start_newcomer(3)
            wanted = 3 if polite else 2
            agent.run_until(lambda: newcomer.ready is not None and Story.read(folder).holding() == wanted)
            agent.run_until(lambda: polite or agent.losses == [1])
            agent.change([0, 2, 3], polite=polite)
            agent.run_to_the_end()
        return Story.read(folder)

    lost = At(local_rank=1, point=point, step=3)
    # Nobody comes to the commit before the newcomer is there.
    held = [At(local_rank=rank, point=point, step=3, action=action) for rank in (0, 2)]
    story = replace(tmp_path / "lost", [lost, *held], polite=False)
    # Told before their optimizers step they leave behind that step.
    told = [At(local_rank=rank, point="begin", step=step - 1, action="hold") for rank in range(3)]
    reference = replace(tmp_path / "left", told, polite=True)
    assert same(story, reference)
    assert [end["steps"] for end in story.ends()] == [6, 6, 6]
    assert sorted(story.applied_samples()) == sorted(reference.applied_samples()) == all_samples(1)


@pytest.mark.parametrize("is_alone", [False, True], ids=["shared memory", "TCP"])
@pytest.mark.parametrize(
    ("killed", "left"),
    [
        pytest.param(At(local_rank=0, point="sends", step=3), [1, 2], id="who has sent no tensor"),
        pytest.param(At(local_rank=0, point="some sent", step=3), [1, 2], id="who has sent some tensors"),
        pytest.param(
            At(local_rank=2, point="half", step=0, started_in=0), [0, 1], id="to whom no tensor has come"
        ),
        pytest.param(
            At(local_rank=2, point="some come", step=0, started_in=0), [0, 1], id="to whom some have come"
        ),
        pytest.param(
            At(local_rank=2, point="receives", step=0, started_in=0), [0, 1], id="to whom all have come"
        ),
    ],
)
def test_a_loss_while_the_state_is_sent_harms_nobody_else(
    tmp_path: Path, killed: At, left: list[int], is_alone: bool
) -> None:
    """The rest ends with the bits of a job in which the same workers have left and joined politely."""

    def join_and_lose(agent: FakeAgent, folder: Path) -> None:
        newcomer = agent.start_newcomer(2)
        agent.run_until(lambda: newcomer.ready is not None and Story.read(folder).holding() == 2)
        agent.change([0, 1, 2], polite=True)

    def join_and_leave(agent: FakeAgent, folder: Path) -> None:
        newcomer = agent.start_newcomer(2)
        agent.run_until(lambda: newcomer.ready is not None and Story.read(folder).holding() == 2)
        # The second World was over before its first step.
        agent.generation = 2
        agent.change(left, polite=True)
        if 2 not in left:
            newcomer.tell(Topic.LEAVE, generation=3, reason="test")

    held = [At(local_rank=rank, point="begin", step=2, action="hold") for rank in range(2)]
    lost = train(
        Script(folder=tmp_path / "lost", happenings=[*held, killed], is_alone=is_alone), 2, join_and_lose
    )
    reference = train(Script(folder=tmp_path / "left", happenings=held, is_alone=is_alone), 2, join_and_leave)
    assert same(lost, reference)
    assert [end["generation"] for end in lost.ends()] == [3, 3]
    assert [end["steps"] for end in lost.ends()] == [8, 8]
    assert sorted(lost.applied_samples()) == all_samples(1)


def test_the_newest_checkpoint_is_loaded_where_no_whole_copy_is_left(tmp_path: Path) -> None:
    def join(agent: FakeAgent, folder: Path) -> None:
        newcomer = agent.start_newcomer(1)
        agent.run_until(lambda: newcomer.ready is not None and Story.read(folder).holding() == 1)
        agent.change([0, 1], polite=True)

    happenings = [
        At(local_rank=0, point="begin", step=3, action="hold"),
        At(local_rank=0, point="sends", step=4),
    ]
    script = Script(folder=tmp_path / "job", happenings=happenings, checkpoints=tmp_path / "checkpoints")
    story = train(script, 1, join)
    (end,) = story.ends()
    assert end["steps"] == 16
    (newcomer,) = [log for log in story.logs.values() if log[-1]["what"] == "end"]
    # The one of the last commit may have been on its way.
    assert newcomer[1]["step"] in (2, 4)


def test_an_error_of_the_script_ends_its_worker_and_no_other(tmp_path: Path) -> None:
    happenings = [At(local_rank=1, point="begin", step=3, action="raise")]
    story = train(Script(folder=tmp_path / "job", happenings=happenings), 3)
    assert [end["steps"] for end in story.ends()] == [6, 6]
    assert sorted(story.applied_samples()) == all_samples(1)


@pytest.mark.parametrize("is_alone", [False, True], ids=["shared memory", "TCP"])
def test_a_worker_has_no_more_descriptors_open_after_many_worlds_than_after_two(
    tmp_path: Path, is_alone: bool
) -> None:
    num_worlds = 12

    def change_often(agent: FakeAgent, folder: Path) -> None:
        for generation in range(1, num_worlds):
            wanted = 2 * generation
            agent.run_until(lambda wanted=wanted: Story.read(folder).held() == wanted)
            agent.change([0, 1], polite=generation % 2 == 0)

    held = [
        At(local_rank=rank, point="begin", step=3 * generation, action="hold")
        for generation in range(1, num_worlds)
        for rank in range(2)
    ]
    script = Script(folder=tmp_path / "job", epochs=6, happenings=held, is_alone=is_alone)
    story = train(script, 2, change_often)
    assert [end["generation"] for end in story.ends()] == [num_worlds] * 2
    for log in story.logs.values():
        # The least: what a World has left behind may be closed a little later, by threads.
        least = {
            generation: min(
                entry["descriptors"]
                for entry in log
                if entry["what"] == "committed" and entry["generation"] == generation
            )
            for generation in range(1, num_worlds + 1)
        }
        # The third World is the first that was entered politely, as every other one from there on.
        assert max(least[generation] for generation in range(4, num_worlds + 1)) <= max(least[2], least[3])
