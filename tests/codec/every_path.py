"""The codecs on every path of this processor at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from tests.codec.alike import assert_same_chunk, assert_same_numbers
from tests.codec.native import Codec
from tests.codec.reference import Bytes, DType, Floats, Format, Numbers, Wire

PATHS = ("avx512", "avx2", "portable")
OFFSETS = (0, 4)
"""Distances of all data from a 64-byte boundary: 4 is all that the header promises."""

Result = TypeVar("Result")


class EveryPath(Codec):
    """Calls every path with data at every offset, and returns what all of them give: the same bits."""

    def __init__(self, library: Path) -> None:
        super().__init__(library)
        self._each = [
            (codec, path)
            for codec in (Codec(library, offset) for offset in OFFSETS)
            for path in PATHS
            if codec.use_path(path)
        ]

    def each(self) -> Iterator[Codec]:
        """One by one, for what need not be the same."""
        for codec, path in self._each:
            assert codec.use_path(path)
            yield codec

    def encoded_bytes(self, wire: Wire | Format, numel: int) -> int:
        return self._same(lambda codec: codec.encoded_bytes(wire, numel), _assert_equal)

    def encode(self, wire: Wire | Format, dtype: DType, numbers: Numbers) -> Bytes:
        return self._same(lambda codec: codec.encode(wire, dtype, numbers), _assert_same_bits)

    def encode_with_residual(
        self, wire: Wire | Format, dtype: DType, numbers: Numbers, residual: Floats
    ) -> tuple[Bytes, Floats]:
        def call(codec: Codec) -> tuple[Bytes, Floats]:
            return codec.encode_with_residual(wire, dtype, numbers, residual)

        return self._same(call, lambda got, want, where: _assert_same_sums(wire, got, want, where))

    def encode_sum_with_residual(
        self, wire: Wire | Format, dtype: DType, own: Numbers, chunks: Sequence[Bytes], residual: Floats
    ) -> tuple[Bytes, Floats]:
        def call(codec: Codec) -> tuple[Bytes, Floats]:
            return codec.encode_sum_with_residual(wire, dtype, own, chunks, residual)

        return self._same(call, lambda got, want, where: _assert_same_sums(wire, got, want, where))

    def decode(self, wire: Wire | Format, dtype: DType, chunk: Bytes, numel: int) -> Numbers:
        return self._same(lambda codec: codec.decode(wire, dtype, chunk, numel), _assert_same_bits)

    def headers_are_finite(self, wire: Wire | Format, chunk: Bytes, numel: int) -> bool:
        return self._same(lambda codec: codec.headers_are_finite(wire, chunk, numel), _assert_equal)

    def reduce_encode(
        self, wire: Wire | Format, chunks: Sequence[Bytes], factor: float, numel: int, into: int | None = None
    ) -> Bytes:
        return self._same(
            lambda codec: codec.reduce_encode(wire, chunks, factor, numel, into),
            lambda got, want, where: assert_same_chunk(wire, got, want, where),
        )

    def reduce_decode(
        self, wire: Wire | Format, dtype: DType, chunks: Sequence[Bytes], factor: float, numel: int
    ) -> Numbers:
        return self._same(
            lambda codec: codec.reduce_decode(wire, dtype, chunks, factor, numel),
            lambda got, want, where: assert_same_numbers(dtype, got, want, where),
        )

    def _same(
        self, call: Callable[[Codec], Result], assert_alike: Callable[[Result, Result, str], None]
    ) -> Result:
        found: list[Result] = []
        refusals = []
        for codec, path in self._each:
            assert codec.use_path(path)
            try:
                found.append(call(codec))
            except RuntimeError as refusal:
                refusals.append(str(refusal))
                continue
            assert_alike(found[-1], found[0], f"{path}, {codec.offset} bytes off")
        if refusals:
            assert refusals == refusals[:1] * len(self._each), refusals
            raise RuntimeError(refusals[0])
        return found[0]


def _assert_equal(got: object, want: object, where: str) -> None:
    assert got == want, where


def _assert_same_bits(got: Numbers, want: Numbers, where: str) -> None:
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8), where)


def _assert_same_sums(
    wire: Wire | Format, got: tuple[Bytes, Floats], want: tuple[Bytes, Floats], where: str
) -> None:
    """A chunk, and what it left."""
    assert_same_chunk(wire, got[0], want[0], where)
    assert_same_numbers(DType.f32, got[1], want[1], where)
