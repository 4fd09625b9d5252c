from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codec import numbers, reference
from tests.codec.native import Codec
from tests.codec.reference import BLOCK_ELEMS, DType, Floats, Wire, blocks_of

SIGN1 = Wire.sign1


def decoded(codec: Codec, x: Floats) -> Floats:
    return codec.decode(SIGN1, DType.f32, codec.encode(SIGN1, DType.f32, x), len(x)).view(np.float32)


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


def test_a_block_without_a_finite_sum_turns_into_nan_alone(codec: Codec) -> None:
    x = np.random.default_rng(0).standard_normal(2 * BLOCK_ELEMS + 70).astype(np.float32)
    x[BLOCK_ELEMS : BLOCK_ELEMS + 2] = 3e38
    got = decoded(codec, x)
    assert np.isnan(got[BLOCK_ELEMS : 2 * BLOCK_ELEMS]).all()
    assert np.isfinite(got[:BLOCK_ELEMS]).all()
    assert np.isfinite(got[2 * BLOCK_ELEMS :]).all()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    numel=st.sampled_from([1, 31, 70, 2047, 2048, 2048 + 65]),
    count=st.integers(1, 4),
    factor=st.sampled_from([1.0, 0.25, -1 / 3]),
)
def test_the_code_of_a_sum_of_few_chunks_has_its_signs_and_its_mean_magnitude_to_two_roundings(
    codec: Codec, seed: int, numel: int, count: int, factor: float
) -> None:
    rng = np.random.default_rng(seed)
    src = [reference.encode(SIGN1, DType.f32, rng.standard_normal(numel, np.float32)) for _ in range(count)]
    total = reference.reduced(SIGN1, src, factor, numel)
    got = codec.decode(SIGN1, DType.f32, codec.reduce_encode(SIGN1, src, factor, numel), numel)
    for part in blocks_of(numel):
        mean = np.abs(total[part].astype(np.float64)).mean()
        decoded = got[part].view(np.float32)
        np.testing.assert_array_equal(np.signbit(decoded), total[part] < 0)
        assert np.all(np.abs(np.abs(decoded.astype(np.float64)) - mean) <= 2 * 2.0**-24 * mean)


def test_a_sum_that_no_number_has_may_be_infinite(codec: Codec) -> None:
    x = np.full(BLOCK_ELEMS, 3e38 / BLOCK_ELEMS, np.float32)
    chunk = reference.encode(SIGN1, DType.f32, x)
    # As large as a damaged or foreign chunk may say.
    chunk[:4] = np.array([3e38], np.float32).view(np.uint8)
    opposite = chunk.copy()
    opposite[4 : 4 + BLOCK_ELEMS // 8] = 255
    code = codec.reduce_encode(SIGN1, [chunk, opposite], 1.0, BLOCK_ELEMS)
    assert not code.any()
    code = codec.reduce_encode(SIGN1, [chunk, chunk], 1.0, BLOCK_ELEMS)
    assert np.isnan(code[:4].view(np.float32))


def test_eight_numbers_take_a_byte(codec: Codec) -> None:
    for numel in [0, 1, 8, 9, 2048, 2049, 2**33 + 1]:
        payload = 4 * reference.block_count(numel) + (numel + 7) // 8
        assert codec.encoded_bytes(SIGN1, numel) == -(-payload // 16) * 16
