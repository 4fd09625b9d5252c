"""The NCCL plugin is built with the package, again only where its sources changed, and lies in the wheel."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from scripts import nccl_plugin
from tests.build.test_setup import ROOT, build, write_program

__all__ = ["build"]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two sources that share a header, and a compiler that only notes what it is asked for."""
    net = tmp_path / "cpp_ext" / "net"
    net.mkdir(parents=True)
    (net / "shared.h").write_text("int shared();\n")
    for name in ("one", "two"):
        (net / f"{name}.h").write_text('#include "net/shared.h"\n')
        (net / f"{name}.cc").write_text(f'#include "net/{name}.h"\n')
    (net / "stranger.h").touch()
    (tmp_path / "exports.map").touch()
    compiler = write_program(
        tmp_path / "c++", f'echo "$@" >> {tmp_path}/asked; for word; do last=$word; done; touch "$last"'
    )
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(nccl_plugin, "ROOT", tmp_path)
    monkeypatch.setattr(nccl_plugin, "CORE", (net / "one.cc",))
    monkeypatch.setattr(nccl_plugin, "FACE", (net / "two.cc",))
    monkeypatch.setattr(nccl_plugin, "_EXPORTS", tmp_path / "exports.map")
    return tmp_path


def asked(tree: Path) -> int:
    """How often the compiler has been called since the last time."""
    file = tree / "asked"
    count = len(file.read_text().splitlines()) if file.exists() else 0
    file.unlink(missing_ok=True)
    return count


def test_only_what_changed_is_compiled_again(tree: Path) -> None:
    def build() -> Path:
        return nccl_plugin.build(folder=tree / "build")

    first = build()
    assert (asked(tree), build(), asked(tree)) == (3, first, 0)
    (tree / "cpp_ext" / "net" / "stranger.h").write_text("int other();\n")
    assert (build(), asked(tree)) == (first, 0)
    (tree / "cpp_ext" / "net" / "two.h").write_text('#include "net/shared.h"\nint two();\n')
    assert build() != first
    assert asked(tree) == 2, "one object and the library"
    (tree / "cpp_ext" / "net" / "shared.h").write_text("long shared();\n")
    build()
    assert asked(tree) == 3
    (tree / "exports.map").write_text("{};\n")
    build()
    assert asked(tree) == 1, "the library alone"


def test_what_the_compiler_says_is_said(tree: Path) -> None:
    write_program(tree / "c++", "echo 'error: no such thing as a thing' >&2; exit 1")
    with pytest.raises(nccl_plugin.PluginBuildError, match="no such thing as a thing"):
        nccl_plugin.build(folder=tree / "build")
    assert list((tree / "build").iterdir()) == []


def test_the_build_stops_with_the_plugin_s_name_when_it_does_not_compile(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(write_program(tmp_path / "c++", "echo 'out of cheese' >&2; exit 1")))
    with pytest.raises(
        build.BuildError, match=r"(?s)the NCCL plugin libnccl-net-baguanet\.so .*out of cheese"
    ):
        build.place_nccl_plugin(tmp_path)


def test_the_plugin_is_placed_in_the_package_whole(build: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    old = tmp_path / "lib" / nccl_plugin.FILE_NAME
    old.write_text("of a running job")
    with old.open() as mapped:
        build.place_nccl_plugin(tmp_path)
        assert mapped.read() == "of a running job"
    assert [file.name for file in (tmp_path / "lib").iterdir()] == [nccl_plugin.FILE_NAME]
    assert old.read_bytes() == nccl_plugin.build().read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheel_holds_the_plugin(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "bdist_wheel", "--dist-dir", str(tmp_path)]
        + ["--bdist-dir", str(tmp_path / "bdist")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        shipped = archive.read(f"baguarun/lib/{nccl_plugin.FILE_NAME}")
    assert shipped == nccl_plugin.build().read_bytes()
