"""Bagua's algorithm modules, by Bagua's names."""

from __future__ import annotations

from baguarun.torch_api.algorithms import bytegrad, gradient_allreduce

__all__ = ["bytegrad", "gradient_allreduce"]
