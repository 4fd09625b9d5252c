"""This process's random number generators: torch, the present CUDA device, Python and numpy if loaded."""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch


class RandomState:
    """Where the generators stood when `take` was called last."""

    def __init__(self) -> None:
        self._torch: torch.Tensor | None = None
        self._cuda: torch.Tensor | None = None
        self._python: Any = None
        self._numpy: Any = None

    def take(self) -> None:
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        if torch.cuda.is_available():
            self._cuda = torch.cuda.get_rng_state()
        if (numpy := sys.modules.get("numpy")) is not None:
            self._numpy = numpy.random.get_state()

    def put_back(self) -> None:
        if self._torch is None:
            return
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


def begin_stream(seed: int, generation: int, rank: int) -> None:
    """Seed all generators for a rank that joins: no other rank and no other World has the same numbers."""
    digest = hashlib.sha256(f"{seed}:{generation}:{rank}".encode()).digest()
    number = int.from_bytes(digest[:8], "little")
    torch.manual_seed(number)
    random.seed(number)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number % 2**32)


def portable() -> dict[str, Any]:
    """Where the generators stand, as what a checkpoint can hold."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = (str(name), torch.from_numpy(keys.astype("int64")), *rest)
    return states


def restore_portable(states: dict[str, Any]) -> None:
    """Go on from what `portable` returned."""
    torch.set_rng_state(states["torch"])
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "numpy" in states and (numpy := sys.modules.get("numpy")) is not None:
        name, keys, *rest = states["numpy"]
        numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))
