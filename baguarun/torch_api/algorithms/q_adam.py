"""Bagua's `q_adam` module."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from baguarun.comm.algorithms import QAdam, QAdamOptimizer
from baguarun.comm.algorithms.stages import GradientStages
from baguarun.errors import UsageError

__all__ = ["QAdamAlgorithm", "QAdamOptimizer"]


class QAdamAlgorithm(QAdam):
    """Adam with 8-bit momentum after `q_adam_optimizer`'s warm-up.

    `hierarchical`: only what leaves a node is compressed. `bits` is ours: 1 is 1-bit Adam. If no optimizers
    are named `q_adam_optimizer` is meant. Unlike in Bagua the gradient of the warm-up's last step counts,
    bias corrections stand still with the variance, weight decay stays, and each parameter group has its own
    betas.
    """

    def __init__(self, q_adam_optimizer: QAdamOptimizer, hierarchical: bool = True, *, bits: int = 8) -> None:
        if not isinstance(q_adam_optimizer, QAdamOptimizer):
            raise UsageError(
                f"QAdamAlgorithm: found {type(q_adam_optimizer).__name__}; want a QAdamOptimizer"
            )
        super().__init__(bits=bits, hierarchical=hierarchical)
        object.__setattr__(self, "optimizer", q_adam_optimizer)

    def own_optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return [self.__dict__["optimizer"]]

    def make_stages(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> GradientStages:
        own: QAdamOptimizer = self.__dict__["optimizer"]
        if not any(optimizer is own for optimizer in optimizers):
            raise UsageError(
                "QAdamAlgorithm: its q_adam_optimizer is not among the optimizers of with_bagua(); want "
                "with_bagua([optimizer], QAdamAlgorithm(optimizer))"
            )
        return super().make_stages(parameters, optimizers)
