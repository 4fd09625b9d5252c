"""Bagua's `utils` module: several tensors as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from baguarun.errors import ArgumentError

__all__ = [
    "apply_flattened_call",
    "apply_flattened_call_all",
    "check_contiguous",
    "flatten",
    "get_flattened_tensor",
    "unflatten",
]


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """All elements, one tensor after the other, in one dimension: a copy, but a view of a single tensor.

    Raises `ArgumentError` for no tensor, or for several dtypes, which would be converted.
    """
    if not tensors or len({tensor.dtype for tensor in tensors}) != 1:
        found = ", ".join(sorted({str(tensor.dtype) for tensor in tensors})) or "none"
        raise ArgumentError(f"flatten: found tensors of {found}; want one or more of one dtype")
    flat: torch.Tensor = _flatten_dense_tensors(list(tensors))  # type: ignore[no-untyped-call]
    return flat


def unflatten(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Views of `flat`, of one dimension, with the shapes of `tensors`, in their order."""
    views: tuple[torch.Tensor, ...]
    views = _unflatten_dense_tensors(flat, list(tensors))  # type: ignore[no-untyped-call]
    return views


def get_flattened_tensor(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """`flatten` into memory of its own; None for no tensor."""
    if not tensors:
        return None
    flat = flatten(tensors)
    return flat.clone() if len(tensors) == 1 else flat


def check_contiguous(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether each tensor begins in memory where the one before it ends."""
    end = None
    for tensor in tensors:
        if end is not None and tensor.data_ptr() != end:
            return False
        end = tensor.data_ptr() + tensor.nbytes
    return True


def apply_flattened_call(
    bucket: Sequence[torch.Tensor], call: Callable[..., Any], extra_args: Sequence[Any] | None = None
) -> None:
    """Call `call(flat, *extra_args)` on the flattened `bucket` and copy the result back into its tensors.

    After `dist.all_reduce` itself the result is divided by the number of ranks, as in Bagua.
    """
    flat = get_flattened_tensor(bucket)
    if flat is None:
        return
    call(flat, *(extra_args or ()))
    if call is dist.all_reduce:
        flat /= dist.get_world_size()
    for tensor, result in zip(bucket, unflatten(flat, bucket), strict=True):
        tensor.detach().copy_(result)


def apply_flattened_call_all(tensors: Iterable[torch.Tensor], call: Callable[..., Any]) -> None:
    """`apply_flattened_call` on the tensors of each dtype and device, in the order of the first of each."""
    groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for group in groups.values():
        apply_flattened_call(group, call)
