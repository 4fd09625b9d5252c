"""Bagua's `bytegrad` module."""

from __future__ import annotations

from baguarun.comm.algorithms import ByteGrad

__all__ = ["ByteGradAlgorithm"]


def ByteGradAlgorithm(hierarchical: bool = True, average: bool = True) -> ByteGrad:
    """Gradient averaging with 8 bits per number; `hierarchical`: only what leaves a node is compressed."""
    return ByteGrad(hierarchical=hierarchical, average=average)
