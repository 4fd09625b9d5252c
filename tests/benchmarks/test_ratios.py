"""Ratios are taken pair by pair, and their bound is honest and repeatable."""

from __future__ import annotations

import random

import pytest

from benchmarks.ratios import Summary, paired_ratio


def test_a_ratio_is_the_median_of_pairs_and_not_the_ratio_of_medians() -> None:
    # The machine was twice as slow during the last pair: it says nothing about who is faster.
    ratio = paired_ratio([1.0, 1.0, 2.0], [2.0, 2.0, 4.0])
    assert (ratio.median, ratio.upper95, ratio.pairs) == (0.5, 0.5, 3)


def test_the_bound_lies_between_the_median_and_the_worst_pair() -> None:
    ratio = paired_ratio([0.8, 0.9, 1.0, 1.1, 1.5], [1.0] * 5)
    assert ratio.median == 1.0
    assert 1.0 <= ratio.upper95 <= 1.5


def test_the_same_series_give_the_same_bound() -> None:
    ours = [0.9, 1.05, 0.97, 1.2, 0.88, 1.01]
    assert paired_ratio(ours, [1.0] * 6) == paired_ratio(ours, [1.0] * 6)


def test_the_bound_holds_about_as_often_as_it_says() -> None:
    rng = random.Random(7)
    trials = 100
    held = 0
    for _ in range(trials):
        ours = [rng.lognormvariate(0.0, 0.2) for _ in range(10)]
        held += paired_ratio(ours, [1.0] * 10).upper95 >= 1.0
    assert held >= 0.85 * trials


@pytest.mark.parametrize("ours, theirs", [([], []), ([1.0], [1.0, 2.0])])
def test_series_without_pairs_are_refused(ours: list[float], theirs: list[float]) -> None:
    with pytest.raises(ValueError, match="values"):
        paired_ratio(ours, theirs)


def test_a_summary_keeps_the_ends_of_the_series() -> None:
    assert Summary.of([3.0, 1.0, 2.0]) == Summary(median=2.0, low=1.0, high=3.0, count=3)
