"""Bagua's `bytegrad` module."""

from __future__ import annotations

from baguarun.comm.algorithms import ByteGrad

__all__ = ["ByteGradAlgorithm"]


def ByteGradAlgorithm(hierarchical: bool | None = None, average: bool = True) -> ByteGrad:
    """Gradient averaging with 8 bits per number.

    Bagua's default is `hierarchical=True`; here it is None, one flat exchange for the time being. Asking for
    True on several nodes with several workers each is refused at construction until it is there.
    """
    return ByteGrad(hierarchical=hierarchical, average=average)
