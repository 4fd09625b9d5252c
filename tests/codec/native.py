"""The compiled codecs behind numpy: builds the shim once per state of its sources, calls it through ctypes.

Every output lies between guard bytes, which are looked at after every call.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.codec.reference import (
    Bytes,
    DType,
    Floats,
    Format,
    Numbers,
    Wire,
    encoded_bytes,
    format_of,
    payload_bytes,
    word_type,
)
from tests.support.once import made

ROOT = Path(__file__).parents[2]
GUARD_BYTES = 64
FILL = 0xA5
CPU, CUDA = 0, 1

# No -ffp-contract=off here: the format claims not to depend on it.
BASE_FLAGS = ("-std=c++20", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror")
FAST = ("-O3",)
SANITIZED = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
CUDA_ON_THREADS = (
    *("-O1", "-DBAGUARUN_WITH_CUDA", "-Wno-unknown-pragmas", "-x", "c++"),
    f"-I{ROOT / 'tests' / 'codec' / 'cuda_on_threads'}",
)


def compiler() -> list[str]:
    return os.environ.get("CXX", "c++").split()


def build(flags: Sequence[str]) -> Path:
    """Path of the shared library made with `flags`, compiled unless it is there already."""
    folder = ROOT / "cpp_ext" / "codec"
    sources = [*sorted(folder.glob("*.cc")), ROOT / "tests" / "codec" / "shim.cpp"]
    if "-DBAGUARUN_WITH_CUDA" in flags:
        sources += sorted(folder.glob("*.cu"))
    others = [*sorted(folder.glob("*.h")), *sorted(folder.glob("*.inc"))]
    digest = hashlib.sha256(repr([compiler(), BASE_FLAGS, flags]).encode())
    for file in [*sources, *others, *sorted((ROOT / "tests" / "codec").rglob("*.h"))]:
        digest.update(file.name.encode() + file.read_bytes())
    library = ROOT / "build" / "codec_tests" / f"shim-{digest.hexdigest()[:16]}.so"
    return made(library, [*compiler(), *BASE_FLAGS, *flags, f"-I{folder}", *map(str, sources)], ROOT)


class Guarded:
    """Room for `size` bytes, `offset` bytes off a 64-byte boundary, with guard bytes before and behind."""

    def __init__(self, size: int, offset: int = 0) -> None:
        self._memory = np.full(size + 3 * GUARD_BYTES, FILL, np.uint8)
        self._start = GUARD_BYTES + (-self._memory.ctypes.data) % 64 + offset
        self._size = size
        self.room = self._memory[self._start : self._start + size]

    def check(self) -> None:
        before, behind = self._memory[: self._start], self._memory[self._start + self._size :]
        assert np.all(before == FILL), "bytes before the output were written"
        assert np.all(behind == FILL), "bytes behind the output were written"


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


class ShimFormat(ctypes.Structure):
    _fields_ = (("wire", ctypes.c_int), ("keep", ctypes.c_uint), ("seed", ctypes.c_ulonglong))


def shim_format(wire: Wire | Format) -> ShimFormat:
    format = format_of(wire)
    return ShimFormat(int(format.wire), format.keep, format.seed)


class Codec:
    """`codec.h` on numpy arrays. `offset` moves every input and output off its 64-byte boundary."""

    def __init__(self, library: Path, offset: int = 0, device: int = CPU) -> None:
        self.device = device
        self._lib = ctypes.CDLL(str(library))
        self._lib.shim_error.restype = ctypes.c_char_p
        self._lib.shim_path.restype = ctypes.c_char_p
        self.offset = offset

    def use_path(self, name: str) -> bool:
        return bool(self._lib.shim_use_path(name.encode()))

    def path(self) -> str:
        return self._lib.shim_path().decode()

    def encoded_bytes(self, wire: Wire | Format, numel: int) -> int:
        size = ctypes.c_size_t()
        self._check(
            self._lib.shim_encoded_bytes(shim_format(wire), ctypes.c_size_t(numel), ctypes.byref(size))
        )
        return size.value

    def encode(self, wire: Wire | Format, dtype: DType, numbers: Numbers) -> Bytes:
        numel = len(numbers)
        out = self._chunk(wire, numel)
        src = self._moved(numbers)
        self._check(
            self._lib.shim_encode(
                self.device,
                shim_format(wire),
                int(dtype),
                pointer(src),
                ctypes.c_size_t(numel),
                pointer(out.room),
            )
        )
        return self._chunk_of(out, wire, numel)

    def encode_with_residual(
        self, wire: Wire | Format, dtype: DType, numbers: Numbers, residual: Floats
    ) -> tuple[Bytes, Floats]:
        """The chunk and the new residual."""
        numel = len(numbers)
        out = self._chunk(wire, numel)
        carried = self._numbers(DType.f32, numel)
        carried.room[:] = residual.view(np.uint8)
        src = self._moved(numbers)
        self._check(
            self._lib.shim_encode_with_residual(
                self.device,
                shim_format(wire),
                int(dtype),
                pointer(src),
                pointer(carried.room),
                ctypes.c_size_t(numel),
                pointer(out.room),
            )
        )
        carried.check()
        return self._chunk_of(out, wire, numel), carried.room.view(np.float32)

    def encode_sum_with_residual(
        self, wire: Wire | Format, dtype: DType, own: Numbers, chunks: Sequence[Bytes], residual: Floats
    ) -> tuple[Bytes, Floats]:
        """The chunk and the new residual."""
        numel = len(own)
        out = self._chunk(wire, numel)
        carried = self._numbers(DType.f32, numel)
        carried.room[:] = residual.view(np.uint8)
        first, src = self._moved(own), [self._moved(chunk) for chunk in chunks]
        self._check(
            self._lib.shim_encode_sum_with_residual(
                self.device,
                shim_format(wire),
                int(dtype),
                pointer(first),
                self._pointers(src),
                ctypes.c_size_t(len(src)),
                pointer(carried.room),
                ctypes.c_size_t(numel),
                pointer(out.room),
            )
        )
        carried.check()
        return self._chunk_of(out, wire, numel), carried.room.view(np.float32)

    def decode(self, wire: Wire | Format, dtype: DType, chunk: Bytes, numel: int) -> Numbers:
        out = self._numbers(dtype, numel)
        src = self._moved(chunk)
        self._check(
            self._lib.shim_decode(
                self.device,
                shim_format(wire),
                int(dtype),
                pointer(src),
                ctypes.c_size_t(numel),
                pointer(out.room),
            )
        )
        out.check()
        return out.room.view(word_type(dtype))

    def headers_are_finite(self, wire: Wire | Format, chunk: Bytes, numel: int) -> bool:
        finite = ctypes.c_int(-1)
        src = self._moved(chunk)
        self._check(
            self._lib.shim_headers_are_finite(
                shim_format(wire), ctypes.c_size_t(numel), pointer(src), ctypes.byref(finite)
            )
        )
        assert finite.value in (0, 1)
        return bool(finite.value)

    def reduce_encode(
        self, wire: Wire | Format, chunks: Sequence[Bytes], factor: float, numel: int, into: int | None = None
    ) -> Bytes:
        """`into` names the chunk that is also the destination."""
        out = self._chunk(wire, numel)
        src = [self._moved(chunk) for chunk in chunks]
        if into is not None:
            out.room[:] = src[into][: len(out.room)]
            src[into] = out.room
        self._check(
            self._lib.shim_reduce_encode(
                self.device,
                shim_format(wire),
                self._pointers(src),
                ctypes.c_size_t(len(src)),
                ctypes.c_float(factor),
                ctypes.c_size_t(numel),
                pointer(out.room),
            )
        )
        return self._chunk_of(out, wire, numel)

    def reduce_decode(
        self, wire: Wire | Format, dtype: DType, chunks: Sequence[Bytes], factor: float, numel: int
    ) -> Numbers:
        out = self._numbers(dtype, numel)
        src = [self._moved(chunk) for chunk in chunks]
        self._check(
            self._lib.shim_reduce_decode(
                self.device,
                shim_format(wire),
                int(dtype),
                self._pointers(src),
                ctypes.c_size_t(len(src)),
                ctypes.c_float(factor),
                ctypes.c_size_t(numel),
                pointer(out.room),
            )
        )
        out.check()
        return out.room.view(word_type(dtype))

    def _check(self, failed: int) -> None:
        if failed:
            raise RuntimeError(self._lib.shim_error().decode())

    def _moved(self, array: np.ndarray) -> Bytes:
        copy = Guarded(array.nbytes, self.offset)
        copy.room[:] = array.view(np.uint8)
        return copy.room

    def _chunk(self, wire: Wire | Format, numel: int) -> Guarded:
        # Not a byte more than the payload: the padding behind it is a guard, too.
        return Guarded(payload_bytes(wire, numel), self.offset)

    def _chunk_of(self, out: Guarded, wire: Wire | Format, numel: int) -> Bytes:
        out.check()
        chunk = np.zeros(encoded_bytes(wire, numel), np.uint8)
        chunk[: len(out.room)] = out.room
        return chunk

    def _numbers(self, dtype: DType, numel: int) -> Guarded:
        return Guarded(numel * np.dtype(word_type(dtype)).itemsize, self.offset)

    @staticmethod
    def _pointers(arrays: Sequence[np.ndarray]) -> ctypes.Array[ctypes.c_void_p]:
        return (ctypes.c_void_p * max(len(arrays), 1))(*[array.ctypes.data for array in arrays])
