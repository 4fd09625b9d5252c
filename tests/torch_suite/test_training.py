"""DDP and FSDP2 train on baguanet to the losses that they reach on Gloo.

On two ranks to the same bits, since two addends commute; on four to the same but for the order of additions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.comm.ranks import run_ranks

STEPS = 8

Model = Callable[[], tuple[nn.Module, Callable[[nn.Module, torch.Generator], torch.Tensor]]]
Wrap = Callable[[nn.Module], nn.Module]


def perceptron() -> tuple[nn.Module, Callable[[nn.Module, torch.Generator], torch.Tensor]]:
    model = nn.Sequential(nn.Linear(33, 77), nn.GELU(), nn.LayerNorm(77), nn.Linear(77, 9))

    def loss(wrapped: nn.Module, chance: torch.Generator) -> torch.Tensor:
        data = torch.randn(16, 33, generator=chance)
        return nn.functional.cross_entropy(wrapped(data), data[:, :9].argmax(1))

    return model, loss


def convolutions() -> tuple[nn.Module, Callable[[nn.Module, torch.Generator], torch.Tensor]]:
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 9, 4)),
    )

    def loss(wrapped: nn.Module, chance: torch.Generator) -> torch.Tensor:
        images = torch.randn(8, 3, 10, 10, generator=chance)
        return nn.functional.cross_entropy(wrapped(images), images.mean((2, 3)).argmax(1))

    return model, loss


class Language(nn.Module):
    """A transformer of one layer whose embedding is also its output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 24)
        self.layer = nn.TransformerEncoderLayer(24, 3, 50, dropout=0.0, batch_first=True)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.layer(self.embedding(words))
        return hidden @ self.embedding.weight.t()


def language() -> tuple[nn.Module, Callable[[nn.Module, torch.Generator], torch.Tensor]]:
    def loss(wrapped: nn.Module, chance: torch.Generator) -> torch.Tensor:
        words = torch.randint(0, 40, (5, 11), generator=chance)
        return nn.functional.cross_entropy(wrapped(words[:, :-1]).flatten(0, 1), words[:, :-1].flatten())

    return Language(), loss


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def ddp_in_small_buckets(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, bucket_cap_mb=0.004, gradient_as_bucket_view=True)


def fsdp(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


MODELS = [perceptron, convolutions, language]
WRAPS = [ddp, ddp_in_small_buckets, fsdp]
PAIRS = [(model, wrap) for model in MODELS for wrap in WRAPS]


def losses(pairs: Sequence[tuple[Model, Wrap]]) -> list[list[float]]:
    """For each pair the loss of every step, averaged over the ranks by plain addition in rank order."""
    return [_train(model, wrap) for model, wrap in pairs]


def _train(model: Model, wrap: Wrap) -> list[float]:
    torch.manual_seed(11)
    plain, loss = model()
    wrapped = wrap(plain)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.2, momentum=0.9)
    chance = torch.Generator().manual_seed(dist.get_rank())
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        value = loss(wrapped, chance)
        value.backward()
        optimizer.step()
        everyone = [torch.empty(()) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, value.detach())
        found.append(math.fsum(each.item() for each in everyone) / len(everyone))
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_models_reach_the_losses_of_gloo(world_size: int) -> None:
    ours = run_ranks(losses, world_size, PAIRS)
    gloos = run_ranks(losses, world_size, PAIRS, backend="gloo")
    for (model, wrap), found, want in zip(PAIRS, ours[0], gloos[0], strict=True):
        name = f"{wrap.__name__} of {model.__name__}"
        assert found[-1] < found[0], name
        if world_size == 2:
            assert found == want, name
        else:
            assert found == pytest.approx(want, rel=1e-4), name
    assert all(each == ours[0] for each in ours)
