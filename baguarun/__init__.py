"""baguarun: a PyTorch cluster launcher and elastic-training tool with its own communication engine.

Names load on first use (PEP 562): `import baguarun` loads neither torch nor etcd.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_LAZY = {
    "init_process_group": "baguarun.comm.groups",
    "DistributedDataParallel": "baguarun.comm.ddp",
}

_PACKAGES = ("elastic",)

__all__ = ["__version__", *_LAZY, *_PACKAGES]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"baguarun.{name}")
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'baguarun' has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
