"""Error feedback: what a chunk lacks is carried to the next one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codec import numbers, reference
from tests.codec.native import Codec
from tests.codec.reference import DType, Format, Wire, widen
from tests.codec.test_reduce import assert_same_chunk

BIASED = (Format(Wire.minmax4), Format(Wire.sign1), Format(Wire.topk), Format(Wire.bf16))


@pytest.mark.parametrize("wire", Wire)
@pytest.mark.parametrize("dtype", DType)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_chunk_and_residual_have_the_bits_of_the_reference(
    codec: Codec, wire: Wire, dtype: DType, data: st.DataObject
) -> None:
    x = data.draw(numbers.of_dtype(dtype))
    rng = np.random.default_rng(len(x))
    residual = (rng.standard_normal(len(x)) * 10.0 ** rng.integers(-30, 3)).astype(np.float32)
    chunk, left = codec.encode_with_residual(wire, dtype, x, residual)
    want_chunk, want_left = reference.encode_with_residual(wire, dtype, x, residual)
    assert_same_chunk(wire, chunk, want_chunk)
    np.testing.assert_array_equal(left.view(np.uint32), want_left.view(np.uint32))


@pytest.mark.parametrize("format", BIASED, ids=lambda format: format.wire.name)
def test_what_was_sent_and_what_is_left_is_what_was_given(codec: Codec, format: Format) -> None:
    rng = np.random.default_rng(0)
    n, steps = 5000, 30
    residual = np.zeros(n, np.float32)
    given_, sent = np.zeros(n), np.zeros(n)
    for _ in range(steps):
        x = rng.standard_normal(n).astype(np.float32)
        chunk, residual = codec.encode_with_residual(format, DType.f32, x, residual)
        given_ += x
        sent += widen(DType.f32, codec.decode(format, DType.f32, chunk, n))
    np.testing.assert_allclose(sent + residual, given_, rtol=0, atol=1e-4)


@pytest.mark.parametrize("wire", Wire)
def test_an_overflow_leaves_the_residual_as_it_was(codec: Codec, wire: Wire) -> None:
    x = np.random.default_rng(0).standard_normal(3000).astype(np.float32)
    x[100], x[200] = np.inf, np.nan
    residual = np.full(3000, 0.125, np.float32)
    _, left = codec.encode_with_residual(wire, DType.f32, x, residual)
    assert np.all(np.isfinite(left))
    assert left[100] == left[200] == 0.125


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -0.0])
def test_more_of_one_kind_than_topk_keeps(codec: Codec, value: float) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal(2300).astype(np.float32)
    residual = rng.standard_normal(len(x)).astype(np.float32)
    places = np.concatenate([rng.permutation(2048)[:1990], np.arange(2050, 2300)])
    x[places] = value
    if value == 0:
        residual[places] = value
    chunk, left = codec.encode_with_residual(Wire.topk, DType.f32, x, residual)
    want_chunk, want_left = reference.encode_with_residual(Wire.topk, DType.f32, x, residual)
    assert_same_chunk(Wire.topk, chunk, want_chunk)
    np.testing.assert_array_equal(left.view(np.uint32), want_left.view(np.uint32))
    if not np.isfinite(value):
        np.testing.assert_array_equal(left[places], residual[places])
