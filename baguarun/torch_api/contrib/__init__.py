"""Of Bagua's `contrib` package what costs nothing to have; what is left out says what to use instead."""

from __future__ import annotations

from baguarun.torch_api.contrib.fuse.optimizer import fuse_optimizer
from baguarun.torch_api.left_out import left_out

__all__ = ["fuse_optimizer"]

_SAMPLER = (
    "samples are not sorted by what they cost; want torch.utils.data.DistributedSampler, or "
    "baguarun.elastic.ElasticSampler where ranks may do unequal work (docs/elastic.md)"
)
_CACHE = "it wants a Redis server on each node; keep what is dear to make in files, as in a torch Dataset"

__getattr__ = left_out(
    __name__,
    {
        "LoadBalancingDistributedSampler": _SAMPLER,
        "LoadBalancingDistributedBatchSampler": _SAMPLER,
        "CachedDataset": _CACHE,
        "CacheLoader": _CACHE,
    },
)
