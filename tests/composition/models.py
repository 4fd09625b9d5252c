"""The small model and the data that most cells train on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

STEPS = 6

M = TypeVar("M", bound=nn.Module)


def mlp() -> nn.Sequential:
    """The same on every rank and side."""
    return seeded(
        lambda: nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 11), nn.Tanh(), nn.Linear(11, 3))
    )


def seeded(make: Callable[[], M]) -> M:
    """What `make` returns with random numbers that are the same everywhere."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


def batch(step: int, micro: int = 0, shape: tuple[int, ...] = (6, 7)) -> torch.Tensor:
    """Inputs of this rank for that step, in [-2, 2]."""
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + 10 * step + micro)
    return 4 * torch.rand(shape, generator=generator) - 2


def loss(output: torch.Tensor) -> torch.Tensor:
    """Each rank wants another output."""
    return (output.float() - dist.get_rank()).square().mean()
