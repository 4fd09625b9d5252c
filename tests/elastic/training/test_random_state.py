from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy
import pytest
import torch

from baguarun.elastic.training.random_state import RandomState

DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: float(torch.rand(())),
    "python": random.random,
    "numpy": numpy.random.random,
    # Every other one comes from what the one before has left, and draws nothing.
    "numpy_normal": numpy.random.standard_normal,
}


@pytest.fixture(autouse=True)
def usual_generator() -> Iterator[None]:
    before = numpy.random.get_bit_generator()
    yield
    numpy.random.set_bit_generator(before)


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_what_was_drawn_since_the_last_take_is_drawn_again(draw: Callable[[], float], steps: int) -> None:
    kept = RandomState()
    for _ in range(steps):
        kept.take()
        drawn = draw()
    kept.put_back()
    assert draw() == drawn


@pytest.mark.parametrize("steps", [1, 2])
def test_another_generator_in_numpys_place_is_kept_as_well(steps: int) -> None:
    kept = RandomState()
    kept.take()
    numpy.random.set_bit_generator(numpy.random.PCG64(7))
    for _ in range(steps):
        kept.take()
        drawn = [numpy.random.standard_normal(), numpy.random.standard_normal()]
    kept.put_back()
    assert [numpy.random.standard_normal(), numpy.random.standard_normal()] == drawn


SEEDS: dict[str, Callable[[int], None]] = {"python": random.seed, "numpy": numpy.random.seed}


@pytest.mark.parametrize("name", SEEDS)
def test_a_generator_that_was_seeded_anew_is_told_from_itself(name: str) -> None:
    kept = RandomState()
    SEEDS[name](1)
    kept.take()
    # All seeds have some numbers in common.
    SEEDS[name](2)
    kept.take()
    drawn = DRAWS[name]()
    SEEDS[name](1)
    kept.put_back()
    assert DRAWS[name]() == drawn


def test_nothing_drawn_leaves_all_as_it_is() -> None:
    kept = RandomState()
    kept.take()
    kept.take()
    kept.put_back()
    first = numpy.random.random()
    kept.put_back()
    assert numpy.random.random() == first
