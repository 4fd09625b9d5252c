"""Features of the model. Each is one program: with the feature it runs on our wrapper, without on the
reference, and both must train alike.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_functional
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.composition.models import STEPS, batch, loss, mlp, seeded
from tests.composition.sides import Ours, Side, Trainer


def train(trainer: Trainer, *, shape: tuple[int, ...] = (6, 7)) -> None:
    for step in range(STEPS):
        trainer.zero_grad()
        loss(trainer(batch(step, shape=shape))).backward()
        trainer.step()


class Partial(nn.Module):
    """Uses a branch on rank 0 only, another one nowhere, and a layer that is frozen.

    Without the feature the branches are used everywhere, times zero, and the frozen layer is not registered.
    """

    def __init__(self, has_feature: bool) -> None:
        super().__init__()
        self.has_feature = has_feature
        self.first, self.last = nn.Linear(7, 11), nn.Linear(11, 3)
        self.branch, self.spare = nn.Linear(11, 11), nn.Linear(11, 11)
        frozen = nn.Linear(11, 11).requires_grad_(False)
        if has_feature:
            self.frozen = frozen
        self._layers = [frozen]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self._layers[0](torch.tanh(self.first(x)))
        is_used = dist.get_rank() == 0
        if not self.has_feature:
            x = x + float(is_used) * self.branch(x) + 0 * self.spare(x)
        elif is_used:
            x = x + self.branch(x)
        return self.last(x)


def leaves_parameters_out(side: Side) -> None:
    net = seeded(lambda: Partial(side.has_feature))
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    optimizer = side.make_optimizer(parameter for parameter in net.parameters() if parameter.requires_grad)
    trainer = side.wrap(net, [optimizer], find_unused_parameters=True)
    for step in range(STEPS):
        trainer.zero_grad()
        loss(trainer(batch(step))).backward()
        trainer.combine()
        if not side.has_feature:
            # What no combined rank has used is left alone by the optimizer, momentum included.
            for parameter in (*net.branch.parameters(), *net.spare.parameters()):
                parameter.grad = parameter.grad if parameter.grad.count_nonzero() else None
        trainer.step()
    if side.has_feature:
        assert net.spare.weight.grad is None and net.frozen.weight.grad is None
        assert torch.equal(net.frozen.weight, before["frozen.weight"])
        torch.testing.assert_close(net.spare.weight, before["spare.weight"])


class Tied(nn.Module):
    """One matrix in two modules; without the feature it is used twice by name."""

    def __init__(self, has_feature: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 7), nn.Linear(7, 7)
        if has_feature:
            self.last.weight = self.first.weight
        else:
            self.last.register_parameter("weight", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        if self.last.weight is None:
            return functional.linear(hidden, self.first.weight, self.last.bias)
        return self.last(hidden)


def ties_weights(side: Side) -> None:
    train(side.wrap(seeded(lambda: Tied(side.has_feature))))


def is_compiled(side: Side) -> None:
    """The module inside of the wrapper, and the wrapper itself."""
    for place in ("inside", "outside"):
        net: Any = mlp()
        if side.has_feature and place == "inside":
            net.compile(backend="aot_eager")
        trainer = side.wrap(net)
        if side.has_feature and place == "outside":
            assert isinstance(trainer, Ours)
            trainer.forward = torch.compile(trainer.wrapped, backend="aot_eager")
        train(trainer)


class Recomputed(nn.Module):
    """A layer that is used in two re-entrant checkpoints, so that its gradient comes in two parts."""

    def __init__(self, has_feature: bool) -> None:
        super().__init__()
        self.has_feature = has_feature
        self.first, self.shared, self.last = nn.Linear(7, 11), nn.Linear(11, 11), nn.Linear(11, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self._block, x, use_reentrant=True) if self.has_feature else self._block(x)
        return self.last(x)

    def _block(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.shared(x))


def recomputes(side: Side) -> None:
    train(side.wrap(seeded(lambda: Recomputed(side.has_feature)), static_graph=True))


def is_channels_last(side: Side) -> None:
    net: nn.Module = seeded(
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 4, 2), nn.Tanh(), nn.Conv2d(4, 2, 2)
        )
    )
    if side.has_feature:
        net = net.to(memory_format=torch.channels_last)
    trainer = side.wrap(net)
    for step in range(STEPS):
        trainer.zero_grad()
        x = batch(step, shape=(4, 3, 6, 6))
        if side.has_feature:
            x = x.to(memory_format=torch.channels_last)
        loss(trainer(x)).backward()
        trainer.step()
    if side.has_feature:
        for index in (0, 2):
            assert net[index].weight.is_contiguous(memory_format=torch.channels_last)
            assert net[index].weight.grad.is_contiguous(memory_format=torch.channels_last)


class NormOverRanks(nn.Module):
    """BatchNorm over the batches of all ranks.

    torch's SyncBatchNorm takes no CPU tensors. This does the same by the same means: collectives of the
    program's own in forward and in backward. Without the feature torch normalises the gathered batch.
    """

    def __init__(self, has_feature: bool, features: int) -> None:
        super().__init__()
        self.has_feature = has_feature
        self.norm = nn.BatchNorm1d(features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # In double precision, so that both ways round alike: who keeps the largest numbers only might choose
        # others, and who divides by small ones make much of the difference.
        wide, weight, bias = x.double(), self.norm.weight.double(), self.norm.bias.double()
        if not self.has_feature:
            everything = dist_functional.all_gather(wide)
            whole = functional.batch_norm(
                torch.cat(everything), None, None, weight, bias, training=True, eps=self.norm.eps
            )
            return whole.chunk(len(everything))[dist.get_rank()].to(x.dtype)
        count = len(x) * dist.get_world_size()
        mean = dist_functional.all_reduce(wide.sum(0)) / count
        variance = dist_functional.all_reduce((wide - mean).square().sum(0)) / count
        wide = (wide - mean) * torch.rsqrt(variance + self.norm.eps)
        return (wide * weight + bias).to(x.dtype)


def normalises_over_ranks(side: Side) -> None:
    # A bias would have a gradient of rounding errors alone, of which QAdam makes whole steps.
    net = seeded(
        lambda: nn.Sequential(
            nn.Linear(7, 11, bias=False), NormOverRanks(side.has_feature, 11), nn.Tanh(), nn.Linear(11, 3)
        )
    )
    # Neither keeps running statistics.
    trainer = side.wrap(net, broadcast_buffers=False)
    train(trainer)


def broadcasts_buffers(side: Side) -> None:
    """Running statistics after each step; against rank 0's sent by hand before each forward."""
    net = seeded(lambda: nn.Sequential(nn.Linear(7, 11), nn.BatchNorm1d(11), nn.Tanh(), nn.Linear(11, 3)))
    trainer = side.wrap(net, broadcast_buffers=side.has_feature)
    for step in range(STEPS):
        trainer.zero_grad()
        if not side.has_feature and side.row.shares_buffers(step):
            for buffer in net.buffers():
                dist.broadcast(buffer, src=0)
        loss(trainer(batch(step))).backward()
        trainer.step()
