"""An exchange of weights that has come to one survivor and not to another when a third rank is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baguarun.comm.algorithms import Algorithm, Decentralized, DiLoCo, LocalSGD
from tests.elastic.training.fake_agent import FakeAgent
from tests.elastic.training.jobs import samples_dealt_again, weights_at
from tests.elastic.training.resized import At, Script, Story, all_samples, run_script

EVERY = 5


def break_an_exchange(folder: Path, algorithm: Algorithm, point: str) -> Story:
    """Of three ranks the second is lost in the exchange of the fifth step, which begins behind `point`."""
    # Of weights of over 64 KiB, in three blocks that each rank sends four times.
    half_sent = At(local_rank=1, point=point, step=EVERY - 1, action="die in the ring", num_sends=3)
    # Who has it goes on to the next step.
    stopped = [
        At(local_rank=rank, point="begin", step=EVERY, generation=1, action=action)
        for action in ("hold", "break")
        for rank in (0, 2)
    ]
    script = Script(
        folder=folder,
        happenings=[half_sent, *stopped],
        algorithm=algorithm,
        epochs=3,
        batch_size=1,
        width=2200,
        is_alone=True,
        shows_weights=True,
    )
    folder.mkdir()
    with FakeAgent(run_script, script) as agent:
        # Membership hears of it when somebody has all.
        agent.at_loss = lambda _lost: None
        agent.at_suspicion = lambda _suspicion: None
        agent.start(3)
        agent.run_until(lambda: Story.read(folder).holding() > 0 and agent.losses == [1])
        agent.shrink(1)
        agent.run_to_the_end()
    return Story.read(folder)


def weights_of(log: list[dict[str, Any]], what: str, generation: int) -> Any:
    """The last ones in the log of that World."""
    return [entry["weights"] for entry in log if entry["what"] == what and entry["generation"] == generation][
        -1
    ]


@pytest.mark.parametrize("algorithm", [LocalSGD(local_steps=EVERY), DiLoCo(local_steps=EVERY)], ids=str)
def test_an_average_that_one_has_and_another_has_not_is_not_lost_and_the_next_one_makes_all_equal(
    tmp_path: Path, algorithm: Algorithm
) -> None:
    story = break_an_exchange(tmp_path / "job", algorithm, "backward")
    assert story.holding() == 1
    survivors = [log for log in story.logs.values() if log[-1]["what"] == "end"]
    one, other = (weights_of(log, "committed", 1) for log in survivors)
    assert one != other
    assert [weights_of(log, "enters", 2) for log in survivors] == [one, other]
    # What the lost one had trained on is in the weights of one of them.
    assert samples_dealt_again(story) == 0
    # Alike on all.
    assert weights_at(story, 2 * EVERY)


def test_a_mixture_that_one_has_and_another_has_not_has_all_that_went_into_it(tmp_path: Path) -> None:
    algorithm = Decentralized(communication_interval=EVERY - 1)
    story = break_an_exchange(tmp_path / "job", algorithm, "begin")
    assert story.holding() == 1
    # Of the fifth step itself only one of them has come to its end.
    assert [end["lost"] for end in story.ends()] == [2, 2]
    trained = story.trained_samples()
    assert len(trained) == len(set(trained))
    missing = set(all_samples(3)) - set(trained)
    assert len(missing) == EVERY - 1 and missing <= set(story.samples_of_the_dead())
