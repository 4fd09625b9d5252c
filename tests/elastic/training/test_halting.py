"""A job that is told to go as a whole, and is gone on with: nothing shows in the result."""

from __future__ import annotations

from pathlib import Path

import pytest

from baguarun.comm.algorithms import Algorithm, AsyncModelAverage, Decentralized, DiLoCo, LocalSGD
from tests.elastic.training.fake_agent import FakeAgent
from tests.elastic.training.jobs import During, same, train
from tests.elastic.training.resized import At, Script, Story, all_samples


def halt(*, told_first: list[int], world_size: int) -> During:
    """As soon as all whom it tells first hold, the job halts; the others hear of it when those have gone."""

    def during(agent: FakeAgent, folder: Path) -> None:
        agent.run_until(lambda: Story.read(folder).holding() == len(told_first))
        agent.halt(told_first)
        agent.run_until(lambda: all(agent.workers[rank].is_gone for rank in told_first))
        late = [rank for rank in range(world_size) if rank not in told_first]
        agent.run_until(lambda: all(agent.workers[rank].ready is not None for rank in late))
        agent.halt(late)
        agent.run_to_the_end()
        assert [worker.process.exitcode for worker in agent.everybody] == [0] * world_size

    return during


def held(step: int, *ranks: int) -> list[At]:
    return [At(local_rank=rank, point="begin", step=step - 1, action="hold") for rank in ranks]


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("told_first", [[0, 1, 2], [1]], ids=["all", "one first"])
@pytest.mark.parametrize(
    "algorithm",
    [None, LocalSGD(local_steps=2), DiLoCo(local_steps=2), Decentralized(peer_selection_mode="all")],
    ids=lambda algorithm: "gradients" if algorithm is None else algorithm.name,
)
def test_two_lives_end_with_the_bits_of_one(
    tmp_path: Path, algorithm: Algorithm | None, told_first: list[int]
) -> None:
    checkpoints = tmp_path / "kept"
    first = Script(
        folder=tmp_path / "first",
        algorithm=algorithm,
        checkpoints=checkpoints,
        happenings=held(3, *told_first),
    )
    story = train(first, 3, halt(told_first=told_first, world_size=3))
    assert story.ends() == []
    entries = [entry for log in story.logs.values() for entry in log]
    left_at = max(entry["step"] for entry in entries if entry["what"] == "committed")
    # Every second step has a checkpoint anyhow.
    assert kept(checkpoints)[-1] == f"step-{left_at:012}"
    second = train(Script(folder=tmp_path / "second", algorithm=algorithm, checkpoints=checkpoints), 3)
    whole = train(Script(folder=tmp_path / "whole", algorithm=algorithm), 3)
    assert same(second, whole)


def test_a_halt_at_a_commit_with_a_checkpoint_of_its_own_replaces_that_one(tmp_path: Path) -> None:
    checkpoints = tmp_path / "kept"
    settings = {"checkpoints": checkpoints, "algorithm": AsyncModelAverage(warmup_steps=2)}
    first = Script(folder=tmp_path / "first", happenings=held(4, 0, 1), **settings)
    story = train(first, 2, halt(told_first=[0, 1], world_size=2))
    second = train(Script(folder=tmp_path / "second", **settings), 2)
    samples = [
        tuple(sample)
        for log in (*story.logs.values(), *second.logs.values())
        for entry in log
        if entry["what"] == "given"
        for sample in entry["samples"]
    ]
    assert sorted(samples) == all_samples(1)


def test_a_job_that_halts_at_its_end_has_nothing_left_to_train(tmp_path: Path) -> None:
    checkpoints = tmp_path / "kept"
    undisturbed = train(Script(folder=tmp_path / "whole"), 2)
    steps = undisturbed.ends()[0]["steps"]
    last = Script(folder=tmp_path / "first", checkpoints=checkpoints, happenings=held(steps, 0, 1))
    assert train(last, 2, halt(told_first=[0, 1], world_size=2)).ends() == []
    second = train(Script(folder=tmp_path / "second", checkpoints=checkpoints), 2)
    assert [end["weights"] for end in second.ends()] == [end["weights"] for end in undisturbed.ends()]
    assert not any(entry["what"] == "given" for log in second.logs.values() for entry in log)
