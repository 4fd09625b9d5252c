from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codec import numbers, reference
from tests.codec.native import Codec
from tests.codec.reference import DType, Wire, encoded_bytes, payload_bytes

PLAIN = (Wire.f32, Wire.f16, Wire.bf16)
TORCH = {DType.f16: torch.float16, DType.bf16: torch.bfloat16}


@pytest.mark.parametrize("wire", PLAIN)
@pytest.mark.parametrize("dtype", DType)
@settings(max_examples=40, deadline=None)
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


@pytest.mark.parametrize("dtype", [DType.f16, DType.bf16])
def test_all_16_bit_numbers_survive_the_way_through_fp32(codec: Codec, dtype: DType) -> None:
    words = np.arange(2**16, dtype=np.uint16)
    wide = codec.encode(Wire.f32, dtype, words)
    np.testing.assert_array_equal(wide.view(np.float32), reference.widen(dtype, words))
    back = codec.decode(Wire.f32, dtype, wide, len(words))
    quiet = words.copy()
    nan = np.isnan(reference.widen(dtype, words))
    quiet[nan] |= 0x200 if dtype is DType.f16 else 0x40
    np.testing.assert_array_equal(back, quiet)


@pytest.mark.parametrize("dtype", [DType.f16, DType.bf16])
def test_narrowing_is_what_torch_does(codec: Codec, dtype: DType) -> None:
    """Every half-way case of the 16-bit type, its two neighbours in fp32, and random bits."""
    words = np.arange(2**15 - 1, dtype=np.uint16)
    low = reference.widen(dtype, words).astype(np.float64)
    high = reference.widen(dtype, words + np.uint16(1)).astype(np.float64)
    with np.errstate(all="ignore"):
        middle = ((low + high) / 2).astype(np.float32)
        cases = [middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))]
    raw = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32)
    x = np.concatenate([*cases, *(-case for case in cases), raw])
    x = x[~np.isnan(x)]
    got = codec.encode(Wire[dtype.name], DType.f32, x)[: 2 * len(x)].view(np.uint16)
    want = torch.from_numpy(x).to(TORCH[dtype]).view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("wire", PLAIN)
def test_the_size_is_rounded_up_to_16(codec: Codec, wire: Wire) -> None:
    for numel in [0, 1, 3, 4, 5, 8, 9, 2**33 + 1]:
        assert codec.encoded_bytes(wire, numel) == encoded_bytes(wire, numel) >= payload_bytes(wire, numel)
