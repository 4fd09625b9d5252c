from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.codec import native, reference
from tests.codec.every_path import PATHS
from tests.codec.native import Codec
from tests.codec.reference import DType, Wire


@pytest.fixture
def flushing() -> object:
    """This thread flushes denormal numbers to zero, as a user may have asked torch to do."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormal numbers")
    yield
    torch.set_flush_denormal(False)


def small_numbers() -> np.ndarray:
    return (np.random.default_rng(0).integers(-(2**20), 2**20, 3000) * 2.0**-149).astype(np.float32)


@pytest.mark.parametrize("wire", Wire)
def test_flush_to_zero_changes_nothing(codec: Codec, wire: Wire, request: pytest.FixtureRequest) -> None:
    x = small_numbers()
    assert 0 < np.abs(x[x != 0]).min() < 2.0**-126
    want = reference.encode(wire, DType.f32, x)
    sums = reference.reduce_encode(wire, [want, want], 0.75, len(x))
    request.getfixturevalue("flushing")
    got = codec.encode(wire, DType.f32, x)
    got_sums = codec.reduce_encode(wire, [got, got], 0.75, len(x))
    torch.set_flush_denormal(False)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(got_sums, sums)


def test_the_callers_flush_to_zero_is_given_back(codec: Codec, flushing: object) -> None:
    codec.encode(Wire.minmax8, DType.f32, small_numbers())
    assert (torch.tensor([1e-40]) * 1).item() == 0


@pytest.mark.parametrize("wire", Wire)
@pytest.mark.parametrize("dtype", DType)
def test_no_numbers_are_no_bytes(codec: Codec, wire: Wire, dtype: DType) -> None:
    assert codec.encoded_bytes(wire, 0) == 0
    none = np.zeros(0, reference.word_type(dtype))
    assert len(codec.encode(wire, dtype, none)) == 0
    assert len(codec.decode(wire, dtype, np.zeros(0, np.uint8), 0)) == 0


def test_the_best_path_of_the_machine_is_chosen(library: Path) -> None:
    lines = (
        "from pathlib import Path; from tests.codec.native import Codec;"
        f"c = Codec(Path({str(library)!r})); first = c.path();"
        "print(first, next(p for p in ('avx512', 'avx2', 'portable') if c.use_path(p)))"
    )
    done = subprocess.run([sys.executable, "-c", lines], cwd=native.ROOT, capture_output=True, text=True)
    first, best = done.stdout.split()
    assert first == best


@pytest.mark.parametrize("path", PATHS)
def test_this_processor_has_the_path(library: Path, path: str) -> None:
    """A skip says which of them the other tests have not seen."""
    if not Codec(library).use_path(path):
        pytest.skip(f"this processor has no {path}")


def test_a_path_that_does_not_exist_is_not_taken(library: Path) -> None:
    codec = Codec(library)
    before = codec.path()
    assert not codec.use_path("abacus")
    assert codec.path() == before


def test_a_build_without_cuda_says_so(library: Path) -> None:
    with pytest.raises(RuntimeError, match="this build has no CUDA"):
        Codec(library, device=native.CUDA).encode(Wire.f32, DType.f32, np.ones(3, np.float32))


def runtime_library(name: str) -> str:
    command = [*native.compiler(), f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_sanitizer_complains() -> None:
    """Every function, wire, dtype, path and kind of tail under AddressSanitizer and UBSan."""
    library = native.build(native.SANITIZED)
    runtimes = [runtime_library(name) for name in ("libasan.so", "libubsan.so")]
    done = subprocess.run(
        [sys.executable, "-m", "tests.codec.exercise", str(library)],
        cwd=native.ROOT,
        env={
            **os.environ,
            "LD_PRELOAD": " ".join(runtimes),
            "ASAN_OPTIONS": "detect_leaks=0",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "done"
