from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codec import numbers, reference
from tests.codec.alike import assert_same_chunk, assert_same_numbers
from tests.codec.native import Codec
from tests.codec.reference import Bytes, DType, Wire

FACTORS = (1.0, 0.25, 1 / 3, -2.0)


@st.composite
def chunks(draw: st.DrawFn, wire: Wire) -> tuple[list[Bytes], int]:
    """One to nine chunks of one length."""
    numel = draw(st.sampled_from(numbers.SIZES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    made = []
    for _ in range(draw(st.integers(1, 9))):
        kind = draw(st.sampled_from(numbers.KINDS))
        x = kind(rng, numel).astype(np.float32)
        if draw(st.integers(0, 9)) == 0:
            x[rng.integers(numel)] = draw(st.sampled_from([np.nan, np.inf, -np.inf]))
        made.append(reference.encode(wire, DType.f32, x))
    return made, numel


@pytest.mark.parametrize("wire", Wire)
@settings(max_examples=50, deadline=None)
@given(data=st.data(), factor=st.sampled_from(FACTORS))
def test_reduce_encode_is_the_code_of_the_scaled_sum_in_rank_order(
    codec: Codec, wire: Wire, data: st.DataObject, factor: float
) -> None:
    src, numel = data.draw(chunks(wire))
    want = reference.reduce_encode(wire, src, factor, numel)
    assert_same_chunk(wire, codec.reduce_encode(wire, src, factor, numel), want)


@pytest.mark.parametrize("wire", Wire)
@pytest.mark.parametrize("dtype", DType)
@settings(max_examples=30, deadline=None)
@given(data=st.data(), factor=st.sampled_from(FACTORS))
def test_reduce_decode_is_the_scaled_sum_in_rank_order(
    codec: Codec, wire: Wire, dtype: DType, data: st.DataObject, factor: float
) -> None:
    src, numel = data.draw(chunks(wire))
    want = reference.narrow(dtype, reference.reduced(wire, src, factor, numel))
    assert_same_numbers(dtype, codec.reduce_decode(wire, dtype, src, factor, numel), want)


@pytest.mark.parametrize("wire", Wire)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_destination_may_be_one_of_the_sources(codec: Codec, wire: Wire, data: st.DataObject) -> None:
    src, numel = data.draw(chunks(wire))
    into = data.draw(st.integers(0, len(src) - 1))
    apart = codec.reduce_encode(wire, src, 0.5, numel)
    assert_same_chunk(wire, codec.reduce_encode(wire, src, 0.5, numel, into=into), apart)


def test_the_order_of_the_ranks_is_the_order_of_the_sum(codec: Codec) -> None:
    terms = [np.full(100, value, np.float32).view(np.uint8) for value in (1.0, 2.0**24, -(2.0**24))]
    forth = codec.reduce_encode(Wire.f32, terms, 1.0, 100).view(np.float32)
    back = codec.reduce_encode(Wire.f32, terms[::-1], 1.0, 100).view(np.float32)
    assert np.all(forth == 0)
    assert np.all(back == 1)


def test_a_hundred_chunks_are_reduced(codec: Codec) -> None:
    rng = np.random.default_rng(0)
    src = [reference.encode(Wire.minmax8, DType.f32, rng.random(3000, np.float32)) for _ in range(100)]
    want = reference.reduce_encode(Wire.minmax8, src, 0.01, 3000)
    np.testing.assert_array_equal(codec.reduce_encode(Wire.minmax8, src, 0.01, 3000), want)


def test_reducing_nothing_is_refused(codec: Codec) -> None:
    with pytest.raises(RuntimeError, match="count=0"):
        codec.reduce_encode(Wire.f32, [], 1.0, 10)
    with pytest.raises(RuntimeError, match="count=0"):
        codec.reduce_decode(Wire.f32, DType.f32, [], 1.0, 10)


@pytest.mark.parametrize("wire", [Wire.minmax8, Wire.minmax4])
@settings(max_examples=60, deadline=None)
@given(
    exponents=st.lists(st.sampled_from([-149, -127, -101, -99, -1, 88, 91, 120]), min_size=1, max_size=6),
    factor=st.sampled_from([0.5, 0.25, 2.0**-20, 2.0**-21, 2.0**-30]),
    seed=st.integers(0, 2**32),
)
def test_a_power_of_two_scales_the_sum_whatever_the_size_of_its_terms(
    codec: Codec, wire: Wire, exponents: list[int], factor: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    numel = 3 * reference.BLOCK_ELEMS - 5
    terms = [np.ldexp(rng.standard_normal(numel), exponent).astype(np.float32) for exponent in exponents]
    src = [reference.encode(wire, DType.f32, x) for x in terms]
    want = reference.reduced(wire, src, factor, numel)
    assert_same_numbers(DType.f32, codec.reduce_decode(wire, DType.f32, src, factor, numel), want)
    assert_same_chunk(
        wire, codec.reduce_encode(wire, src, factor, numel), reference.encode(wire, DType.f32, want)
    )
