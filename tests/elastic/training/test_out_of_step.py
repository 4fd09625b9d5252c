"""Resized in place with algorithms whose replicas differ, and whose ranks may be steps apart."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from baguarun.comm.algorithms import (
    Algorithm,
    AsyncModelAverage,
    Decentralized,
    DiLoCo,
    LocalSGD,
    LowPrecisionDecentralized,
)
from tests.elastic.training.fake_agent import FakeAgent
from tests.elastic.training.jobs import leave_at, replace_the_lost, train
from tests.elastic.training.resized import At, Script, Story, all_samples

RELAXED = [
    LocalSGD(local_steps=2),
    DiLoCo(local_steps=2),
    Decentralized(),
    LowPrecisionDecentralized(),
    AsyncModelAverage(),
]


@pytest.mark.parametrize("algorithm", RELAXED, ids=lambda algorithm: algorithm.name)
def test_ranks_out_of_step_repeat_no_sample_of_a_survivor(tmp_path: Path, algorithm: Algorithm) -> None:
    """What a lost worker had trained on alone is all that may be missing, and a newcomer joins."""

    lost = At(local_rank=1, point="stepped", step=3)
    held = At(local_rank=0, point="begin", step=30, action="hold")
    # An epoch is longer than ranks can be apart.
    script = Script(
        folder=tmp_path / "job", epochs=3, happenings=[lost, held], algorithm=algorithm, batch_size=1
    )
    story = train(script, 3, replace_the_lost)
    ends = story.ends()
    assert len(ends) == 3
    assert len({end["steps"] for end in ends}) == len({end["rate"] for end in ends}) == 1
    trained = story.trained_samples()
    assert len(trained) == len(set(trained))
    missing = set(all_samples(3)) - set(trained)
    assert missing <= set(story.samples_of_the_dead())


@pytest.mark.parametrize(
    ("algorithm", "shared"),
    [
        (LocalSGD(local_steps=2), 4),
        (LocalSGD(local_steps=2, warmup_steps=3), 5),
        (DiLoCo(local_steps=3), 3),
        (Decentralized(peer_selection_mode="all"), 4),
        (LowPrecisionDecentralized(), 4),
        (AsyncModelAverage(warmup_steps=10), 5),
    ],
    ids=str,
)
def test_what_a_lost_worker_had_not_shared_is_counted_and_what_follows_a_commit_is_done(
    tmp_path: Path, algorithm: Algorithm, shared: int
) -> None:
    """The exchange that breaks may come behind an optimizer's step, which then counts and is committed."""
    lost = At(local_rank=1, point="begin", step=5)
    script = Script(folder=tmp_path / "job", epochs=3, happenings=[lost], algorithm=algorithm, batch_size=1)
    story = train(script, 3)
    survivors = [log for log in story.logs.values() if log[-1]["what"] == "end"]
    assert len(survivors) == 2
    steps = []
    for log in survivors:
        committed = [entry["step"] for entry in log if entry["what"] == "committed"]
        steps.append(
            max(entry["step"] for entry in log if entry["what"] == "committed" and entry["generation"] == 1)
        )
        # One that is behind counts on as the one that is ahead.
        assert committed[: steps[-1]] == list(range(1, steps[-1] + 1))
        applied = [entry for entry in log if entry["what"] == "applied" and entry["generation"] == 1]
        assert len(applied) == steps[-1]
    # One sample was dealt to it in each step that anybody has done.
    assert [log[-1]["lost"] for log in survivors] == [max(steps) - shared] * 2
    trained = story.trained_samples()
    assert len(trained) == len(set(trained))
    of_the_dead = set(story.samples_of_the_dead())
    assert (
        len(set(all_samples(3)) - set(trained)) == shared
        and set(all_samples(3)) - set(trained) <= of_the_dead
    )


