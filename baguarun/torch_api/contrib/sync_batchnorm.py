"""Bagua's `contrib.sync_batchnorm` module: torch's layer.

As Bagua's it trains on CUDA only. Its `process_group` is torch's: give `group.torch_group` of a Bagua group.
"""

from __future__ import annotations

from torch.nn import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
