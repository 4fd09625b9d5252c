"""The codecs again, plain and slow: what cpp_ext/codec/codec.h says, in numpy, one rounding per operation.

Numbers are float32 arrays for `DType.f32` and uint16 arrays of bit patterns for the two 16-bit types. A
chunk is a uint8 array of `encoded_bytes` bytes whose padding is zero.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
    minmax4 = 4
    sign1 = 5
    topk = 6
    randomk = 7


@dataclass(frozen=True)
class Format:
    """A wire and its settings."""

    wire: Wire
    keep: int = 20
    seed: int = 0


PLAIN = (Wire.f32, Wire.f16, Wire.bf16)
LEVELS = {Wire.minmax8: 256, Wire.minmax4: 16}


def format_of(wire: Wire | Format) -> Format:
    return wire if isinstance(wire, Format) else Format(wire)


def word_type(dtype: DType) -> type[np.float32] | type[np.uint16]:
    return np.float32 if dtype is DType.f32 else np.uint16


def block_count(numel: int) -> int:
    return -(-numel // BLOCK_ELEMS)


def kept_of(keep: int, n: int) -> int:
    """How many of a block of n numbers topk and randomk keep."""
    return -(-keep * n // BLOCK_ELEMS)


def blocks_of(numel: int) -> list[slice]:
    return [slice(i, min(i + BLOCK_ELEMS, numel)) for i in range(0, numel, BLOCK_ELEMS)]


def payload_bytes(wire: Wire | Format, numel: int) -> int:
    format = format_of(wire)
    # Not a sum over blocks: some tests ask for very large sizes.
    kept = numel // BLOCK_ELEMS * format.keep + kept_of(format.keep, numel % BLOCK_ELEMS)
    return {
        Wire.f32: 4 * numel,
        Wire.f16: 2 * numel,
        Wire.bf16: 2 * numel,
        Wire.minmax8: 8 * block_count(numel) + numel,
        Wire.minmax4: 8 * block_count(numel) + -(-numel // 2),
        Wire.sign1: 4 * block_count(numel) + -(-numel // 8),
        Wire.topk: 6 * kept,
        Wire.randomk: 4 * kept,
    }[format.wire]


def encoded_bytes(wire: Wire | Format, numel: int) -> int:
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


def grid_of(levels: int, x: Floats) -> tuple[np.float32, np.float32]:
    """Base and scale of one block: rules 1 to 4 of the header."""
    if not np.all(np.abs(x) < OVERFLOW):
        return QUIET_NAN, np.float32(0)
    mn, mx = x.min(), x.max()
    spans_zero = bool(mn <= 0 <= mx)
    step = (mx - mn) / np.float32(levels - 2 if spans_zero else levels - 1)
    if step < LEAST_STEP:
        return (np.float32(0) if spans_zero else mn), np.float32(0)
    scale = ((step.view(np.uint32) + np.uint32(0xFF)) & np.uint32(0xFFFFFF00)).view(np.float32)
    if not spans_zero:
        return mn, scale
    return np.rint(mn * (np.float32(1) / scale)) * scale + np.float32(0), scale


def levels_of(levels: int, x: Floats) -> tuple[np.float32, np.float32, Bytes]:
    base, scale = grid_of(levels, x)
    if scale == 0:
        return base, scale, np.zeros(len(x), np.uint8)
    inv = np.float32(1) / scale
    return base, scale, np.clip(np.rint((x - base) * inv), 0, levels - 1).astype(np.uint8)


def sign_scale(x: Floats) -> np.float32:
    sums = np.zeros(BLOCK_ELEMS, np.float32)
    sums[: len(x)] = np.abs(x)
    return mean_magnitude(halved(sums), len(x))


def mean_magnitude(total: np.float32, n: int) -> np.float32:
    return total / np.float32(n) if np.isfinite(total) else QUIET_NAN


def top_places(x: Floats, kept: int) -> npt.NDArray[np.intp]:
    magnitudes = np.where(np.isnan(x), 0x7F800001, x.view(np.uint32) & 0x7FFFFFFF).astype(np.int64)
    return np.sort(np.argsort(-magnitudes, kind="stable")[:kept])


def random_places(seed: int, block: int, n: int, kept: int) -> list[int]:
    mask64 = 2**64 - 1

    def mixed(z: int) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask64
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask64
        return z ^ z >> 31

    step = 0x9E3779B97F4A7C15
    start = mixed(seed + step & mask64) + block
    rounds = [mixed(start + step * i & mask64) for i in (1, 2, 3, 4)]
    bits = (n - 1).bit_length()

    def once(x: int) -> int:
        for random in rounds:
            x = x * (random & 0xFFFFFFFF | 1) + (random >> 32) & (1 << bits) - 1
            x ^= x >> (bits + 1) // 2
        return x

    places = []
    for place in range(kept):
        x = once(place)
        while x >= n:
            x = once(x)
        places.append(x)
    return places


def kept_values(x: Floats) -> Floats:
    return np.where(np.isnan(x), QUIET_NAN, np.where(x == 0, np.float32(0), x)).astype(np.float32)


def halved(sums: npt.NDArray[Any]) -> Any:
    """The upper half added to the lower one until one is left."""
    with np.errstate(over="ignore", invalid="ignore"):
        while len(sums) > 1:
            sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
    return sums[0]


def encode_block(format: Format, block: int, x: Floats) -> tuple[bytes, bytes]:
    """What one block adds to the first and to the second part of the chunk."""
    if format.wire in LEVELS:
        base, scale, q = levels_of(LEVELS[format.wire], x)
        if format.wire is Wire.minmax4:
            even = np.append(q, np.zeros(len(q) % 2, np.uint8)).reshape(-1, 2)
            q = even[:, 0] | even[:, 1] << 4
        return np.array([base, scale], np.float32).tobytes(), q.tobytes()
    if format.wire is Wire.sign1:
        scale = sign_scale(x)
        signs = (x < 0) & np.isfinite(scale)
        return np.array([scale]).tobytes(), np.packbits(signs, bitorder="little").tobytes()
    kept = kept_of(format.keep, len(x))
    if format.wire is Wire.topk:
        places = top_places(x, kept)
        return kept_values(x[places]).tobytes(), places.astype(np.uint16).tobytes()
    places = random_places(format.seed, block, len(x), kept)
    values = kept_values(x[places]) if np.all(np.isfinite(x)) else np.full(kept, QUIET_NAN)
    return values.tobytes(), b""


def encode(wire: Wire | Format, dtype: DType, numbers: Numbers) -> Bytes:
    format = format_of(wire)
    chunk = np.zeros(encoded_bytes(format, len(numbers)), np.uint8)
    if format.wire in PLAIN:
        name = format.wire.name
        kept = numbers if name == dtype.name else narrow(DType[name], widen(dtype, numbers))
        payload = kept.tobytes()
    else:
        x = widen(dtype, numbers)
        parts = [encode_block(format, block, x[part]) for block, part in enumerate(blocks_of(len(x)))]
        payload = b"".join(first for first, _ in parts) + b"".join(second for _, second in parts)
    chunk[: len(payload)] = np.frombuffer(payload, np.uint8)
    return chunk


def decode_sparse(format: Format, chunk: Bytes, numel: int) -> Floats:
    parts = blocks_of(numel)
    counts = [kept_of(format.keep, part.stop - part.start) for part in parts]
    values = chunk[: 4 * sum(counts)].view(np.float32)
    if format.wire is Wire.topk:
        places = chunk[4 * sum(counts) : 6 * sum(counts)].view(np.uint16).astype(np.intp)
    else:
        drawn = [
            random_places(format.seed, block, part.stop - part.start, counts[block])
            for block, part in enumerate(parts)
        ]
        places = np.concatenate([np.array(some, np.intp) for some in drawn])
    x = np.zeros(numel, np.float32)
    x[np.repeat([part.start for part in parts], counts) + places] = values
    return x


def decode(wire: Wire | Format, dtype: DType, chunk: Bytes, numel: int) -> Numbers:
    format = format_of(wire)
    if format.wire in PLAIN:
        name = format.wire.name
        kept = chunk[: payload_bytes(format, numel)].view(word_type(DType[name]))
        return kept if name == dtype.name else narrow(dtype, widen(DType[name], kept))
    if format.wire in (Wire.topk, Wire.randomk):
        return narrow(dtype, decode_sparse(format, chunk, numel))
    headers = chunk[: (4 if format.wire is Wire.sign1 else 8) * block_count(numel)].view(np.float32)
    payload = chunk[headers.nbytes : payload_bytes(format, numel)]
    if format.wire is Wire.sign1:
        bits = np.unpackbits(payload, bitorder="little")[:numel].astype(np.uint32)
        scales = np.repeat(headers, BLOCK_ELEMS)[:numel]
        return narrow(dtype, (scales.view(np.uint32) ^ bits << 31).view(np.float32))
    base = np.repeat(headers[0::2], BLOCK_ELEMS)[:numel]
    scale = np.repeat(headers[1::2], BLOCK_ELEMS)[:numel]
    if format.wire is Wire.minmax4:
        payload = np.stack([payload & 15, payload >> 4], axis=1).reshape(-1)[:numel]
    return narrow(dtype, base + payload.astype(np.float32) * scale)


def encode_with_residual(
    wire: Wire | Format, dtype: DType, numbers: Numbers, residual: Floats, others: Sequence[Bytes] = ()
) -> tuple[Bytes, Floats]:
    """Of `numbers` and the numbers in the chunks `others`, added in this order, in fp32."""
    with np.errstate(all="ignore"):
        x = widen(dtype, numbers)
        for chunk in others:
            x = x + decode(wire, DType.f32, chunk, len(x)).view(np.float32)
        x = x + residual
        chunk = encode(wire, DType.f32, x)
        left = x - decode(wire, DType.f32, chunk, len(x)).view(np.float32)
    return chunk, np.where(np.isfinite(left), left, residual).astype(np.float32)


def reduced(wire: Wire | Format, chunks: Sequence[Bytes], factor: float, numel: int) -> Floats:
    """factor * (chunks[0] + chunks[1] + ...) in that order, in fp32."""
    with np.errstate(all="ignore"):
        total = decode(wire, DType.f32, chunks[0], numel).view(np.float32)
        for chunk in chunks[1:]:
            total = total + decode(wire, DType.f32, chunk, numel)
        return total * np.float32(factor)


def reduce_encode(wire: Wire | Format, chunks: Sequence[Bytes], factor: float, numel: int) -> Bytes:
    total = reduced(wire, chunks, factor, numel)
    if format_of(wire).wire is not Wire.sign1 or len(chunks) > 4:
        return encode(wire, DType.f32, total)
    headers = 4 * block_count(numel)
    scales, signs = [], []
    for part in blocks_of(numel):
        # The signs of the last chunk, and whose signs differ from these.
        bits = [np.signbit(decode(wire, DType.f32, chunk, numel)[part]) for chunk in chunks]
        kinds = sum((one ^ bits[-1]).astype(np.int64) << k for k, one in enumerate(bits))
        magnitudes = np.zeros(8, np.float32)
        magnitudes[kinds] = np.abs(total[part])
        sums = np.bincount(kinds, minlength=8) * magnitudes.astype(np.float64)
        with np.errstate(over="ignore"):
            scale = mean_magnitude(np.float32(halved(sums)), part.stop - part.start)
        scales.append(scale)
        signs.append((total[part] < 0) & np.isfinite(scale))
    chunk = np.zeros(encoded_bytes(Wire.sign1, numel), np.uint8)
    chunk[:headers] = np.array(scales, np.float32).view(np.uint8)
    payload = np.packbits(np.concatenate(signs), bitorder="little")
    chunk[headers : headers + len(payload)] = payload
    return chunk
