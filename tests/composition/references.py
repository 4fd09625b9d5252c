"""What each algorithm computes, written out in plain torch on all ranks' weights at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from baguarun.comm.algorithms.decentralized import PeerSelection, choose_peers

Rows = torch.Tensor
"""All ranks' weights, float64: [rank, number]."""


class Reference:
    """Gradients are averaged where `averages_gradients` says so; weights are mixed around optimizer steps.

    Steps are counted from 0.
    """

    def averages_gradients(self, step: int) -> bool:
        del step
        return False

    def before_step(self, step: int, rows: Rows) -> Rows:
        del step
        return rows

    def after_step(self, step: int, rows: Rows) -> Rows:
        del step
        return rows


MakeReference = Callable[[], Reference]


class AveragedGradients(Reference):
    def averages_gradients(self, step: int) -> bool:
        del step
        return True


class AveragedWithAll(Reference):
    def before_step(self, step: int, rows: Rows) -> Rows:
        del step
        return mean_of(rows)


class AveragedWithPeers(Reference):
    def __init__(self, mode: PeerSelection) -> None:
        self.mode = mode

    def before_step(self, step: int, rows: Rows) -> Rows:
        mixed = rows.clone()
        for rank in range(len(rows)):
            peers = choose_peers(self.mode, step, rank, len(rows))
            if peers is not None:
                mixed[rank] = (rows[rank] + rows[peers.from_rank]) / 2
        return mixed


class AveragedByNode(AveragedWithPeers):
    """Nodes of so many ranks are the peers."""

    def __init__(self, mode: PeerSelection, nodes: Sequence[int]) -> None:
        super().__init__(mode)
        self.nodes = list(nodes)

    def before_step(self, step: int, rows: Rows) -> Rows:
        averages = torch.stack([node.mean(0) for node in rows.split(self.nodes)])
        mixed = super().before_step(step, averages)
        return mixed.repeat_interleave(torch.tensor(self.nodes), dim=0)


class AveragedAtTimes(Reference):
    """Local SGD."""

    def __init__(self, every: int, warmup_steps: int = 0) -> None:
        self.every, self.warmup_steps = every, warmup_steps

    def averages_gradients(self, step: int) -> bool:
        return step < self.warmup_steps

    def after_step(self, step: int, rows: Rows) -> Rows:
        local_steps = step + 1 - self.warmup_steps
        return mean_of(rows) if local_steps > 0 and local_steps % self.every == 0 else rows


class OuterSteps(Reference):
    """DiLoCo: SGD with Nesterov momentum on the average change."""

    def __init__(self, every: int, lr: float = 0.7, momentum: float = 0.9) -> None:
        self.every, self.lr, self.momentum = every, lr, momentum
        self.outer: torch.Tensor | None = None
        self.velocity = torch.zeros(())

    def before_step(self, step: int, rows: Rows) -> Rows:
        del step
        if self.outer is None:
            self.outer = rows[0].clone()
        return rows

    def after_step(self, step: int, rows: Rows) -> Rows:
        if (step + 1) % self.every != 0:
            return rows
        assert self.outer is not None
        gradient = self.outer - rows.mean(0)
        self.velocity = self.momentum * self.velocity + gradient
        self.outer = self.outer - self.lr * (gradient + self.momentum * self.velocity)
        return self.outer.expand_as(rows)


class AveragedLate(Reference):
    """Asynchronous averaging with a staleness of one: averages of one step arrive after the next."""

    def __init__(self) -> None:
        self.snapshot: torch.Tensor | None = None

    def after_step(self, step: int, rows: Rows) -> Rows:
        del step
        if self.snapshot is not None:
            rows = rows + mean_of(self.snapshot) - self.snapshot
        self.snapshot = rows.clone()
        return rows


def mean_of(rows: Rows) -> Rows:
    return rows.mean(0, keepdim=True).expand_as(rows)
