"""The build says in one message what is missing and what to run."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("baguarun_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def torch_like(version: str = "2.13.0+cu130", cuda: str | None = "13.0") -> SimpleNamespace:
    return SimpleNamespace(__version__=version, version=SimpleNamespace(cuda=cuda))


def test_without_torch_the_build_stops_and_says_what_to_run() -> None:
    # An isolated build environment has setuptools and no torch.
    code = (
        "import importlib.util, runpy, sys, setuptools\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'torch' else find(name, *rest)\n"
        "sys.argv = ['setup.py', 'egg_info']\n"
        f"runpy.run_path({str(ROOT / 'setup.py')!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "Install torch first" in done.stderr
    assert "pip install --no-build-isolation ." in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("version", ["2.10.0", "2.14.0", "1.13.1", "3.0.0a0+git1234"])
def test_an_unsupported_torch_is_named_with_the_range_wanted(build: ModuleType, version: str) -> None:
    with pytest.raises(build.BuildError, match=r"2\.11 <= torch < 2\.14") as caught:
        build.check_torch_version(version)
    assert version in str(caught.value)


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.12.1", "2.13.0+cpu"])
def test_the_supported_torch_versions_are_accepted(build: ModuleType, version: str) -> None:
    build.check_torch_version(version)


def test_without_a_compiler_the_package_to_install_is_named(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.BuildError, match=r"apt-get install g\+\+"):
        build.require_compiler()


def test_a_CXX_that_does_not_exist_is_named(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++-99")
    with pytest.raises(build.BuildError, match=r"CXX=/nowhere/g\+\+-99"):
        build.require_compiler()


def test_a_compiler_without_cxx20_is_refused_with_its_own_words(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    old = write_program(tmp_path / "g++", "cat >/dev/null; echo 'unrecognized option -std=c++20' >&2; exit 1")
    monkeypatch.setenv("CXX", str(old))
    with pytest.raises(build.BuildError, match=r"unrecognized option -std=c\+\+20"):
        build.require_compiler()


def test_clang_is_taken_where_there_is_no_gcc(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_program(tmp_path / "clang++", "exit 0")
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.require_compiler() == "clang++"


def test_a_torch_without_cuda_gets_no_cuda_sources(build: ModuleType) -> None:
    assert not build.wants_cuda(torch_like("2.13.0+cpu", cuda=None), "/usr/local/cuda")


def test_a_torch_with_cuda_but_no_toolkit_builds_for_the_cpu_and_says_so(
    build: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not build.wants_cuda(torch_like(), None)
    assert "CPU only" in capsys.readouterr().err


def test_a_toolkit_of_another_major_version_is_refused(build: ModuleType, tmp_path: Path) -> None:
    write_program(tmp_path / "bin" / "nvcc", "echo 'Cuda compilation tools, release 12.4, V12.4.131'")
    with pytest.raises(build.BuildError, match=r"built with CUDA 13\.0, but .* is 12\.4"):
        build.wants_cuda(torch_like(), str(tmp_path))


def test_a_matching_toolkit_builds_the_cuda_codecs(build: ModuleType, tmp_path: Path) -> None:
    write_program(tmp_path / "bin" / "nvcc", "echo 'Cuda compilation tools, release 13.2, V13.2.10'")
    assert build.wants_cuda(torch_like(), str(tmp_path))


def test_sources_are_found_in_every_room_and_cuda_ones_only_when_wanted(
    build: ModuleType, tmp_path: Path
) -> None:
    rooms = ("engine/a.cpp", "codec/b.cc", "codec/c.cu", "codec/d.h", "bindings/e.cpp", "net/f.cc")
    for name in (*rooms, "c10d/g.cpp", "nccl_plugin/h.cc"):
        file = tmp_path / "cpp_ext" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    sources, headers = build.find_sources(tmp_path, with_cuda=False)
    expected = ["engine/a.cpp", "codec/b.cc", "net/f.cc", "c10d/g.cpp", "bindings/e.cpp"]
    assert sources == [f"cpp_ext/{name}" for name in expected], "the plugin is a library of its own"
    assert headers == ["cpp_ext/codec/d.h"]
    assert "cpp_ext/codec/c.cu" in build.find_sources(tmp_path, with_cuda=True)[0]


def test_a_checkout_without_sources_is_refused(build: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(build.BuildError, match="not complete"):
        build.find_sources(tmp_path, with_cuda=False)


def test_the_record_of_the_build_reads_back(build: ModuleType) -> None:
    values: dict[str, object] = {}
    exec(build.build_info(torch_like("2.12.0+cpu"), False), values)
    assert (values["TORCH_VERSION"], values["WITH_CUDA"]) == ("2.12.0+cpu", False)
