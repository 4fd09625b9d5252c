"""This process's random number generators: torch, the present CUDA device, Python and numpy if loaded."""

from __future__ import annotations

import hashlib
import random
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from baguarun.comm.extension import load_extension

_MT19937_NUMBERS = 624
_MT19937_BYTES = 4 * (_MT19937_NUMBERS + 1)
"""What Python's and numpy's default generators are made of: 624 numbers, and how many of them are used up."""


class RandomState:
    """Where the generators stood when `take` was called last. Taken at every commit, seldom put back."""

    def __init__(self) -> None:
        self._torch = load_extension().CpuRandomState()
        self._has_cuda = torch.cuda.is_available()
        self._cuda: torch.Tensor | None = None
        self._python = _PythonState()
        self._numpy = _NumpyState()

    def take(self) -> None:
        # Not torch.get_rng_state, which takes ten times as long when nothing of it is in a cache.
        self._torch.take()
        self._python.take()
        if self._has_cuda and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._cuda = torch.cuda.get_rng_state()
        if (numpy := sys.modules.get("numpy")) is not None:
            self._numpy.take(numpy.random)

    def put_back(self) -> None:
        self._torch.put_back()
        self._python.put_back()
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)
        if (numpy := sys.modules.get("numpy")) is not None:
            self._numpy.put_back(numpy.random)


class _PythonState:
    """Of `random`: the generator's own memory, as a tuple of 625 integers takes ten times as long to make."""

    def __init__(self) -> None:
        # A bound method of the one generator that the module's functions use.
        self._generator = random.getstate.__self__  # type: ignore[attr-defined]
        # CPython's RandomObject, behind what every object begins with: how many are used up, and the numbers.
        self._memory = _memory_at(id(self._generator) + object.__basicsize__)
        self._is_known = self._is_laid_out_so()
        self._gauss: float | None = None
        # In place of these, of a generator that is laid out otherwise.
        self._state: Any = None

    def take(self) -> None:
        if self._is_known:
            self._memory.take()
            self._gauss = self._generator.gauss_next
        else:
            self._state = random.getstate()

    def put_back(self) -> None:
        memory = self._memory.bytes()
        if self._state is not None or memory:
            random.setstate(self._state or _python_state(memory, self._gauss))

    def _is_laid_out_so(self) -> bool:
        if type(self._generator).__basicsize__ < object.__basicsize__ + _MT19937_BYTES:
            return False
        looked_at = _memory_at(id(self._generator) + object.__basicsize__)
        looked_at.take()
        return _python_state(looked_at.bytes(), self._generator.gauss_next) == random.getstate()


def _python_state(memory: bytes, gauss: float | None) -> tuple[Any, ...]:
    used, *numbers = struct.unpack(f"=i{_MT19937_NUMBERS}I", memory)
    return random.Random.VERSION, (*numbers, used), gauss


def _memory_at(address: int) -> Any:
    """A copy of the generator there, which must outlive it."""
    return load_extension().MemoryCopy(address, _MT19937_BYTES)


class _NumpyState:
    """Of `numpy.random`, which takes longest to say where it stands, and few steps draw from it."""

    def __init__(self) -> None:
        self._bits: Any = None
        # Its numbers, if it is an MT19937.
        self._memory: Any = None
        self._kept: Any = None

    def take(self, generator: Any) -> None:
        bits = generator.get_bit_generator()
        if bits is not self._bits:
            is_usual = isinstance(bits, generator.MT19937)
            self._bits, self._memory = bits, _memory_at(bits.ctypes.state_address) if is_usual else None
            self._kept = None
        is_usual = self._memory is not None
        has_changed = self._memory.take() if is_usual else True
        # A normal number that numpy keeps for the next draw changes nothing else when it is drawn.
        has_gauss = is_usual and self._kept is not None and self._kept[3]
        if self._kept is None or has_changed or has_gauss:
            self._kept = generator.get_state(legacy=is_usual)

    def put_back(self, generator: Any) -> None:
        if self._kept is not None:
            generator.set_state(self._kept)


def begin_stream(seed: int, generation: int, rank: int) -> None:
    """Seed all generators for a rank that joins: no other rank and no other World has the same numbers."""
    number = _mixed(f"{seed}:{generation}:{rank}")
    torch.manual_seed(number)
    random.seed(number)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number % 2**32)


@contextmanager
def seeded_for_epoch(loader: int, epoch: int) -> Iterator[None]:
    """For what loader number `loader` draws when it begins to load: a seed for its processes, another one in
    each epoch, and the same one where that epoch is gone on with.

    Leaves torch's CPU generator where it was: an epoch that is gone on with begins once more than an
    undisturbed one, and what is drawn after that should be the same.
    """
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(_mixed(f"{torch.initial_seed()}:loader {loader}:{epoch}"))
    try:
        yield
    finally:
        torch.set_rng_state(state)


def _mixed(text: str) -> int:
    """A seed of 64 bits."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


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
