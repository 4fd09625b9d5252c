"""Elasticity: membership (agent side) and training (worker side).

The worker side's names load on first use (PEP 562): the agent imports this package too, and never torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_LAZY = {
    "BatchPolicy": "baguarun.elastic.training.sampler",
    "Checkpoints": "baguarun.elastic.training.checkpoints",
    "ElasticSampler": "baguarun.elastic.training.sampler",
    "State": "baguarun.elastic.training.state",
    "run": "baguarun.elastic.training.run",
}

__all__ = list(_LAZY)


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'baguarun.elastic' has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
