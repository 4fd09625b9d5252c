"""The same training on other numbers of ranks: the same gradients, and every sample once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from baguarun.comm.algorithms import Decentralized
from baguarun.elastic import ElasticSampler
from tests.comm.ranks import run_ranks
from tests.elastic.training.programs import (
    SAMPLES,
    Interrupted,
    make_data,
    make_loader,
    make_state,
    train,
    weights_of,
)

Life = tuple[list[tuple[int, int]], list[np.ndarray], int]


def live(folder: Path, batch_size: int, stop_in_step: int | None, policy: str, algorithm: str) -> Life:
    """One life of the job on this rank: what it committed to have seen, and its weights."""
    state = make_state(folder, algorithm=algorithm, dropout=0, normalise=nn.LayerNorm)
    try:
        train(state, make_loader(batch_size, policy=policy), 1, stop_in_step)
    except Interrupted:
        state.close()
    return state.seen, weights_of(state), state.committed_steps


def run_lives(
    folder: Path,
    worlds: list[tuple[int, int | None]],
    policy: str = "constant",
    algorithm: str = "gradient_allreduce",
) -> list[list[Life]]:
    """Lives of (number of ranks, step to stop in), one after the other; `batch_size` is 12 over the first."""
    batch_size = 12 // worlds[0][0]
    return [
        run_ranks(live, world_size, folder, batch_size, stop, policy, algorithm)
        for world_size, stop in worlds
    ]


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_the_gradient_is_that_of_the_whole_batch_on_any_number_of_ranks(tmp_path, world_size):
    """Begun on one rank with 12 samples per step, gone on with on several: the 62nd has too few for all."""
    [alone] = run_lives(tmp_path / "one", [(1, None)])
    begun, ended = run_lives(tmp_path / "some", [(1, 2), (world_size, None)])
    for _, weights, steps in ended:
        assert steps == 6
        for mine, wanted in zip(weights, alone[0][1], strict=True):
            np.testing.assert_allclose(mine, wanted, rtol=1e-4, atol=1e-5)
    assert begun[0][2] == 2


@pytest.mark.parametrize("policy", ["constant", "fixed_per_worker", "scale_lr"])
def test_every_sample_of_an_epoch_is_seen_once_whatever_the_world(tmp_path, policy):
    lives = run_lives(tmp_path, [(3, 1), (2, 3), (4, None)], policy)
    # `seen` of rank 0 is the same for all that go on from its checkpoint; the ranks' own additions differ.
    committed = [sample for life in lives for sample in _new_samples(life)]
    assert sorted(committed) == [(0, name) for name in range(SAMPLES)]


def _new_samples(life: list[Life]) -> list[tuple[int, int]]:
    """What the ranks of a life have seen beyond what they began with, which is alike for all."""
    shortest = min(len(seen) for seen, _, _ in life)
    common = 0
    while common < shortest and len({seen[common] for seen, _, _ in life}) == 1:
        common += 1
    return [sample for seen, _, _ in life for sample in seen[common:]]


def weights_after_part_of_a_step(policy: str) -> tuple[int, float]:
    dist.barrier()
    sampler = ElasticSampler(range(100), 4, policy=policy)
    sampler.load_state_dict({**sampler.state_dict(), "first_world_size": 1})
    return sampler.global_batch, sampler.lr_factor


@pytest.mark.parametrize(
    ("policy", "wanted"), [("constant", (4, 1.0)), ("fixed_per_worker", (12, 1.0)), ("scale_lr", (12, 3.0))]
)
def test_policies_say_what_becomes_of_batch_and_learning_rate(policy, wanted):
    assert run_ranks(weights_after_part_of_a_step, 3, policy) == [wanted] * 3


def first_step_with(sampler: ElasticSampler, first_world_size: int | None) -> tuple[int, float]:
    """Samples of the step, and what learning rates are multiplied by."""
    if first_world_size is not None:
        sampler.load_state_dict({**sampler.state_dict(), "first_world_size": first_world_size})
    state = make_state(None, normalise=nn.LayerNorm)
    [*_] = next(state.steps(DataLoader(make_data(), batch_sampler=sampler)))
    state.commit()
    return sampler.cursor, sampler.lr_factor


@pytest.mark.parametrize(
    ("policy", "first_world_size", "wanted"),
    [
        ("constant", None, (8, 1.0)),
        ("scale_lr", None, (8, 1.0)),
        ("constant", 3, (12, 1.0)),
        ("scale_lr", 1, (8, 2.0)),
    ],
)
def test_training_begins_on_as_many_as_there_are_though_the_sampler_was_made_before_the_group(
    policy: str, first_world_size: int | None, wanted: tuple[int, float]
) -> None:
    """Unless it was put where another World has begun."""
    sampler = ElasticSampler(make_data(), 4, policy=policy)
    assert run_ranks(first_step_with, 2, sampler, first_world_size) == [wanted] * 2


def replicas_go_on(folder: Path, world_size: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    algorithm = Decentralized(peer_selection_mode="shift_one", communication_interval=3)
    state = make_state(folder, algorithm=algorithm, every_steps=0, normalise=nn.LayerNorm)
    if dist.get_world_size() == world_size:
        try:
            train(state, make_loader(6), 1, 4)
        except Interrupted:
            before = weights_of(state)
            state.save()
    else:
        before = []
        assert state.load()
    return before, weights_of(state)


def test_replicas_that_differ_come_back_each_as_it_was_and_elsewhere_as_their_average(tmp_path):
    replicas = [before for before, _ in run_ranks(replicas_go_on, 2, tmp_path, 2)]
    assert not np.array_equal(replicas[0][0], replicas[1][0])
    for _, weights in run_ranks(replicas_go_on, 3, tmp_path, 2):
        for mine, *theirs in zip(weights, *replicas, strict=True):
            np.testing.assert_allclose(mine, sum(theirs) / 2, rtol=1e-5, atol=1e-6)


def load_only(folder: Path) -> list[np.ndarray]:
    algorithm = Decentralized(peer_selection_mode="shift_one", communication_interval=3)
    state = make_state(folder, algorithm=algorithm, every_steps=0, normalise=nn.LayerNorm)
    assert state.load()
    return weights_of(state)


def test_on_as_many_ranks_each_replica_is_its_own_again(tmp_path):
    replicas = [before for before, _ in run_ranks(replicas_go_on, 2, tmp_path, 2)]
    for mine, kept in zip(run_ranks(load_only, 2, tmp_path), replicas, strict=True):
        assert all(map(np.array_equal, mine, kept))


class CountingNorm(nn.LayerNorm):
    """With a buffer that is shared once per step, however many forwards a rank has in it."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        return super().forward(inputs)


def train_unevenly() -> tuple[list[int], float]:
    """Shares of 3, 3 and 2 samples in micro-batches of 2 at most, seven times; then 2, 2 and 2."""
    state = make_state(None, dropout=0, normalise=CountingNorm)
    loader = make_loader(2)
    loader.batch_sampler.load_state_dict({**loader.batch_sampler.state_dict(), "first_world_size": 4})
    counts = []
    for micro_batches in state.steps(loader):
        counts.append(len(micro_batches))
        for inputs, wanted, _ in micro_batches:
            nn.functional.mse_loss(state.model(inputs), wanted).backward()
        state.optimizer.step()
        state.commit()
    return counts, state.model.module[1].forwards.item()


def test_ranks_with_more_micro_batches_than_others_stay_in_step():
    (counts, forwards), (_, second), (others, third) = run_ranks(train_unevenly, 3)
    assert counts == [2] * 7 + [1]
    assert others == [1] * 8
    # Each step begins with rank 0's count; alone, the last rank would have come to 8.
    assert forwards == second == third == 15
