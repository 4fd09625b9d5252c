"""Bagua's `data_parallel` package: its wrapper with torch's names."""

from __future__ import annotations

from baguarun.torch_api.data_parallel.distributed import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
