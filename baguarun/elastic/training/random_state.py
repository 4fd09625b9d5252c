"""This process's random number generators: torch, the present CUDA device, Python and numpy if loaded."""

from __future__ import annotations

import ctypes
import hashlib
import random
import sys
from typing import Any

import torch

_MT19937_BYTES = 624 * 4 + 4
"""What numpy's default generator is made of: 624 numbers, and how many of them are used up."""


class RandomState:
    """Where the generators stood when `take` was called last."""

    def __init__(self) -> None:
        self._torch: torch.Tensor | None = None
        self._cuda: torch.Tensor | None = None
        self._python: Any = None
        self._numpy: Any = None
        self._numpy_numbers = b""

    def take(self) -> None:
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._cuda = torch.cuda.get_rng_state()
        if (numpy := sys.modules.get("numpy")) is not None:
            self._take_numpy(numpy.random)

    def _take_numpy(self, generator: Any) -> None:
        """numpy takes longest to say where it stands, and few steps draw from it."""
        bits = generator.get_bit_generator()
        is_usual = isinstance(bits, generator.MT19937)
        numbers = ctypes.string_at(bits.ctypes.state_address, _MT19937_BYTES) if is_usual else b""
        # A normal number that numpy keeps for the next draw changes nothing else when it is drawn.
        has_gauss = is_usual and self._numpy is not None and self._numpy[3]
        if not is_usual or has_gauss or numbers != self._numpy_numbers:
            self._numpy, self._numpy_numbers = generator.get_state(legacy=is_usual), numbers

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
