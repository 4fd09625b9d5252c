"""The CUDA kernels on CPU threads (cuda_on_threads/cuda_runtime.h), where there is no GPU to run them.

Rounding, memory model and speed are the device's own: test_cuda_parity.py looks at those.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.codec import native, numbers, reference
from tests.codec.alike import assert_same_chunk, assert_same_numbers
from tests.codec.native import Codec
from tests.codec.reference import DType, Format, Wire
from tests.codec.test_residual import others_chunk

SIZES = (1, 3, 70, 2047, 2048, 2048 + 6, 3 * 2048 + 1025)


@pytest.fixture(scope="module")
def cuda_library() -> Path:
    return native.build(native.CUDA_ON_THREADS)


@pytest.fixture(params=[0, 4], ids=["aligned", "unaligned"])
def cuda(cuda_library: Path, request: pytest.FixtureRequest) -> Codec:
    return Codec(cuda_library, offset=request.param, device=native.CUDA)


def samples(numel: int, seed: int) -> list[np.ndarray]:
    """One array of each kind, and one with an overflow."""
    rng = np.random.default_rng(seed)
    made = [kind(rng, numel).astype(np.float32) for kind in numbers.KINDS]
    made.append(rng.standard_normal(numel).astype(np.float32))
    made[-1][numel // 2] = np.inf
    return made


@pytest.mark.parametrize("wire", Wire)
@pytest.mark.parametrize("dtype", DType)
def test_the_kernels_encode_and_decode_as_the_reference(cuda: Codec, wire: Wire, dtype: DType) -> None:
    for numel in SIZES:
        for wide in samples(numel, seed=numel)[:: 4 if numel > 2048 else 2]:
            x = reference.narrow(dtype, wide)
            chunk = reference.encode(wire, dtype, x)
            np.testing.assert_array_equal(cuda.encode(wire, dtype, x), chunk)
            got = cuda.decode(wire, dtype, chunk, numel)
            np.testing.assert_array_equal(
                got.view(np.uint8), reference.decode(wire, dtype, chunk, numel).view(np.uint8)
            )


@pytest.mark.parametrize("wire", Wire)
@pytest.mark.parametrize("nan", [np.nan, -np.nan])
def test_the_kernels_see_a_nan_of_either_sign(cuda: Codec, wire: Wire, nan: float) -> None:
    for numel in (70, 2048, 2 * 2048 + 6):
        x = np.random.default_rng(numel).standard_normal(numel).astype(np.float32)
        x[numel // 2] = nan
        np.testing.assert_array_equal(cuda.encode(wire, DType.f32, x), reference.encode(wire, DType.f32, x))


@pytest.mark.parametrize("wire", Wire)
def test_the_kernels_carry_the_residual(cuda: Codec, wire: Wire) -> None:
    for numel in SIZES[1:5]:
        for x in samples(numel, seed=numel)[::3]:
            residual = np.random.default_rng(0).standard_normal(numel).astype(np.float32)
            chunk, left = cuda.encode_with_residual(wire, DType.f32, x, residual)
            want_chunk, want_left = reference.encode_with_residual(wire, DType.f32, x, residual)
            assert_same_chunk(wire, chunk, want_chunk)
            np.testing.assert_array_equal(left.view(np.uint32), want_left.view(np.uint32))


@pytest.mark.parametrize("wire", Wire)
@pytest.mark.parametrize("dtype", DType)
def test_the_kernels_encode_a_sum_with_its_residual(cuda: Codec, wire: Wire, dtype: DType) -> None:
    for numel, count in ((3, 1), (2047, 2), (2 * 2048 + 6, 3), (2048, 7), (2048 + 6, 65)):
        own = reference.narrow(dtype, samples(numel, seed=1)[-2])
        others = [others_chunk(wire, numel, seed) for seed in range(count)]
        residual = np.random.default_rng(0).standard_normal(numel).astype(np.float32)
        chunk, left = cuda.encode_sum_with_residual(wire, dtype, own, others, residual)
        want_chunk, want_left = reference.encode_with_residual(wire, dtype, own, residual, others)
        assert_same_chunk(wire, chunk, want_chunk)
        np.testing.assert_array_equal(left.view(np.uint32), want_left.view(np.uint32))


@pytest.mark.parametrize("keep", [1, 256])
@pytest.mark.parametrize("wire", [Wire.topk, Wire.randomk])
def test_the_kernels_keep_few_and_many(cuda: Codec, wire: Wire, keep: int) -> None:
    format = Format(wire, keep, seed=2**63 + 5)
    for numel in (70, 2048, 2 * 2048 + 6):
        for x in samples(numel, seed=numel)[::2]:
            chunk = reference.encode(format, DType.f32, x)
            np.testing.assert_array_equal(cuda.encode(format, DType.f32, x), chunk)
            got = cuda.decode(format, DType.f32, chunk, numel)
            want = reference.decode(format, DType.f32, chunk, numel)
            np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


@pytest.mark.parametrize("wire", Wire)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 70])
def test_the_kernels_reduce_in_rank_order(cuda: Codec, wire: Wire, count: int) -> None:
    numel = 2 * 2048 + 70
    for seed in range(1 if count > 5 else 3):
        wide = [samples(numel, seed=100 * seed + k) for k in range(count)]
        src = [
            reference.encode(wire, DType.f32, arrays[(seed + k) % len(arrays)])
            for k, arrays in enumerate(wide)
        ]
        total = reference.reduced(wire, src, 1 / 3, numel)
        want = reference.reduce_encode(wire, src, 1 / 3, numel)
        assert_same_chunk(wire, cuda.reduce_encode(wire, src, 1 / 3, numel), want)
        assert_same_chunk(wire, cuda.reduce_encode(wire, src, 1 / 3, numel, into=count - 1), want)
        for dtype in DType:
            got = cuda.reduce_decode(wire, dtype, src, 1 / 3, numel)
            assert_same_numbers(dtype, got, reference.narrow(dtype, total))


@pytest.mark.parametrize("keep", [1, 20, 129, 256])
def test_of_equal_numbers_the_first_are_kept(cuda: Codec, keep: int) -> None:
    """By warps in whole blocks: as many as are wanted are not all that are equal to the least of them."""
    format = Format(Wire.topk, keep)
    rng = np.random.default_rng(keep)
    few = rng.integers(-2, 3, 5 * 2048 + 70).astype(np.float32)
    few[:2048] = 0.0
    few[2048:4096] = -1.0
    few[4096 : 4096 + 300] = np.nan
    few[3 * 2048 : 3 * 2048 + 64] = np.inf
    np.testing.assert_array_equal(
        cuda.encode(format, DType.f32, few), reference.encode(format, DType.f32, few)
    )


@pytest.mark.parametrize("keep", [1, 20, 32, 33])
@pytest.mark.parametrize("count", [1, 2, 4, 5])
def test_of_equal_sums_the_first_are_kept(cuda: Codec, keep: int, count: int) -> None:
    """By warps in whole blocks: sums of a few magnitudes, of which some cancel and some are NaN or Inf."""
    format = Format(Wire.topk, keep)
    rng = np.random.default_rng(100 * keep + count)
    numel = 6 * 2048 + 70
    src = []
    for k in range(count):
        few = rng.integers(-2, 3, numel).astype(np.float32)
        few[:2048] = 0.0
        few[2048 : 2048 + 16] = rng.standard_normal(16)
        few[2048 + 16 : 2 * 2048] = 0.0
        few[2 * 2048 : 3 * 2048] = (-1.0) ** k
        few[3 * 2048 : 3 * 2048 + 5] = np.inf
        few[4 * 2048 : 4 * 2048 + 5] = np.nan
        few[5 * 2048 :] = rng.standard_normal(numel - 5 * 2048)
        src.append(reference.encode(format, DType.f32, few))
    want = reference.reduce_encode(format, src, 0.25, numel)
    np.testing.assert_array_equal(cuda.reduce_encode(format, src, 0.25, numel), want)
    np.testing.assert_array_equal(cuda.reduce_encode(format, src, 0.25, numel, into=count - 1), want)


@pytest.mark.parametrize("keep", [1, 20, 256])
def test_what_was_drawn_is_summed_up_without_its_places(cuda: Codec, keep: int) -> None:
    """Some blocks of a block of threads are spoilt by a NaN, and no other ones."""
    numel = 120 * 2048 + 70
    format = Format(Wire.randomk, keep, seed=5)
    rng = np.random.default_rng(keep)
    src = []
    for _ in range(3):
        x = rng.standard_normal(numel).astype(np.float32)
        x[rng.integers(0, numel, 4)] = np.inf
        src.append(reference.encode(format, DType.f32, x))
    want = reference.reduce_encode(format, src, 0.25, numel)
    got = cuda.reduce_encode(format, src, 0.25, numel)
    np.testing.assert_array_equal(got, want)
    assert 0 < np.isnan(want[: 4 * keep * 120].view(np.float32)).sum() <= 12 * keep
