"""Bagua's `gradient_allreduce` module."""

from __future__ import annotations

from baguarun.comm.algorithms import GradientAllReduce
from baguarun.errors import UsageError

__all__ = ["GradientAllReduceAlgorithm"]


def GradientAllReduceAlgorithm(hierarchical: bool = False, average: bool = True) -> GradientAllReduce:
    """Gradient averaging. `hierarchical=True` is refused: it is not there yet."""
    if hierarchical:
        raise UsageError("GradientAllReduceAlgorithm: hierarchical=True is not there yet; want False")
    return GradientAllReduce(average=average)
