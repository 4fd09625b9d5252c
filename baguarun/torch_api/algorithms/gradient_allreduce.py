"""Bagua's `gradient_allreduce` module."""

from __future__ import annotations

from baguarun.comm.algorithms import GradientAllReduce

__all__ = ["GradientAllReduceAlgorithm"]


def GradientAllReduceAlgorithm(hierarchical: bool = False, average: bool = True) -> GradientAllReduce:
    """Gradient averaging; with `hierarchical` a node sums up its gradients before anything leaves it."""
    return GradientAllReduce(hierarchical=hierarchical, average=average)
