"""Bagua's `bucket` module, for the message: its buckets belong to its engine."""

from __future__ import annotations

from baguarun.torch_api.left_out import left_out

__getattr__ = left_out(
    __name__,
    {
        "BaguaBucket": "buckets are the engine's own; say what happens to them by a subclass of "
        "baguarun.comm.algorithms.Algorithm (docs/writing_an_algorithm.md)"
    },
)
