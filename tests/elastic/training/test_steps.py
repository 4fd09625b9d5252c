"""Steps that have too few samples for all ranks."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import baguarun
from baguarun.comm.algorithms import Algorithm, LocalSGD
from baguarun.elastic import ElasticSampler, State
from tests.comm.ranks import run_ranks

Step = tuple[list[float], list[float]]
"""What a rank was given, and its weights after it."""


def train_two_models(algorithm: Algorithm | None) -> list[Step]:
    """Used in another order than State holds them, and one of them in the first epoch only."""
    models = []
    for _ in range(2):
        torch.manual_seed(len(models))
        net = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        models.append(
            (baguarun.DistributedDataParallel(net, optimizers=[optimizer], algorithm=algorithm), optimizer)
        )
    (first, of_first), (second, of_second) = models
    state = State(first=first, of_first=of_first, second=second, of_second=of_second)
    data = torch.arange(5.0).unsqueeze(1)
    sampler = ElasticSampler(data, 4 // dist.get_world_size(), shuffle=False)
    steps = []
    for epoch in range(2):
        for micro_batches in state.steps(DataLoader(data, batch_sampler=sampler)):
            of_first.zero_grad()
            of_second.zero_grad()
            given: list[float] = []
            for batch in micro_batches:
                given += batch.flatten().tolist()
                second(batch).square().mean().backward()
                if epoch == 0:
                    (1 / first(batch)).mean().backward()
            of_second.step()
            if epoch == 0:
                of_first.step()
            state.commit()
            steps.append((given, [value.item() for model in (first, second) for value in model.parameters()]))
    return steps


@pytest.mark.parametrize("algorithm", [None, LocalSGD(local_steps=1000)], ids=str)
def test_a_rank_without_a_sample_does_the_script_s_step_of_several_models_with_one_that_counts_nothing(
    algorithm: Algorithm | None,
) -> None:
    [alone] = run_ranks(train_two_models, 1, algorithm)
    first, second = run_ranks(train_two_models, 2, algorithm, timeout=timedelta(seconds=15))
    assert [given for given, _ in first] == [[0, 1], [4], [0, 1], [4]]
    assert [given for given, _ in second] == [[2, 3], [4], [2, 3], [4]]
    weights = [found for _, found in second]
    if algorithm is None:
        for (_, wanted), (_, found), own in zip(alone, first, weights, strict=True):
            assert own == found == pytest.approx(wanted)
    else:
        assert weights[0] == weights[1] != weights[2] == weights[3]
