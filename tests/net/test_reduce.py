"""Reductions of several sources: the same bits on every path, and those of a plain loop."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from tests.net.shm_peer import DTYPES, FAULTS, OPS, load

PATHS = ("portable", "avx2", "avx512")
SPECIAL = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    float("inf"),
    float("-inf"),
    float("nan"),
    65504.0,
    65519.9,
    65520.0,
    6e-8,
    2.9e-8,
)


def reduce(
    op: str, dtype: str, sources: list[np.ndarray], path: int = -1, in_place: bool = False
) -> np.ndarray:
    """Through the library; both of two outs must get the same."""
    library = load()
    outs = [np.zeros_like(sources[0]), np.zeros_like(sources[0])]
    if in_place:
        sources = [source.copy() for source in sources]
        outs[0] = sources[-1]
    pointers = [
        (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))
        for arrays in (sources, outs)
    ]
    result = library.baguaReduce(
        OPS.index(op), DTYPES.index(dtype), pointers[0], len(sources), pointers[1], 2, sources[0].size, path
    )
    if result != 0:
        raise ValueError(FAULTS[-result - 1], library.baguaShmError().decode())
    assert outs[0].tobytes() == outs[1].tobytes()
    return outs[0]


def sample(dtype: str, count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    kind = getattr(torch, dtype)
    if dtype == "bool":
        return torch.randint(0, 2, (count,), generator=generator).to(kind)
    if not kind.is_floating_point:
        return torch.randint(0 if dtype == "uint8" else -128, 128, (count,), generator=generator).to(kind)
    values = torch.randn(count, generator=generator, dtype=torch.float64) * 100
    for place, special in enumerate(SPECIAL):
        values[(seed * 31 + place * 97) % count :: 1009] = special
    return values.to(kind)


def raw(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.int16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def reference(op: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    kind = tensors[0].dtype
    wide = [tensor.float() if kind in (torch.float16, torch.bfloat16) else tensor for tensor in tensors]
    if kind == torch.bool:
        op = {"sum": "bor", "max": "bor", "product": "band", "min": "band"}.get(op, op)
    functions = {
        "sum": torch.add, "avg": torch.add, "min": torch.minimum, "max": torch.maximum, "product": torch.mul,
        "band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor,
    }  # fmt: skip
    total = wide[0]
    for tensor in wide[1:]:
        total = functions[op](total, tensor)
    return (total / len(tensors) if op == "avg" else total).to(kind)


def allowed(op: str, dtype: str) -> bool:
    floating = DTYPES.index(dtype) < 4
    return op in ("sum", "min", "max", "product") or (op == "avg") == floating


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_every_path_gives_the_bits_of_a_plain_loop(op: str, dtype: str) -> None:
    if not allowed(op, dtype):
        with pytest.raises(ValueError, match=r"usage.*reduction .* want an? (integer|floating-point) type"):
            reduce(op, dtype, [raw(sample(dtype, 8, seed)) for seed in range(2)])
        return
    for count, num_sources in ((5000, 2), (1, 3), (1030, 4), (4099, 5)):
        tensors = [sample(dtype, max(count, 2), seed) for seed in range(num_sources)]
        sources = [raw(tensor) for tensor in tensors]
        want = reference(op, tensors)
        for path in range(load().baguaBestReducePath() + 1):
            for in_place in (False, True):
                got = torch.from_numpy(reduce(op, dtype, sources, path, in_place)).view(want.dtype)
                if want.is_floating_point():
                    assert torch.equal(got.isnan(), want.isnan()), (PATHS[path], num_sources)
                    got, numbers = got[~got.isnan()], want[~want.isnan()]
                else:
                    numbers = want
                assert torch.equal(got, numbers), (PATHS[path], num_sources)


def test_all_half_precision_values_survive_every_path() -> None:
    every = np.arange(65536, dtype=np.uint16).view(np.float16)
    zero = np.full(65536, -0.0, np.float16)
    want = reduce("sum", "float16", [every, zero], 0).view(np.uint16)
    numbers = ~np.isnan(every)
    assert np.array_equal(want[numbers], every.view(np.uint16)[numbers])
    for path in range(1, load().baguaBestReducePath() + 1):
        assert np.array_equal(reduce("sum", "float16", [every, zero], path).view(np.uint16), want), PATHS[
            path
        ]


def test_one_source_is_copied() -> None:
    data = np.arange(100, dtype=np.float32)
    assert np.array_equal(reduce("avg", "float32", [data]), data)
