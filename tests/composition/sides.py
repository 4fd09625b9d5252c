"""Two sides of a cell: our wrapper with the feature, and the reference without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from baguarun.comm.ddp import DistributedDataParallel
from tests.composition.references import Reference
from tests.composition.rows import Row

Snapshot = dict[str, torch.Tensor]


class Trainer:
    """A model that trains under an algorithm, and what its weights and buffers were after each step."""

    def __init__(self, net: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.net = net
        self.optimizers = list(optimizers)
        self.steps = 0
        self.start = snapshot(net)
        self.history: dict[int, Snapshot] = {}

    def __call__(self, *args: Any) -> Any:
        raise NotImplementedError

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def no_sync(self) -> AbstractContextManager[None]:
        raise NotImplementedError

    def combine(self) -> None:
        """After the last backward of a step: from here on gradients are what the optimizer may use."""

    def step(self, optimize: Callable[[], object] | None = None, *, record: bool = True) -> None:
        """Step all optimizers, or do what `optimize` says in their place."""
        self.combine()
        (optimize or self.optimize)()
        if record:
            self.history[self.steps] = snapshot(self.net)
        self.steps += 1

    def optimize(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


class Ours(Trainer):
    """Our wrapper; whatever is between backward and step happens by itself."""

    def __init__(
        self,
        net: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        row: Row,
        **options: Any,
    ) -> None:
        super().__init__(net, optimizers)
        self.wrapped = DistributedDataParallel(
            net,
            optimizers=optimizers,
            algorithm=row.algorithm,
            bucket_cap_mb=row.bucket_cap_mb,
            **options,
        )
        self.forward: Callable[..., Any] = self.wrapped

    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)

    def no_sync(self) -> AbstractContextManager[None]:
        return self.wrapped.no_sync()


class Plain(Trainer):
    """The reference, by collectives of whole models in float64."""

    def __init__(
        self, net: nn.Module, optimizers: Sequence[torch.optim.Optimizer], reference: Reference
    ) -> None:
        super().__init__(net, optimizers)
        self.reference = reference
        self.parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]
        self._combined = False

    def __call__(self, *args: Any) -> Any:
        return self.net(*args)

    def combine(self) -> None:
        if not self._combined and self.reference.averages_gradients(self.steps):
            for parameter in self.parameters:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = gathered(gradient).mean(0).to(parameter.dtype).view_as(parameter)
        self._combined = True

    def step(self, optimize: Callable[[], object] | None = None, *, record: bool = True) -> None:
        def mixed() -> None:
            self._mix(self.reference.before_step)
            (optimize or self.optimize)()
            self._mix(self.reference.after_step)

        super().step(mixed, record=record)
        self._combined = False

    @torch.no_grad()
    def _mix(self, mix: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
        rows = gathered(torch.cat([parameter.reshape(-1).double() for parameter in self.parameters]))
        mine = mix(self.steps, rows)[dist.get_rank()]
        parts = mine.split([parameter.numel() for parameter in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.copy_(part.view_as(parameter))


class Side:
    """Where a feature's program runs: with the feature on our wrapper, or without it on the reference."""

    def __init__(self, row: Row, *, has_feature: bool) -> None:
        self.row = row
        self.has_feature = has_feature
        self.trainers: list[Trainer] = []

    def make_optimizer(self, params: Any, **options: Any) -> torch.optim.Optimizer:
        return self.row.make_optimizer(params, **options)

    def wrap(
        self,
        net: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer] | None = None,
        **options: Any,
    ) -> Trainer:
        """Make `net` train with `optimizers`, or with the row's own; `options` are our wrapper's."""
        if optimizers is None:
            optimizers = [self.make_optimizer(net.parameters())]
        if self.has_feature or self.row.reference is None:
            trainer: Trainer = Ours(net, optimizers, self.row, **options)
        else:
            trainer = Plain(net, optimizers, self.row.reference())
        self.trainers.append(trainer)
        return trainer

    def go_on(self, before: Trainer, trainer: Trainer) -> None:
        """`trainer` goes on where `before` has ended: one training in the record."""
        trainer.steps, trainer.start, trainer.history = before.steps, before.start, before.history
        self.trainers.remove(before)


def snapshot(net: nn.Module) -> Snapshot:
    """All weights and buffers by name, in float64."""
    named = [*net.named_parameters(), *net.named_buffers()]
    return {name: tensor.detach().double().clone() for name, tensor in named}


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """The tensors of all ranks, flat and in float64: [rank, number]."""
    mine = tensor.detach().double().contiguous().reshape(-1)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    return torch.stack(rows)
