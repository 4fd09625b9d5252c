"""Bagua's `tensor` module, for the message: torch's Tensor is not patched."""

from __future__ import annotations

from baguarun.torch_api.left_out import left_out

__getattr__ = left_out(
    __name__,
    {
        "BaguaTensor": "the engine takes parameters as they are; for an algorithm of your own see "
        "docs/writing_an_algorithm.md"
    },
)
