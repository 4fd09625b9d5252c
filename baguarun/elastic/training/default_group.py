"""torch's default group, as the ranks that train together use it between steps."""

from __future__ import annotations

import torch
import torch.distributed as dist


def has_others() -> bool:
    """Whether this process is one of several."""
    return dist.is_initialized() and dist.get_world_size() > 1


def device() -> torch.device:
    """Where tensors have to be for the default group to send them."""
    has_cuda = "nccl" in dist.get_backend()
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda else torch.device("cpu")
