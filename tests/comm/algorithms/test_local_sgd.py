from __future__ import annotations

import pytest
import torch

from baguarun.comm.algorithms import LocalSGD, resolve
from baguarun.errors import UsageError
from tests.comm.algorithms.simulation import (
    assert_same_training,
    run_for_tensors,
    simulate,
    train,
    train_each,
)

STEPS = 8


@pytest.mark.parametrize(
    ("world_size", "backend", "micro_batches"), [(2, "gloo", 1), (3, "baguanet", 2), (4, "baguanet", 1)]
)
def test_every_step_is_that_of_the_written_out_averaging(
    world_size: int, backend: str, micro_batches: int
) -> None:
    algorithms = [LocalSGD(local_steps=3), LocalSGD(local_steps=2, warmup_steps=3), LocalSGD(local_steps=1)]
    found = run_for_tensors(train_each, world_size, algorithms, STEPS, micro_batches, backend=backend)
    for index, algorithm in enumerate(algorithms):

        def average(step: int, weights: torch.Tensor, algorithm: LocalSGD = algorithm) -> torch.Tensor:
            local = step + 1 - algorithm.warmup_steps
            if local < 1 or local % algorithm.local_steps != 0:
                return weights
            return weights.mean(0, keepdim=True).expand_as(weights)

        expected = simulate(
            world_size,
            STEPS,
            after_step=average,
            warmup_steps=algorithm.warmup_steps,
            micro_batches=micro_batches,
        )
        assert_same_training([each[index] for each in found], expected)


def train_in_bf16() -> torch.Tensor:
    return train(LocalSGD(local_steps=2), 4, dtype=torch.bfloat16)


@pytest.mark.parametrize("backend", ["gloo", "baguanet"])
def test_replicas_are_bit_identical_after_an_average_in_bf16(backend: str) -> None:
    first, second, third = run_for_tensors(train_in_bf16, 3, backend=backend)
    assert not torch.equal(first[0], second[0])
    for step in (1, 3):
        assert torch.equal(first[step], second[step])
        assert torch.equal(first[step], third[step])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"local_steps": 0}, "local_steps=0; want 1 <= local_steps"),
        ({"warmup_steps": -1}, "warmup_steps=-1; want 0 <= warmup_steps"),
    ],
)
def test_a_setting_out_of_range_is_refused_with_its_range(settings: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        LocalSGD(**settings)


def test_it_is_known_by_name() -> None:
    assert resolve("local_sgd") == LocalSGD()
