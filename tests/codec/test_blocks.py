"""What the wires with a header per block have in common: minmax8, minmax4 and sign1."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codec import numbers, reference
from tests.codec.native import Codec
from tests.codec.reference import BLOCK_ELEMS, DType, Wire, blocks_of

MINMAX = (Wire.minmax8, Wire.minmax4)
WIRES = (*MINMAX, Wire.sign1)
OVERFLOWS = [(wire, bad) for wire in WIRES for bad in (np.nan, -np.nan, np.inf, -np.inf)]
OVERFLOWS += [(wire, bad) for wire in MINMAX for bad in (2.0**126, -(2.0**127))]


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("dtype", DType)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_chunks_and_numbers_have_the_bits_of_the_reference(
    codec: Codec, wire: Wire, dtype: DType, data: st.DataObject
) -> None:
    x = data.draw(numbers.of_dtype(dtype))
    chunk = codec.encode(wire, dtype, x)
    np.testing.assert_array_equal(chunk, reference.encode(wire, dtype, x))
    got = codec.decode(wire, dtype, chunk, len(x))
    want = reference.decode(wire, dtype, chunk, len(x))
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


@pytest.mark.parametrize(("wire", "bad"), OVERFLOWS)
@pytest.mark.parametrize("numel", [3, 64, 2048, 2 * 2048 + 70])
@pytest.mark.parametrize("where", ["first", "last"])
def test_an_overflow_turns_its_whole_block_into_nan(
    codec: Codec, wire: Wire, bad: float, numel: int, where: str
) -> None:
    x = np.random.default_rng(0).standard_normal(numel).astype(np.float32)
    at = 0 if where == "first" else numel - 1
    x[at] = bad
    got = codec.decode(wire, DType.f32, codec.encode(wire, DType.f32, x), numel).view(np.float32)
    for block, part in enumerate(blocks_of(numel)):
        assert np.isnan(got[part]).all() if block == at // BLOCK_ELEMS else np.isfinite(got[part]).all()


@pytest.mark.parametrize("wire", [Wire.minmax8, Wire.sign1])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_every_position_of_a_nan_is_seen(codec: Codec, wire: Wire, sign: float) -> None:
    for at in range(BLOCK_ELEMS):
        x = np.ones(BLOCK_ELEMS, np.float32)
        x[at] = np.copysign(np.nan, sign)
        assert np.isnan(codec.encode(wire, DType.f32, x)[:4].view(np.float32)[0])


@pytest.mark.parametrize("wire", WIRES)
def test_what_a_block_becomes_does_not_depend_on_its_neighbours(codec: Codec, wire: Wire) -> None:
    """Several blocks are under way at once."""
    kinds = [kind(np.random.default_rng(i), BLOCK_ELEMS) for i, kind in enumerate(numbers.KINDS)]
    x = np.concatenate([*kinds, kinds[0][:70]]).astype(np.float32)
    got = codec.decode(wire, DType.f32, codec.encode(wire, DType.f32, x), len(x)).view(np.uint32)
    for part in blocks_of(len(x)):
        alone = codec.encode(wire, DType.f32, x[part])
        want = codec.decode(wire, DType.f32, alone, len(x[part])).view(np.uint32)
        np.testing.assert_array_equal(got[part], want)


@pytest.mark.parametrize("wire", WIRES)
def test_an_outlier_harms_its_own_block_only(codec: Codec, wire: Wire) -> None:
    x = np.random.default_rng(0).standard_normal(3 * BLOCK_ELEMS).astype(np.float32)
    alone = codec.decode(wire, DType.f32, codec.encode(wire, DType.f32, x), len(x))
    x[BLOCK_ELEMS + 5] = 1e9
    got = codec.decode(wire, DType.f32, codec.encode(wire, DType.f32, x), len(x))
    np.testing.assert_array_equal(got[:BLOCK_ELEMS], alone[:BLOCK_ELEMS])
    np.testing.assert_array_equal(got[2 * BLOCK_ELEMS :], alone[2 * BLOCK_ELEMS :])
