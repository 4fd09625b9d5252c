from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codec import numbers
from tests.codec.every_path import EveryPath
from tests.codec.native import Codec
from tests.codec.reference import BLOCK_ELEMS, DType, Floats, Wire, encoded_bytes, word_type

_ALL_BITS_OF_THE_EXPONENT = {DType.f16: 0x7C00, DType.bf16: 0x7F80}
WITH_HEADERS = (Wire.minmax8, Wire.minmax4, Wire.sign1)


def decoded(codec: Codec, wire: Wire, chunk: np.ndarray, numel: int) -> Floats:
    return codec.decode(wire, DType.f32, chunk, numel).view(np.float32)


@pytest.mark.parametrize("wire", WITH_HEADERS)
@settings(max_examples=60, deadline=None)
@given(x=numbers.finite(), value=st.sampled_from([1.0, np.inf, -np.inf, np.nan, 3e38]), data=st.data())
def test_headers_tell_what_a_look_at_all_numbers_would(
    codec: Codec, wire: Wire, x: Floats, value: float, data: st.DataObject
) -> None:
    x[data.draw(st.integers(0, len(x) - 1))] = value
    chunk = codec.encode(wire, DType.f32, x)
    finite = bool(np.isfinite(decoded(codec, wire, chunk, len(x))).all())
    assert codec.headers_are_finite(wire, chunk, len(x)) == finite


@pytest.mark.parametrize("wire", WITH_HEADERS)
@pytest.mark.parametrize("numel", [1, BLOCK_ELEMS, BLOCK_ELEMS + 1, 3 * BLOCK_ELEMS])
@pytest.mark.parametrize("dtype", list(DType))
def test_one_number_that_is_not_finite_is_seen_wherever_it_is(
    codec: Codec, wire: Wire, numel: int, dtype: DType
) -> None:
    zeros = np.zeros(numel, word_type(dtype))
    assert codec.headers_are_finite(wire, codec.encode(wire, dtype, zeros), numel)
    for place in {0, numel // 2, numel - 1}:
        x = zeros.copy()
        x[place] = np.nan if dtype == DType.f32 else _ALL_BITS_OF_THE_EXPONENT[dtype] + 1
        assert not codec.headers_are_finite(wire, codec.encode(wire, dtype, x), numel)


@pytest.mark.parametrize("wire", WITH_HEADERS)
@settings(max_examples=200, deadline=None)
@given(numel=st.sampled_from([1, 100, BLOCK_ELEMS, 2 * BLOCK_ELEMS + 5]), seed=st.integers(0, 2**32 - 1))
def test_no_damaged_chunk_with_finite_headers_decodes_to_infinity(
    codec: EveryPath, wire: Wire, numel: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    chunk = rng.integers(0, 256, encoded_bytes(wire, numel), np.uint8)
    if codec.headers_are_finite(wire, chunk, numel):
        # The scale is none that an encoder makes, so that paths may round its multiples or not.
        for one in codec.each():
            assert np.isfinite(decoded(one, wire, chunk, numel)).all()


@pytest.mark.parametrize(("wire", "last"), [(Wire.minmax8, 255), (Wire.minmax4, 15)])
def test_a_grid_whose_upper_end_is_infinite_is_not_finite(codec: Codec, wire: Wire, last: int) -> None:
    chunk = codec.encode(wire, DType.f32, np.ones(10, np.float32))
    # Each by itself is finite.
    chunk[:8].view(np.float32)[:] = (2e38, 2e38 / last)
    assert not codec.headers_are_finite(wire, chunk, 10)
    chunk[:8].view(np.float32)[:] = (1e38, 2e38 / last)
    assert codec.headers_are_finite(wire, chunk, 10)


@pytest.mark.parametrize("wire", [wire for wire in Wire if wire not in WITH_HEADERS])
def test_wires_without_headers_know_nothing(codec: Codec, wire: Wire) -> None:
    chunk = codec.encode(wire, DType.f32, np.ones(10, np.float32))
    assert not codec.headers_are_finite(wire, chunk, 10)
