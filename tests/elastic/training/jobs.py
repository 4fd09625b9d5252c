"""Jobs of the resized script, told of Worlds in ways that tests have in common."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.elastic.training.fake_agent import FakeAgent
from tests.elastic.training.resized import At, Script, Story, all_samples, run_script

During = Callable[[FakeAgent, Path], None]


def train(script: Script, world_size: int, during: During | None = None) -> Story:
    script.folder.mkdir()
    with FakeAgent(run_script, script) as agent:
        agent.start(world_size)
        if during is not None:
            during(agent, script.folder)
        agent.run_to_the_end()
    return Story.read(script.folder)


def change_when_held(members: list[int], holding: int) -> During:
    """As soon as so many workers hold, the World is changed politely."""

    def during(agent: FakeAgent, folder: Path) -> None:
        agent.run_until(lambda: Story.read(folder).holding() == holding)
        leavers = [agent.workers[each] for each in agent.members if each not in members]
        agent.change(members, polite=True)
        agent.run_until(lambda: all(leaver.is_gone for leaver in leavers))
        assert [leaver.process.exitcode for leaver in leavers] == [0] * len(leavers)

    return during


def kill_when_held(local_rank: int, holding: int) -> During:
    """As soon as so many workers hold, that one is killed."""

    def during(agent: FakeAgent, folder: Path) -> None:
        agent.run_until(lambda: Story.read(folder).holding() == holding)
        agent.workers[local_rank].process.kill()

    return during


def leave_at(folder: Path, step: int, **settings: Any) -> Story:
    """Three workers, of which the second leaves when `step` steps are committed."""
    # Told before their optimizers step they leave behind that step.
    held = [At(local_rank=rank, point="begin", step=step - 1, action="hold") for rank in range(3)]
    return train(Script(folder=folder, happenings=held, **settings), 3, change_when_held([0, 2], 3))


def replace_the_lost(agent: FakeAgent, folder: Path) -> None:
    """Of three workers the second is lost; as soon as another one holds, its replacement joins."""
    agent.run_until(lambda: bool(agent.losses))
    newcomer = agent.start_newcomer(1)
    agent.run_until(lambda: newcomer.ready is not None and Story.read(folder).holding() == 1)
    agent.change([0, 2, 1], polite=True)


def same(one: Story, other: Story) -> bool:
    assert len(one.ends()) == len(other.ends()) > 0
    return [{**end, "pid": 0} for end in one.ends()] == [{**end, "pid": 0} for end in other.ends()]


def weights_at(story: Story, step: int) -> list[Any]:
    """Those right after that commit, alike on all who have come to it: two of the body, two of the head."""
    found = [
        entry["weights"]
        for log in story.logs.values()
        for entry in log
        if entry["what"] == "committed" and entry["step"] == step
    ]
    assert found
    assert all(each == found[0] for each in found)
    weights: list[Any] = found[0]
    return weights


def samples_dealt_again(story: Story, epochs: int = 3) -> int:
    """Of those that lost workers had trained on, which is all they were given. All other samples are in the
    survivors' weights once."""
    ends = story.ends()
    assert len({end["steps"] for end in ends}) == 1
    for end in ends:
        assert all(torch.tensor(value).isfinite().all() for value in end["weights"])
    trained, of_the_dead = story.trained_samples(), set(story.samples_of_the_dead())
    assert len(trained) == len(set(trained))
    assert set(all_samples(epochs)) - set(trained) <= of_the_dead
    again = len(of_the_dead & set(trained))
    assert [end["lost"] for end in ends] == [again] * len(ends)
    return again
