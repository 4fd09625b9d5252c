"""No numbers at all: a share of a small bucket may be empty, and an empty tensor has no memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from baguarun.comm.extension import load_extension
from tests.codec import native
from tests.codec.native import Codec
from tests.codec.reference import DType, Wire, word_type

NOTHING = np.zeros(0, np.uint8)


def assert_empty_stays_empty(codec: Codec, wire: Wire) -> None:
    assert codec.encoded_bytes(wire, 0) == 0
    for dtype in DType:
        none = np.zeros(0, word_type(dtype))
        assert len(codec.encode(wire, dtype, none)) == 0
        chunk, residual = codec.encode_with_residual(wire, dtype, none, np.zeros(0, np.float32))
        assert len(chunk) == len(residual) == 0
        sum_chunk, residual = codec.encode_sum_with_residual(
            wire, dtype, none, [NOTHING] * 3, np.zeros(0, np.float32)
        )
        assert len(sum_chunk) == len(residual) == 0
        assert len(codec.decode(wire, dtype, NOTHING, 0)) == 0
        assert len(codec.reduce_decode(wire, dtype, [NOTHING] * 3, 0.5, 0)) == 0
    assert len(codec.reduce_encode(wire, [NOTHING] * 3, 0.5, 0)) == 0


@pytest.mark.parametrize("wire", Wire)
def test_an_empty_input_has_an_empty_chunk(codec: Codec, wire: Wire) -> None:
    assert_empty_stays_empty(codec, wire)


@pytest.mark.parametrize("wire", Wire)
def test_the_kernels_take_an_empty_input(wire: Wire) -> None:
    library: Path = native.build(native.CUDA_ON_THREADS)
    assert_empty_stays_empty(Codec(library, device=native.CUDA), wire)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "MINMAX8", "MINMAX4", "SIGN1", "TOPK", "RANDOMK"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_empty_tensors_which_have_no_memory_are_taken(name: str, dtype: torch.dtype) -> None:
    codec = load_extension()
    wire = getattr(codec.Wire, name)
    none = torch.empty(0, dtype=dtype)
    assert none.data_ptr() == 0
    chunk = codec.encode(none, wire)
    assert chunk.numel() == 0
    assert codec.encode_with_residual(none, torch.empty(0), wire).numel() == 0
    for found in (
        codec.decode(chunk, wire, 0, dtype),
        codec.reduce_decode([chunk, chunk], wire, 0.5, 0, dtype),
    ):
        assert found.dtype == dtype and found.numel() == 0
    assert codec.reduce_encode([chunk, chunk], wire, 0.5, 0).numel() == 0
