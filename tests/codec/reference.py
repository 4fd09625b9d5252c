"""The codecs again, plain and slow: what cpp_ext/codec/codec.h says, in numpy, one rounding per operation.

Numbers are float32 arrays for `DType.f32` and uint16 arrays of bit patterns for the two 16-bit types. A
chunk is a uint8 array of `encoded_bytes` bytes whose padding is zero.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

BLOCK_ELEMS = 2048
QUIET_NAN = np.array([0x7FC00000], np.uint32).view(np.float32)[0]
OVERFLOW = np.float32(2.0**126)
LEAST_STEP = np.float32(2.0**-126)

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.float32] | npt.NDArray[np.uint16]


class DType(enum.IntEnum):
    f32 = 0
    f16 = 1
    bf16 = 2


class Wire(enum.IntEnum):
    f32 = 0
    f16 = 1
    bf16 = 2
    minmax8 = 3


def word_type(dtype: DType) -> type[np.float32] | type[np.uint16]:
    return np.float32 if dtype is DType.f32 else np.uint16


def block_count(numel: int) -> int:
    return -(-numel // BLOCK_ELEMS)


def payload_bytes(wire: Wire, numel: int) -> int:
    if wire is Wire.minmax8:
        return 8 * block_count(numel) + numel
    return numel * (4 if wire is Wire.f32 else 2)


def encoded_bytes(wire: Wire, numel: int) -> int:
    return -(-payload_bytes(wire, numel) // 16) * 16


def widen(dtype: DType, numbers: Numbers) -> Floats:
    if dtype is DType.f32:
        return numbers.view(np.float32)
    words = numbers.view(np.uint16).astype(np.uint32)
    if dtype is DType.bf16:
        bits = words << 16
        nan = (bits & 0x7FFFFFFF) > 0x7F800000
    else:
        bits = words.astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
        nan = (words & 0x7FFF) > 0x7C00
        bits[nan] = (words[nan] & 0x8000) << 16 | 0x7F800000 | (words[nan] & 0x3FF) << 13
    bits[nan] |= 0x400000
    return bits.view(np.float32)


def narrow(dtype: DType, x: Floats) -> Numbers:
    if dtype is DType.f32:
        return x
    bits = x.view(np.uint32)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    if dtype is DType.bf16:
        # To nearest, ties to even, in units of the 16 lower bits.
        half, odd = bits & 0xFFFF, bits >> 16 & 1
        words = (bits >> 16) + ((half > 0x8000) | ((half == 0x8000) & (odd == 1)))
        words[nan] = bits[nan] >> 16 | 0x40
    else:
        with np.errstate(all="ignore"):
            words = x.astype(np.float16).view(np.uint16).astype(np.uint32)
        words[nan] = (bits[nan] >> 16 & 0x8000) | 0x7E00 | (bits[nan] >> 13 & 0x3FF)
    return words.astype(np.uint16)


def grid_of(x: Floats) -> tuple[np.float32, np.float32]:
    """Base and scale of one block: rules 1 to 4 of the header."""
    if not np.all(np.abs(x) < OVERFLOW):
        return QUIET_NAN, np.float32(0)
    mn, mx = x.min(), x.max()
    spans_zero = bool(mn <= 0 <= mx)
    step = (mx - mn) / np.float32(254 if spans_zero else 255)
    if step < LEAST_STEP:
        return (np.float32(0) if spans_zero else mn), np.float32(0)
    scale = ((step.view(np.uint32) + np.uint32(0xFF)) & np.uint32(0xFFFFFF00)).view(np.float32)
    if not spans_zero:
        return mn, scale
    return np.rint(mn * (np.float32(1) / scale)) * scale + np.float32(0), scale


def encode_block(x: Floats) -> tuple[np.float32, np.float32, Bytes]:
    base, scale = grid_of(x)
    if scale == 0:
        return base, scale, np.zeros(len(x), np.uint8)
    inv = np.float32(1) / scale
    return base, scale, np.clip(np.rint((x - base) * inv), 0, 255).astype(np.uint8)


def encode(wire: Wire, dtype: DType, numbers: Numbers) -> Bytes:
    chunk = np.zeros(encoded_bytes(wire, len(numbers)), np.uint8)
    if wire is not Wire.minmax8:
        kept = numbers if wire.name == dtype.name else narrow(DType[wire.name], widen(dtype, numbers))
        chunk[: payload_bytes(wire, len(numbers))] = kept.view(np.uint8)
        return chunk
    x = widen(dtype, numbers)
    headers = chunk[: 8 * block_count(len(x))].view(np.float32)
    for block in range(block_count(len(x))):
        part = slice(block * BLOCK_ELEMS, min((block + 1) * BLOCK_ELEMS, len(x)))
        base, scale, q = encode_block(x[part])
        headers[2 * block : 2 * block + 2] = base, scale
        chunk[8 * block_count(len(x)) + part.start :][: len(q)] = q
    return chunk


def decode(wire: Wire, dtype: DType, chunk: Bytes, numel: int) -> Numbers:
    if wire is not Wire.minmax8:
        kept = chunk[: payload_bytes(wire, numel)].view(word_type(DType[wire.name]))
        return kept if wire.name == dtype.name else narrow(dtype, widen(DType[wire.name], kept))
    headers = chunk[: 8 * block_count(numel)].view(np.float32)
    base = np.repeat(headers[0::2], BLOCK_ELEMS)[:numel]
    scale = np.repeat(headers[1::2], BLOCK_ELEMS)[:numel]
    q = chunk[8 * block_count(numel) :][:numel].astype(np.float32)
    return narrow(dtype, base + q * scale)


def reduced(wire: Wire, chunks: Sequence[Bytes], factor: float, numel: int) -> Floats:
    """factor * (chunks[0] + chunks[1] + ...) in that order, in fp32."""
    with np.errstate(all="ignore"):
        total = decode(wire, DType.f32, chunks[0], numel).view(np.float32)
        for chunk in chunks[1:]:
            total = total + decode(wire, DType.f32, chunk, numel)
        return total * np.float32(factor)
