from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codec import numbers, reference
from tests.codec.native import Codec
from tests.codec.reference import BLOCK_ELEMS, DType, Floats, Wire, blocks_of

SIGN1 = Wire.sign1


def decoded(codec: Codec, x: Floats) -> Floats:
    return codec.decode(SIGN1, DType.f32, codec.encode(SIGN1, DType.f32, x), len(x)).view(np.float32)


@pytest.mark.parametrize("dtype", DType)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_chunks_and_numbers_have_the_bits_of_the_reference(
    codec: Codec, dtype: DType, data: st.DataObject
) -> None:
    x = data.draw(numbers.of_dtype(dtype))
    chunk = codec.encode(SIGN1, dtype, x)
    np.testing.assert_array_equal(chunk, reference.encode(SIGN1, dtype, x))
    got = codec.decode(SIGN1, dtype, chunk, len(x))
    want = reference.decode(SIGN1, dtype, chunk, len(x))
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


@settings(max_examples=60, deadline=None)
@given(x=numbers.finite())
def test_a_block_decodes_to_its_signs_times_its_mean_magnitude(codec: Codec, x: Floats) -> None:
    got = decoded(codec, x)
    for part in blocks_of(len(x)):
        mean = np.abs(x[part].astype(np.float64)).mean()
        if mean * (part.stop - part.start) > np.finfo(np.float32).max:
            assert np.isnan(got[part]).all()
            continue
        np.testing.assert_array_equal(np.signbit(got[part]), x[part] < 0)
        # Eleven roundings of the sum, one of the quotient; below the normal numbers, half a unit each.
        assert np.all(np.abs(np.abs(got[part].astype(np.float64)) - mean) <= 12 * 2.0**-24 * mean + 2.0**-149)


def test_both_zeros_are_positive_and_zeros_alone_decode_to_zero(codec: Codec) -> None:
    x = np.array([0.0, -0.0, -2.0, 2.0], np.float32)
    np.testing.assert_array_equal(decoded(codec, x), [1, 1, -1, 1])
    zeros = np.full(BLOCK_ELEMS, -0.0, np.float32)
    assert np.all(decoded(codec, zeros).view(np.uint32) == 0)


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("numel", [3, 64, 2048, 2 * 2048 + 70])
@pytest.mark.parametrize("where", ["first", "last"])
def test_an_overflow_turns_its_whole_block_into_nan(codec: Codec, bad: float, numel: int, where: str) -> None:
    x = np.random.default_rng(0).standard_normal(numel).astype(np.float32)
    at = 0 if where == "first" else numel - 1
    x[at] = bad
    if bad == 3e38:
        x[at - 1 if at else 1] = bad  # Two of them have no finite sum.
    got = decoded(codec, x)
    for block, part in enumerate(blocks_of(numel)):
        assert np.isnan(got[part]).all() if block == at // BLOCK_ELEMS else np.isfinite(got[part]).all()


def test_every_position_of_a_nan_is_seen(codec: Codec) -> None:
    for at in range(BLOCK_ELEMS):
        x = np.ones(BLOCK_ELEMS, np.float32)
        x[at] = np.nan
        assert np.isnan(codec.encode(SIGN1, DType.f32, x)[:4].view(np.float32)[0])


def test_eight_numbers_take_a_byte(codec: Codec) -> None:
    for numel in [0, 1, 8, 9, 2048, 2049, 2**33 + 1]:
        payload = 4 * reference.block_count(numel) + (numel + 7) // 8
        assert codec.encoded_bytes(SIGN1, numel) == -(-payload // 16) * 16
