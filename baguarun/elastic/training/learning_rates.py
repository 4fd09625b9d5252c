"""Learning rates that follow the number of workers, unseen by schedulers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def scale_learning_rates(optimizers: Sequence[torch.optim.Optimizer], factor: Callable[[], float]) -> None:
    """Multiply all learning rates by `factor()` during each step of `optimizers`; between steps they are as
    the scheduler set them."""
    for optimizer in optimizers:
        _scale(optimizer, factor)


def _scale(optimizer: torch.optim.Optimizer, factor: Callable[[], float]) -> None:
    kept: list[Any] = []

    def before(*_call: object) -> None:
        # A step that was cut short has left its own.
        kept.clear()
        scale = factor()
        if scale != 1:
            kept[:] = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * scale

    def after(*_call: object) -> None:
        for group, lr in zip(optimizer.param_groups, kept, strict=False):
            group["lr"] = lr
        kept.clear()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
