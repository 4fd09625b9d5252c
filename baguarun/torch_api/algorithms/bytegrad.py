"""Bagua's `bytegrad` module."""

from __future__ import annotations

from baguarun.comm.algorithms import ByteGrad

__all__ = ["ByteGradAlgorithm"]


class ByteGradAlgorithm(ByteGrad):
    """Gradient averaging with 8 bits per number; `hierarchical`: only what leaves a node is compressed."""

    def __init__(self, hierarchical: bool = True, average: bool = True) -> None:
        super().__init__(hierarchical=hierarchical, average=average)
