"""Gives every rank of a group what its rank 0 has."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from baguarun.comm.extension import load_extension
from baguarun.errors import CommunicationError

_BUFFER_BYTES = 32 * 2**20


def real_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as real numbers, which is what is sent."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def broadcast_tensors(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Overwrite `tensors`, real and of any dtypes, by rank 0's. Raises `CommunicationError`."""
    if not tensors:
        return
    try:
        with torch.no_grad():
            _coalesced()(group, tensors, _BUFFER_BYTES)
    except RuntimeError as error:
        raise CommunicationError(
            f"broadcast of {len(tensors)} tensors from rank 0 failed: {error}"
        ) from error


def broadcast_buffers(buffers: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """As `broadcast_tensors`, between forwards: a graph that keeps buffers for its backward stays usable."""
    with _unsafe_preserve_version_counter(tuple(buffers)):
        broadcast_tensors(buffers, group)


@functools.cache
def _coalesced() -> Callable[[dist.ProcessGroup, list[torch.Tensor], int], None]:
    """Looked up once: buffers are sent before every forward."""
    call: Callable[[dist.ProcessGroup, list[torch.Tensor], int], None] = load_extension().broadcast_coalesced
    return call


def broadcast_optimizer_state(optimizers: Sequence[torch.optim.Optimizer], group: dist.ProcessGroup) -> None:
    """Give every rank rank 0's optimizer state, if it has any (a job that goes on from a checkpoint)."""
    if not optimizers:
        return
    root = dist.get_global_rank(group, 0)
    states: list[Any] = [[optimizer.state_dict() if optimizer.state else None for optimizer in optimizers]]
    dist.broadcast_object_list(states, src=root, group=group)
    if dist.get_rank(group) == 0:
        return
    for optimizer, state in zip(optimizers, states[0], strict=True):
        if state is not None:
            optimizer.load_state_dict(state)