def test_what_a_lost_worker_had_shared_with_async_is_what_rounds_that_ended_began_with(
    tmp_path: Path,
) -> None:
    """It is lost in its sixth step. Rounds start after the steps 1, 4 and 7: the last one may have broken."""
    lost = At(local_rank=1, point="begin", step=5)
    algorithm = AsyncModelAverage(sync_interval_ms=10**6, max_staleness_steps=3)
    script = Script(folder=tmp_path / "job", epochs=3, happenings=[lost], algorithm=algorithm, batch_size=1)
    story = train(script, 3)
    survivors = [log for log in story.logs.values() if log[-1]["what"] == "end"]
    applied = [
        sum(entry["what"] == "applied" and entry["generation"] == 1 for entry in log) for log in survivors
    ]
    trained = story.trained_samples()
    assert len(trained) == len(set(trained))
    missing = set(all_samples(3)) - set(trained)
    assert len(missing) in (1, 4) and missing <= set(story.samples_of_the_dead())
    # One sample is dealt to each rank in a step that anybody has done, and dealt again if its rank, also a
    # slower survivor, had not come to it. Of a step whose end waited for a round that broke there is no line.
    (lost_samples,) = {log[-1]["lost"] for log in survivors}
    assert lost_samples in {
        max(done) - len(missing) + sum(max(done) - each for each in done)
        for done in itertools.product(*((lines, lines + 1) for lines in applied))
    }


TRAINS_ALONE = pytest.mark.parametrize(
    "algorithm",
    [
        DiLoCo(local_steps=1000),
        LocalSGD(local_steps=1000),
        AsyncModelAverage(),
        LowPrecisionDecentralized(communication_interval=1000),
    ],
    ids=lambda algorithm: algorithm.name,
)


def assert_all_enter_with_the_average(story: Story, *, before: int, after: int) -> None:
    """Of so many ranks' weights at the first World's last commit, which differ."""
    commits = [[each for each in log if each["what"] == "committed"] for log in story.logs.values()]
    firsts = [[each for each in log if each["generation"] == 1] for log in commits]
    last = [first[-1] for first in firsts if first]
    assert len(last) == before and len({each["step"] for each in last}) == 1
    ranks = [[torch.tensor(value) for value in each["weights"]] for each in last]
    assert any(not torch.equal(one, other) for one, other in zip(ranks[0], ranks[1], strict=True))
    average = [sum(values) / before for values in zip(*ranks, strict=True)]
    entered = [
        [torch.tensor(value) for value in each["weights"]]
        for log in story.logs.values()
        for each in log
        if each["what"] == "enters" and each["generation"] == 2
    ]
    assert len(entered) == after
    for weights in entered:
        torch.testing.assert_close(weights, average)
        assert all(torch.equal(one, other) for one, other in zip(weights, entered[0], strict=True))


@TRAINS_ALONE
def test_what_somebody_has_trained_on_alone_stays_when_it_leaves(
    tmp_path: Path, algorithm: Algorithm
) -> None:
    story = leave_at(
        tmp_path / "job", step=3, algorithm=algorithm, epochs=3, batch_size=1, shows_weights=True
    )
    assert_all_enter_with_the_average(story, before=3, after=2)
    trained = story.trained_samples() + story.samples_of_the_dead()
    assert sorted(trained) == all_samples(3)


@TRAINS_ALONE
def test_a_newcomer_begins_with_the_average_of_what_each_has_trained_on_alone(
    tmp_path: Path, algorithm: Algorithm
) -> None:
    held = [At(local_rank=rank, point="begin", step=2, action="hold") for rank in range(2)]
    script = Script(
        folder=tmp_path / "job",
        happenings=held,
        algorithm=algorithm,
        epochs=3,
        batch_size=1,
        shows_weights=True,
    )

    def join(agent: FakeAgent, folder: Path) -> None:
        newcomer = agent.start_newcomer(2)
        agent.run_until(lambda: newcomer.ready is not None and Story.read(folder).holding() == 2)
        agent.change([0, 1, 2], polite=True)

    story = train(script, 2, join)
    assert_all_enter_with_the_average(story, before=2, after=3)
    assert sorted(story.trained_samples()) == all_samples(3)
