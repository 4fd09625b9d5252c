"""Bagua's own names: a Bagua script runs when its import line becomes `import baguarun.torch_api as bagua`.

Importing this package adds `with_bagua` to `torch.nn.Module`; nothing else in baguarun patches torch.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from baguarun.comm.groups import init_process_group, read_worker_env
from baguarun.torch_api import algorithms
from baguarun.torch_api.distributed import with_bagua

__all__ = [
    "algorithms",
    "get_local_rank",
    "get_local_size",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "with_bagua",
]


def get_rank() -> int:
    """Rank of this worker; from its environment before `init_process_group`."""
    return dist.get_rank() if dist.is_initialized() else read_worker_env().rank


def get_world_size() -> int:
    """Workers in all; from the environment before `init_process_group`."""
    return dist.get_world_size() if dist.is_initialized() else read_worker_env().world_size


def get_local_rank() -> int:
    """Rank of this worker on its node: the number of its device."""
    return read_worker_env().local_rank


def get_local_size() -> int:
    """Workers on this node."""
    return read_worker_env().local_world_size


nn.Module.with_bagua = with_bagua  # type: ignore[attr-defined]
