"""Bagua's `gradient_allreduce` module."""

from __future__ import annotations

from baguarun.comm.algorithms import GradientAllReduce

__all__ = ["GradientAllReduceAlgorithm"]


class GradientAllReduceAlgorithm(GradientAllReduce):
    """Gradient averaging; with `hierarchical` a node sums up its gradients before anything leaves it."""

    def __init__(self, hierarchical: bool = False, average: bool = True) -> None:
        super().__init__(hierarchical=hierarchical, average=average)
