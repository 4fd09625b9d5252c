"""Bagua's `fuse_optimizer`, by name: nothing is fused here."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

__all__ = ["fuse_optimizer", "is_fused_optimizer"]

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


def fuse_optimizer(optimizer: Optimizer, do_flatten: bool = True, check_flatten: bool = True) -> Optimizer:
    """`optimizer` itself, with `fuse_step(...)`, which is its `step(...)`.

    Bagua lays parameters out in one piece so that a step is few kernels. Torch's optimizers have that of
    their own by now (foreach=True, fused=True), so `do_flatten` and `check_flatten` change nothing, and no
    result differs. A second call does nothing, where Bagua raises.
    """
    del do_flatten, check_flatten

    def fuse_step(*args: Any, **kwargs: Any) -> Any:
        # Looked up now: schedulers replace it, and algorithms that exchange weights hook into it.
        return optimizer.step(*args, **kwargs)

    vars(optimizer)["fuse_step"] = fuse_step
    return optimizer


def is_fused_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `fuse_optimizer` has had it."""
    return "fuse_step" in vars(optimizer)
