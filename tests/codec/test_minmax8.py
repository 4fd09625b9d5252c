from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codec import numbers, reference
from tests.codec.native import Codec
from tests.codec.reference import BLOCK_ELEMS, DType, Floats, Wire, block_count

MINMAX8 = Wire.minmax8


def decoded(codec: Codec, x: Floats) -> Floats:
    return codec.decode(MINMAX8, DType.f32, codec.encode(MINMAX8, DType.f32, x), len(x)).view(np.float32)


def floats(*values: float) -> Floats:
    return np.array(values, np.float32)


def blocks_of(x: Floats) -> list[Floats]:
    return [x[i : i + BLOCK_ELEMS] for i in range(0, len(x), BLOCK_ELEMS)]


@settings(max_examples=60, deadline=None)
@given(x=st.lists(st.floats(width=32), min_size=1, max_size=130).map(lambda values: floats(*values)))
def test_any_short_list_has_the_bytes_of_the_reference(codec: Codec, x: Floats) -> None:
    np.testing.assert_array_equal(
        codec.encode(MINMAX8, DType.f32, x), reference.encode(MINMAX8, DType.f32, x)
    )


@settings(max_examples=150, deadline=None)
@given(x=numbers.finite())
def test_the_error_is_at_most_half_a_step_and_one_ulp(codec: Codec, x: Floats) -> None:
    got = decoded(codec, x)
    for block, back in zip(blocks_of(x), blocks_of(got), strict=True):
        _, scale = reference.grid_of(256, block)
        error = np.abs(back.astype(np.float64) - block.astype(np.float64)).max()
        if scale == 0:
            assert error <= np.float64(block.max()) - np.float64(block.min()) < 2.0**-118
        else:
            ulp = np.spacing(np.abs(block).max())
            assert error <= np.float64(scale) * (0.5 + 2.0**-14) + ulp


@settings(max_examples=60, deadline=None)
@given(x=numbers.finite())
def test_zero_stays_exactly_zero_whatever_surrounds_it(codec: Codec, x: Floats) -> None:
    x[::3] = 0
    x[1::5] = -0.0
    got = decoded(codec, x)
    assert np.all(got[x == 0].view(np.uint32) == 0)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.7, 1e-40, -1e-45, 8e37])
@pytest.mark.parametrize("numel", [1, 5, 64, 2048, 2049])
def test_a_constant_block_is_exact(codec: Codec, value: float, numel: int) -> None:
    np.testing.assert_array_equal(decoded(codec, np.full(numel, value, np.float32)), np.float32(value))


def test_ties_go_to_the_even_point_of_the_grid(codec: Codec) -> None:
    halves = np.arange(-126, 128, dtype=np.float32) + np.float32(0.5)
    x = np.concatenate([floats(-126, 128), halves])
    np.testing.assert_array_equal(decoded(codec, x)[2:], np.rint(halves))


def test_a_tie_at_the_edge_does_not_wrap_around(codec: Codec) -> None:
    # The case that makes Bagua's own kernel err by 255 steps.
    for low, high in [(-49024, 16256), (-0.5, 253.5), (-253.5, 0.5), (-126.5, 127.5)]:
        x = np.linspace(low, high, 1000, dtype=np.float32)
        step = (high - low) / 254
        assert np.abs(decoded(codec, x) - x).max() <= 0.51 * step


def test_a_range_far_below_the_offset_keeps_its_detail(codec: Codec) -> None:
    x = (1e6 + np.random.default_rng(0).standard_normal(BLOCK_ELEMS)).astype(np.float32)
    assert np.abs(decoded(codec, x) - x).max() <= (x.max() - x.min()) / 255 / 2 + np.spacing(x.max())


@pytest.mark.parametrize("exponent", [-20, -30, -35])
def test_small_gradients_keep_their_detail(codec: Codec, exponent: int) -> None:
    x = (np.random.default_rng(0).standard_normal(BLOCK_ELEMS) * 10.0**exponent).astype(np.float32)
    assert np.abs(decoded(codec, x) - x).max() <= (x.max() - x.min()) / 254 * 0.501


def test_magnitudes_up_to_the_limit_stay_finite(codec: Codec) -> None:
    most = np.nextafter(np.float32(2.0**126), np.float32(0))
    x = np.linspace(-most, most, BLOCK_ELEMS, dtype=np.float32)
    got = decoded(codec, x)
    assert np.abs(got.astype(np.float64) - x).max() <= 2.0**127 / 254 * 0.501


def test_q_times_scale_is_exact(codec: Codec) -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        x = (rng.standard_normal(300) * 10.0 ** rng.integers(-36, 37)).astype(np.float32)
        scale = codec.encode(MINMAX8, DType.f32, x)[4:8].view(np.float32)[0]
        assert np.float64(255) * np.float64(scale) == np.float32(255) * scale


def test_the_size_is_the_headers_and_the_bytes_rounded_up_to_16(codec: Codec) -> None:
    for numel in [0, 1, 8, 9, 2047, 2048, 2049, 2**33 + 1]:
        size = codec.encoded_bytes(MINMAX8, numel)
        assert size % 16 == 0
        assert 0 <= size - (8 * block_count(numel) + numel) < 16
