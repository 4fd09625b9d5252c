"""CPU and CUDA exchange chunks: on a machine with a GPU, through the built extension, bit for bit."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch

from baguarun.comm.extension import load_extension
from tests.codec import numbers

pytestmark = pytest.mark.gpu

PLAIN = ("F32", "F16", "BF16")
WIRES = (*PLAIN, "MINMAX8", "MINMAX4", "SIGN1", "TOPK", "RANDOMK")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BYTES = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


@pytest.fixture(scope="module")
def extension() -> ModuleType:
    return load_extension()


def samples(numel: int) -> list[torch.Tensor]:
    rng = np.random.default_rng(numel)
    made = [torch.from_numpy(kind(rng, numel).astype(np.float32)) for kind in numbers.KINDS]
    made += [
        made[0].clone(),
        made[0].clone(),
        torch.from_numpy(rng.integers(0, 2**32, numel, np.uint32).view(np.float32)),
    ]
    made[-3][numel // 2] = torch.nan
    made[-2][-1] = -torch.inf
    return made


def assert_same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    kind = BYTES.get(want.dtype, want.dtype)
    np.testing.assert_array_equal(got.cpu().view(kind).numpy(), want.view(kind).numpy())


def numbers_in(chunk: torch.Tensor, wire: str) -> torch.Tensor:
    return chunk.view({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[wire]).float()


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [*numbers.SIZES, 1_000_003])
def test_a_chunk_is_the_same_on_cpu_and_cuda(
    extension: ModuleType, wire: str, dtype: torch.dtype, numel: int
) -> None:
    kind = getattr(extension.Wire, wire)
    for wide in samples(numel):
        x = wide.to(dtype)
        chunk = extension.encode(x, kind)
        assert_same_bits(extension.encode(x.cuda(), kind), chunk)
        decoded = extension.decode(chunk, kind, numel, dtype)
        assert_same_bits(extension.decode(chunk.cuda(), kind, numel, dtype), decoded)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("count", [1, 2, 7, 64, 65, 130])
def test_a_reduction_is_the_same_on_cpu_and_cuda(extension: ModuleType, wire: str, count: int) -> None:
    numel = 50_001
    kind = getattr(extension.Wire, wire)
    values = samples(numel)
    chunks = [extension.encode(values[k % len(values)], kind) for k in range(count)]
    want = extension.reduce_encode(chunks, kind, 1 / 3, numel)
    got = extension.reduce_encode([chunk.cuda() for chunk in chunks], kind, 1 / 3, numel).cpu()
    if wire not in PLAIN:
        assert_same_bits(got, want)
    else:
        # Which NaN a sum makes is the device's own.
        torch.testing.assert_close(
            numbers_in(got, wire), numbers_in(want, wire), rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("numel", [3, 2048, 50_001])
def test_a_residual_is_the_same_on_cpu_and_cuda(extension: ModuleType, wire: str, numel: int) -> None:
    kind = getattr(extension.Wire, wire)
    for x in samples(numel)[: len(numbers.KINDS)]:
        residual = torch.linspace(-1, 1, numel)
        on_device = residual.cuda()
        chunk = extension.encode_with_residual(x, residual, kind)
        assert_same_bits(extension.encode_with_residual(x.cuda(), on_device, kind), chunk)
        assert_same_bits(on_device, residual)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("count", [1, 3, 65])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_sum_with_a_residual_is_the_same_on_cpu_and_cuda(
    extension: ModuleType, wire: str, count: int, dtype: torch.dtype
) -> None:
    kind = getattr(extension.Wire, wire)
    numel = 50_001
    own = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(dtype)
    others = [extension.encode(torch.linspace(-k, k + 1, numel), kind) for k in range(count)]
    residual = torch.linspace(-1, 1, numel)
    on_device = residual.cuda()
    chunk = extension.encode_with_residual(own, residual, kind, others=others)
    there = [other.cuda() for other in others]
    assert_same_bits(extension.encode_with_residual(own.cuda(), on_device, kind, others=there), chunk)
    assert_same_bits(on_device, residual)


def test_a_chunk_of_more_than_two_to_the_31_numbers_is_encoded_to_its_end(extension: ModuleType) -> None:
    numel = 2**31 + 2048 + 5
    needed_bytes = 4 * numel + 2 * numel
    if torch.cuda.mem_get_info()[0] < needed_bytes:
        pytest.skip(f"needs {needed_bytes / 2**30:.0f} GiB of free device memory")
    x = torch.zeros(numel, dtype=torch.float16, device="cuda")
    x[-10:] = torch.arange(10, device="cuda")
    chunk = extension.encode(x, extension.Wire.MINMAX8)
    back = extension.decode(chunk, extension.Wire.MINMAX8, numel, torch.float16)
    assert torch.equal(back[:2048], x[:2048])
    torch.testing.assert_close(back[-10:], x[-10:], rtol=0, atol=9 / 254 * 0.51)
