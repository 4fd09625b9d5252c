"""Small models and the plain reference that the engine is held against."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn


def mlp(dtype: torch.dtype = torch.float32, width: int = 37, depth: int = 3) -> nn.Sequential:
    """Layers of odd sizes, so that no chunk ends where a parameter does; the same on every rank."""
    generator_state = torch.get_rng_state()
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for index in range(depth):
        layers += [nn.Linear(width + index, width + index + 1), nn.Tanh()]
    torch.set_rng_state(generator_state)
    return nn.Sequential(*layers).to(dtype)


def batch(model: nn.Module, rows: int = 5) -> torch.Tensor:
    """Input that differs from rank to rank."""
    first = next(model.parameters())
    return torch.randn(rows, first.shape[1], dtype=torch.float64).to(first.dtype)


def loss(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().sum()


def gathered_gradients(
    model: nn.Module, backward: Callable[[nn.Module], None]
) -> dict[str, list[torch.Tensor | None]]:
    """Per parameter the local gradients of all ranks, computed by plain torch on a copy of `model`."""
    local = copy.deepcopy(model)
    local.zero_grad()
    backward(local)
    mine = {name: parameter.grad for name, parameter in local.named_parameters()}
    everyone: list[dict[str, torch.Tensor | None]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    return {name: [other[name] for other in everyone] for name in mine}


def expected_average(gradients: list[torch.Tensor | None]) -> torch.Tensor | None:
    """Average in float64, a missing gradient counting as zero; None if nobody has one."""
    present = [gradient.double() for gradient in gradients if gradient is not None]
    return torch.stack(present).sum(0) / len(gradients) if present else None


def assert_averaged(
    model: nn.Module,
    reference: dict[str, list[torch.Tensor | None]],
    rtol: float = 1e-5,
    *,
    one_scale: bool = False,
) -> None:
    """Each gradient of `model` is the average of the reference's, up to `rtol` times its own largest number.

    `one_scale`: the largest number of all gradients, for codecs whose blocks span parameters.
    """
    averages = {name: expected_average(gradients) for name, gradients in reference.items()}
    largest = {name: found.abs().max().item() for name, found in averages.items() if found is not None}
    for name, parameter in model.named_parameters():
        expected = averages[name]
        if expected is None:
            assert parameter.grad is None, name
            continue
        assert parameter.grad is not None, name
        scale = max(largest.values()) if one_scale else largest[name]
        torch.testing.assert_close(parameter.grad.double(), expected, rtol=rtol, atol=rtol * scale, msg=name)


def assert_same_on_all_ranks(tensors: list[torch.Tensor]) -> None:
    """Bit for bit."""
    bits = [tensor.detach().reshape(-1).view(torch.uint8).clone() for tensor in tensors]
    everyone: list[list[torch.Tensor]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, bits)
    for other in everyone:
        assert all(torch.equal(here, there) for here, there in zip(bits, other, strict=True))
