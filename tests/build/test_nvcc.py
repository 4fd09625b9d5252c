"""The CUDA kernels are compiled where there is a compiler for them; test_cuda_parity.py runs them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from tests.build.test_setup import ROOT, build

__all__ = ["build"]

SOURCES = sorted((ROOT / "cpp_ext").rglob("*.cu"))


def nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc", path=f"{home}/bin" if home else None)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_the_kernels_compile_without_torch_and_without_a_warning(
    build: ModuleType, tmp_path: Path, source: Path
) -> None:
    compiler = nvcc()
    if compiler is None:
        pytest.skip("this machine has no nvcc")
    words = [*build.NVCC_FLAGS, "-arch=sm_90", "-Werror", "all-warnings", f"-I{ROOT / 'cpp_ext'}"]
    made = tmp_path / "kernels.o"
    command = [compiler, *words, "-DBAGUARUN_WITH_CUDA=1", "-c", str(source), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    # The code for the device lies in the object.
    assert b"sm_90" in made.read_bytes()
