"""Steps that are unevenly shared: forwards that count more or less, and ranks that have nothing to add."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from baguarun.comm.models import map_tensors
from baguarun.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One part of a rank's share of a step."""

    weight_of_step: float = 1.0
    """What its gradient counts where gradients are averaged over the ranks."""
    weight_of_rank: float = 1.0
    """What it counts among this rank's parts, where gradients stay local."""
    is_first: bool = True
    is_last: bool = True

    def weight(self, *, of_step: bool) -> float:
        return self.weight_of_step if of_step else self.weight_of_rank


def weigh_gradients(output: Any, weight: float) -> Any:
    """What forward returned, with copies in place of its tensors: `weight` times their gradients go on.

    Copies, since one tensor may have been computed from another that was returned as well, and what comes
    through both is to be multiplied once; of the same memory they could not be changed in place, or would
    forget it. Raises `UsageError` if there is no tensor to be found.
    """
    found = False

    def weigh(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * weight

    def weighed(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal found
        found = True
        if not tensor.requires_grad:
            return tensor
        copied = tensor.clone()
        copied.register_hook(weigh)  # type: ignore[no-untyped-call]
        return copied

    output = map_tensors(output, weighed)
    if not found:
        raise UsageError(
            f"forward returned a {type(output).__name__} without a tensor in it, and this step is shared "
            "unevenly: its gradients are to be weighed; want tensors, or lists, tuples, mappings and "
            "dataclasses of them"
        )
    return output


def backward_of_nothing(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """A scalar whose backward adds zero to the gradient of every parameter."""
    scalar: torch.Tensor = _Nothing.apply(*parameters)  # type: ignore[no-untyped-call]
    return scalar


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.like = [(found.shape, found.dtype, found.device) for found in parameters]
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _gradient: torch.Tensor) -> Any:
        return tuple(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)
