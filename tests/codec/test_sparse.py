from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codec import numbers, reference
from tests.codec.native import Codec
from tests.codec.reference import BLOCK_ELEMS, DType, Floats, Format, Wire, blocks_of, kept_of

SPARSE = (Wire.topk, Wire.randomk)
KEEP = (1, 20, 32, 33, 64, 65, 256)
"""The vector paths choose in one way up to 32, in another up to 64, and leave more to the portable one."""


def decoded(codec: Codec, format: Format, x: Floats) -> Floats:
    return codec.decode(format, DType.f32, codec.encode(format, DType.f32, x), len(x)).view(np.float32)


@st.composite
def formats(draw: st.DrawFn, wire: Wire) -> Format:
    return Format(wire, draw(st.sampled_from(KEEP)), draw(st.integers(0, 2**64 - 1)))


@pytest.mark.parametrize("wire", SPARSE)
@pytest.mark.parametrize("dtype", DType)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_chunks_and_numbers_have_the_bits_of_the_reference(
    codec: Codec, wire: Wire, dtype: DType, data: st.DataObject
) -> None:
    x, format = data.draw(numbers.of_dtype(dtype)), data.draw(formats(wire))
    chunk = codec.encode(format, dtype, x)
    np.testing.assert_array_equal(chunk, reference.encode(format, dtype, x))
    got = codec.decode(format, dtype, chunk, len(x))
    want = reference.decode(format, dtype, chunk, len(x))
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


@pytest.mark.parametrize("wire", SPARSE)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_number_is_kept_as_it_is_or_decodes_to_zero(codec: Codec, wire: Wire, data: st.DataObject) -> None:
    x, format = data.draw(numbers.finite()), data.draw(formats(wire))
    got = decoded(codec, format, x)
    assert np.all((got == x) | (got == 0))
    assert not np.any(np.signbit(got) & (got == 0))
    for part in blocks_of(len(x)):
        assert np.count_nonzero(got[part]) <= kept_of(format.keep, part.stop - part.start)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_top_k_leaves_nothing_greater_than_what_it_keeps(codec: Codec, data: st.DataObject) -> None:
    x, format = data.draw(numbers.finite()), data.draw(formats(Wire.topk))
    got = decoded(codec, format, x)
    for part in blocks_of(len(x)):
        kept = got[part] != 0
        least = np.abs(x[part][kept]).min() if kept.any() else 0
        assert np.abs(x[part][~kept]).max(initial=0) <= least


def test_of_equal_magnitudes_the_earlier_ones_are_kept(codec: Codec) -> None:
    x = np.full(BLOCK_ELEMS, 2.0, np.float32)
    x[::2] = -2.0
    x[1000:1010] = 3.0
    for keep in KEEP[1:]:
        got = decoded(codec, Format(Wire.topk, keep), x)
        want = np.zeros_like(x)
        want[1000:1010] = 3.0
        want[: keep - 10] = x[: keep - 10]
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("scales", [(1, 1, 1, 1), (1, 1e-3, 1e3, 1), (1, 1, 0, 1), (1, 0.9, 1.1, 1)])
@pytest.mark.parametrize("levels", [None, 4, 40])
def test_what_a_block_keeps_does_not_depend_on_the_blocks_before(
    codec: Codec, scales: tuple[float, ...], levels: int | None
) -> None:
    """What was kept there is where the search begins. With few levels, many are equal to the least kept."""
    rng = np.random.default_rng(0)
    for keep in KEEP:
        x = rng.standard_normal((len(scales), BLOCK_ELEMS))
        x = np.round(x * levels) / levels if levels else x
        numbers_ = (x * np.array(scales)[:, None]).astype(np.float32).ravel()
        format = Format(Wire.topk, keep)
        np.testing.assert_array_equal(
            codec.encode(format, DType.f32, numbers_), reference.encode(format, DType.f32, numbers_)
        )


@pytest.mark.parametrize("wire", SPARSE)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("numel", [1, 70, 2048, 2048 + 70])
def test_an_overflow_is_seen_wherever_it_is(codec: Codec, wire: Wire, bad: float, numel: int) -> None:
    for at in range(0, numel, 37):
        x = np.random.default_rng(at).standard_normal(numel).astype(np.float32)
        x[at] = bad
        got = decoded(codec, Format(wire, keep=1), x)
        block = at // BLOCK_ELEMS * BLOCK_ELEMS
        assert not np.isfinite(got[block : block + BLOCK_ELEMS]).all()
        assert np.isfinite(np.delete(got, np.s_[block : block + BLOCK_ELEMS])).all()


def test_a_seed_draws_each_number_equally_often(codec: Codec) -> None:
    for numel in (2048, 1500, 3):
        x = np.ones(numel, np.float32)
        drawn = sum(decoded(codec, Format(Wire.randomk, 256, seed), x) for seed in range(400))
        share = kept_of(256, numel) / numel
        # Six standard deviations of a binomial count.
        assert np.abs(drawn - 400 * share).max() <= 6 * np.sqrt(400 * share * (1 - share)) + 1


def test_blocks_and_seeds_are_drawn_apart(codec: Codec) -> None:
    def places(seed: int, block: int) -> frozenset[int]:
        got = decoded(codec, Format(Wire.randomk, 20, seed), np.ones(4 * BLOCK_ELEMS, np.float32))
        return frozenset(np.flatnonzero(got[block * BLOCK_ELEMS : (block + 1) * BLOCK_ELEMS]).tolist())

    drawn = {places(seed, block) for seed in range(4) for block in range(4)}
    assert len(drawn) == 16
    assert all(len(some) == 20 for some in drawn)


def test_a_place_beyond_the_block_is_passed_over(codec: Codec) -> None:
    x = np.random.default_rng(0).standard_normal(100).astype(np.float32)
    chunk = reference.encode(Wire.topk, DType.f32, x)
    chunk[4:6] = 255
    np.testing.assert_array_equal(codec.decode(Wire.topk, DType.f32, chunk, 100).view(np.float32), 0)


@pytest.mark.parametrize("wire", SPARSE)
def test_the_size_depends_on_the_number_of_numbers_only(codec: Codec, wire: Wire) -> None:
    for numel in [0, 1, 102, 103, 2048, 2049, 5000, 2**33 + 1]:
        for keep in KEEP:
            format = Format(wire, keep)
            assert codec.encoded_bytes(format, numel) == reference.encoded_bytes(format, numel)


@pytest.mark.parametrize("keep", [0, 257])
@pytest.mark.parametrize("wire", SPARSE)
def test_a_share_out_of_range_is_refused(codec: Codec, wire: Wire, keep: int) -> None:
    with pytest.raises(RuntimeError, match=f"keep={keep}: want 1 to 256"):
        codec.encoded_bytes(Format(wire, keep), 100)
    assert codec.encoded_bytes(Format(Wire.f32, keep), 4) == 16
