"""Steps that are unevenly shared: forwards that count more or less, and ranks that have nothing to add."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from baguarun.comm.models import find_tensors, map_tensors
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


def pass_inputs(inputs: Any, weight: float) -> Any:
    """What forward is given, with copies in place of tensors that something has computed: what comes back
    through them has been multiplied by `weight`, and goes on without.

    Another wrapped model may have computed them, which multiplies what comes to it itself.
    """

    def is_computed(tensor: torch.Tensor) -> bool:
        return tensor.requires_grad and not tensor.is_leaf

    def passed(tensor: torch.Tensor) -> torch.Tensor:
        return _with_gradients_times(1 / weight, tensor) if is_computed(tensor) else tensor

    # Nothing comes back with a weight of zero.
    if weight == 0 or not any(map(is_computed, find_tensors(inputs))):
        return inputs
    return map_tensors(inputs, passed)


def weigh_gradients(output: Any, weight: float) -> Any:
    """What forward returned, with copies in place of its tensors: `weight` times their gradients go on.

    Copies, since one tensor may have been computed from another that was returned as well, and what comes
    through both is to be multiplied once; of the same memory they could not be changed in place, or would
    forget it. Raises `UsageError` if there is no tensor to be found.
    """
    found = False

    def weighed(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal found
        found = True
        return _with_gradients_times(weight, tensor) if tensor.requires_grad else tensor

    output = map_tensors(output, weighed)
    if not found:
        raise UsageError(
            f"forward returned a {type(output).__name__} without a tensor in it, and this step is shared "
            "unevenly: its gradients are to be weighed; want tensors, or lists, tuples, mappings and "
            "dataclasses of them"
        )
    return output


def _with_gradients_times(factor: float, tensor: torch.Tensor) -> torch.Tensor:
    def multiplied(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * factor

    copied = tensor.clone()
    copied.register_hook(multiplied)  # type: ignore[no-untyped-call]
    return copied


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
