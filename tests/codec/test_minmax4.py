"""What differs from minmax8: 15 steps, and two numbers in a byte."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from tests.codec import numbers, reference
from tests.codec.native import Codec
from tests.codec.reference import DType, Floats, Wire, blocks_of

MINMAX4 = Wire.minmax4


def decoded(codec: Codec, x: Floats) -> Floats:
    return codec.decode(MINMAX4, DType.f32, codec.encode(MINMAX4, DType.f32, x), len(x)).view(np.float32)


@settings(max_examples=60, deadline=None)
@given(x=numbers.finite())
def test_no_number_is_off_by_more_than_half_a_step(codec: Codec, x: Floats) -> None:
    got = decoded(codec, x).astype(np.float64)
    headers = codec.encode(MINMAX4, DType.f32, x).view(np.float32)
    for block, part in enumerate(blocks_of(len(x))):
        scale = np.float64(headers[2 * block + 1])
        error = np.abs(got[part] - x[part].astype(np.float64)).max()
        if scale == 0:
            assert error <= np.float64(x[part].max()) - np.float64(x[part].min()) < 2.0**-122
        else:
            assert error <= scale * (0.5 + 2.0**-14) + np.spacing(np.abs(x[part]).max())


@settings(max_examples=40, deadline=None)
@given(x=numbers.finite())
def test_zero_stays_exactly_zero_whatever_surrounds_it(codec: Codec, x: Floats) -> None:
    x[::3] = 0
    x[1::5] = -0.0
    assert np.all(decoded(codec, x)[x == 0].view(np.uint32) == 0)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.7, 1e-40, -1e-45, 8e37])
@pytest.mark.parametrize("numel", [1, 5, 64, 2048, 2049])
def test_a_constant_block_is_exact(codec: Codec, value: float, numel: int) -> None:
    np.testing.assert_array_equal(decoded(codec, np.full(numel, value, np.float32)), np.float32(value))


def test_ties_go_to_the_even_point_of_the_grid(codec: Codec) -> None:
    halves = np.arange(-6, 8, dtype=np.float32) + np.float32(0.5)
    x = np.concatenate([np.array([-6, 8], np.float32), halves])
    np.testing.assert_array_equal(decoded(codec, x)[2:], np.rint(halves))


def test_two_numbers_take_a_byte(codec: Codec) -> None:
    for numel in [0, 1, 2, 3, 2048, 2049, 2**33 + 1]:
        payload = 8 * reference.block_count(numel) + (numel + 1) // 2
        assert codec.encoded_bytes(MINMAX4, numel) == -(-payload // 16) * 16
