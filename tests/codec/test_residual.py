"""Error feedback: what a chunk lacks is carried to the next one."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baguarun.comm.extension import load_extension
from baguarun.errors import UsageError
from tests.codec import native, numbers, reference
from tests.codec.alike import assert_same_chunk
from tests.codec.native import Codec
from tests.codec.reference import DType, Format, Wire, widen

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


@pytest.mark.parametrize("wire", Wire)
@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("count", [0, 1, 3, 4, 9])
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_a_sum_is_encoded_with_a_residual_as_in_the_reference(
    codec: Codec, wire: Wire, dtype: DType, count: int, data: st.DataObject
) -> None:
    own = data.draw(numbers.of_dtype(dtype))
    rng = np.random.default_rng(len(own))
    residual = rng.standard_normal(len(own)).astype(np.float32)
    others = [others_chunk(wire, len(own), seed) for seed in range(count)]
    chunk, left = codec.encode_sum_with_residual(wire, dtype, own, others, residual)
    want_chunk, want_left = reference.encode_with_residual(wire, dtype, own, residual, others)
    assert_same_chunk(wire, chunk, want_chunk)
    np.testing.assert_array_equal(left.view(np.uint32), want_left.view(np.uint32))


def others_chunk(wire: Wire, numel: int, seed: int) -> np.ndarray:
    """What another rank may send: one in three has a number that is not finite."""
    x = np.random.default_rng(seed).standard_normal(numel).astype(np.float32)
    if seed % 3 == 2:
        x[numel // 2] = np.inf
    return reference.encode(wire, DType.f32, x)


def test_a_chunk_that_is_not_there_is_refused() -> None:
    lib = ctypes.CDLL(str(native.build(native.FAST)))
    lib.shim_error.restype = ctypes.c_char_p
    values = np.zeros(64, np.float32)
    room = native.pointer(values)
    nowhere, numel = (ctypes.c_void_p * 2)(), ctypes.c_size_t(8)
    terms = (int(DType.f32), room, nowhere, ctypes.c_size_t(len(nowhere)), room, numel)
    assert lib.shim_encode_sum_with_residual(native.CPU, native.shim_format(Wire.sign1), *terms, room) == 1
    assert lib.shim_error() == b"codec.encodeSumWithResidual: src[0] is null"


@pytest.mark.parametrize("numel", [2048, 5000])
def test_a_chunk_of_another_length_is_refused(numel: int) -> None:
    extension = load_extension()
    wire = extension.Wire.SIGN1
    other, values = extension.encode(torch.zeros(numel), wire), torch.zeros(4096)
    with pytest.raises(UsageError, match="others: want contiguous chunks of 528 bytes"):
        extension.encode_with_residual(values, torch.zeros(4096), wire, others=[other])


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
