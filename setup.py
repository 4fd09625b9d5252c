"""Builds `baguarun._C`, the communication engine, against the torch that is already installed; and a plugin.

Everything else about the package is in pyproject.toml. Read here: which sources, which flags, and what is
said when torch, a compiler or a matching CUDA toolkit is missing. The plugin, for NCCL, needs the compiler
alone: scripts/nccl_plugin.py.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
TORCH_MIN, TORCH_BELOW = (2, 11), (2, 14)
SOURCE_DIRS = ("engine", "codec", "net", "control", "c10d", "elastic", "bindings")
# A face of the transport for tests without torch.
LEFT_OUT = {"shm_capi.cc"}
BUILDING_COMMANDS = {"build", "build_ext", "bdist_wheel", "develop", "editable_wheel", "install"}

CXX_FLAGS = [
    "-std=c++20",
    "-O3",
    "-g0",
    "-fvisibility=hidden",
    # The codecs promise equal bits on every path: no fused multiply-add that the source does not ask for.
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
]
NVCC_FLAGS = ["-std=c++20", "-O3", "--fmad=false", "-Xcompiler", "-Wall,-Wextra,-fvisibility=hidden"]


class BuildError(SystemExit):
    """Ends the build with one message and nothing of a traceback around it."""

    def __init__(self, message: str) -> None:
        super().__init__(f"\nbaguarun cannot be built: {message}\n")


def require_torch() -> None:
    """Check, without importing it, that torch is installed where the build runs."""
    if importlib.util.find_spec("torch") is None:
        raise BuildError(
            f"{sys.executable} has no torch, and the extension is compiled against the torch it will run "
            "with.\nInstall torch first, then:\n    pip install --no-build-isolation .\n"
            "(a plain `pip install .` builds in an isolated environment, which never has torch)"
        )


def import_torch() -> Any:
    """The installed torch, checked to be a version that this source supports."""
    require_torch()
    try:
        import torch
    except (ImportError, OSError) as error:
        raise BuildError(f"torch is installed but cannot be imported: {error}") from error
    check_torch_version(torch.__version__)
    return torch


def check_torch_version(version: str) -> None:
    found = tuple(int(part) for part in version.split(".")[:2])
    if not TORCH_MIN <= found < TORCH_BELOW:
        want = f"{'.'.join(map(str, TORCH_MIN))} <= torch < {'.'.join(map(str, TORCH_BELOW))}"
        raise BuildError(
            f"found torch {version}; want {want}.\nInstall a torch in that range and build again."
        )


def require_compiler() -> str:
    """Name of a C++20 compiler, also put into CXX so that torch and setuptools take the same one."""
    asked = os.environ.get("CXX")
    compiler = next(
        (name for name in ([asked] if asked else ["c++", "g++", "clang++"]) if find_program(name)), None
    )
    if compiler is None:
        found = f"CXX={asked}, which is not on PATH" if asked else "no c++, g++ or clang++ on PATH"
        raise BuildError(
            f"found {found}; want a C++20 compiler (GCC 11 or Clang 14, or newer).\n"
            "On Debian or Ubuntu: apt-get install g++"
        )
    probe = (
        "#include <atomic>\n#include <span>\nint main() { return std::span<int>{}.size() == 0 ? 0 : 1; }\n"
    )
    trial = subprocess.run(
        [*compiler.split(), "-std=c++20", "-x", "c++", "-fsyntax-only", "-"],
        input=probe,
        capture_output=True,
        text=True,
    )
    if trial.returncode != 0:
        raise BuildError(
            f"{compiler} does not compile C++20; want GCC 11 or Clang 14, or newer. It says:\n"
            f"{trial.stderr.strip()}"
        )
    os.environ["CXX"] = compiler
    return compiler


def find_program(command: str) -> str | None:
    words = command.split()
    return shutil.which(words[0]) if words else None


def require_python_headers() -> None:
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        raise BuildError(f"{header} is missing.\nOn Debian or Ubuntu: apt-get install python3-dev")


def require_ninja() -> None:
    """Put ninja on PATH: a virtual environment that is not activated hides the one it holds."""
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    if importlib.util.find_spec("ninja") is not None:
        import ninja

        os.environ["PATH"] = os.pathsep.join([ninja.BIN_DIR, os.environ["PATH"]])
    if shutil.which("ninja") is None:
        raise BuildError(
            "ninja is missing, without which every build would compile everything.\npip install ninja"
        )


def wants_cuda(torch: Any, cuda_home: str | None) -> bool:
    """Whether the CUDA codecs are built: torch has CUDA and a toolkit of the same major version is here."""
    if torch.version.cuda is None:
        return False
    if os.environ.get("BAGUARUN_CUDA", "") == "0":
        print("baguarun: BAGUARUN_CUDA=0, building for the CPU only", file=sys.stderr)
        return False
    nvcc = Path(cuda_home or "") / "bin" / "nvcc"
    if cuda_home is None or not nvcc.is_file():
        print(
            f"baguarun: torch {torch.__version__} has CUDA but no toolkit (nvcc) was found: building for the "
            "CPU only. Set CUDA_HOME to a toolkit and build again to get the CUDA codecs.",
            file=sys.stderr,
        )
        return False
    toolkit = nvcc_version(nvcc)
    if toolkit.split(".")[0] != torch.version.cuda.split(".")[0]:
        raise BuildError(
            f"torch {torch.__version__} was built with CUDA {torch.version.cuda}, but {nvcc} is {toolkit}.\n"
            f"Set CUDA_HOME to a CUDA {torch.version.cuda} toolkit, or BAGUARUN_CUDA=0 to build for the CPU."
        )
    return True


def nvcc_version(nvcc: Path) -> str:
    """For instance "13.0"."""
    text = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=True).stdout
    return text.partition("release ")[2].partition(",")[0].strip()


def find_sources(root: Path, with_cuda: bool) -> tuple[list[str], list[str]]:
    """Sources and headers under cpp_ext/, relative to `root`, in a fixed order."""
    suffixes = {".cpp", ".cc"} | ({".cu"} if with_cuda else set())
    files = [file for name in SOURCE_DIRS for file in sorted((root / "cpp_ext" / name).rglob("*"))]
    sources = [
        str(file.relative_to(root)) for file in files if file.suffix in suffixes and file.name not in LEFT_OUT
    ]
    headers = [str(file.relative_to(root)) for file in files if file.suffix in {".h", ".hpp", ".cuh", ".inc"}]
    if not sources:
        raise BuildError(f"no C++ sources under {root / 'cpp_ext'}: this checkout is not complete")
    return sources, headers


def make_extension(torch: Any) -> Any:
    from torch.utils import cpp_extension

    with_cuda = wants_cuda(torch, cpp_extension.CUDA_HOME)
    sources, headers = find_sources(ROOT, with_cuda)
    # A folder named by -isystem wins over the same one named by -I: other people's headers raise no warnings.
    others = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    cxx = CXX_FLAGS + [word for path in others for word in ("-isystem", path)]
    if os.environ.get("BAGUARUN_WERROR", "1") != "0":
        cxx = [*cxx, "-Werror"]
    kind = cpp_extension.CUDAExtension if with_cuda else cpp_extension.CppExtension
    return kind(
        "baguarun._C",
        sources,
        depends=[*headers, "setup.py"],
        include_dirs=[str(ROOT / "cpp_ext")],
        define_macros=[("BAGUARUN_WITH_CUDA", "1")] if with_cuda else [],
        extra_compile_args={"cxx": cxx, "nvcc": NVCC_FLAGS},
    )


def place_nccl_plugin(package: Path) -> None:
    """Build the NCCL plugin where its sources changed, and put it into `package`."""
    spec = importlib.util.spec_from_file_location("nccl_plugin", ROOT / "scripts" / "nccl_plugin.py")
    assert spec is not None and spec.loader is not None
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    flags = ["-Wno-error"] if os.environ.get("BAGUARUN_WERROR", "1") == "0" else []
    try:
        built = recipe.build(flags)
    except (recipe.PluginBuildError, OSError) as error:
        raise BuildError(f"the NCCL plugin {recipe.FILE_NAME} does not compile: {error}") from error
    target = package / "lib" / recipe.FILE_NAME
    target.parent.mkdir(exist_ok=True)
    # Not written in place: a running job may have the old one mapped.
    part = target.with_suffix(".part")
    shutil.copyfile(built, part)
    part.replace(target)


def build_info(torch: Any, with_cuda: bool) -> str:
    """Text of baguarun/_build_info.py, which `baguarun.comm.extension` compares with the torch it meets."""
    return (
        '"""Generated by the build: what baguarun._C was compiled against."""\n\n'
        f"TORCH_VERSION = {str(torch.__version__)!r}\n"
        f"WITH_CUDA = {with_cuda!r}\n"
    )


def make_build_command(torch: Any) -> Any:
    """torch's `build_ext`, with objects kept under build/ so that only what changed is compiled again."""
    from torch.utils.cpp_extension import BuildExtension

    class BuildEngine(BuildExtension):  # type: ignore[misc]
        def finalize_options(self) -> None:
            super().finalize_options()
            # An editable install builds in temporary folders, which would make every build a full one.
            tag = f"{sysconfig.get_platform()}-{sys.implementation.cache_tag}-torch{torch.__version__}"
            self.build_temp = str(ROOT / "build" / f"temp.{tag}")
            if self.inplace or getattr(self, "editable_mode", False):
                self.build_lib = str(ROOT / "build" / f"inplace.{tag}")

        def run(self) -> None:
            try:
                super().run()
            except (RuntimeError, CompileError) as error:
                raise BuildError(f"the compiler's own words are above ({error})") from error
            package = Path(self.get_ext_fullpath("baguarun._C")).parent
            place_nccl_plugin(package)
            self.write_build_info(package)

        def write_build_info(self, package: Path) -> None:
            with_cuda = any(source.endswith(".cu") for ext in self.extensions for source in ext.sources)
            (package / "_build_info.py").write_text(build_info(torch, with_cuda))

    return BuildEngine


def main() -> None:
    # Metadata commands need neither torch nor a compiler, but fail at once where the build would fail later.
    if "sdist" in sys.argv:
        setup()
        return
    require_torch()
    if not BUILDING_COMMANDS.intersection(sys.argv):
        setup()
        return
    torch = import_torch()
    require_compiler()
    require_python_headers()
    require_ninja()
    os.environ.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0))))
    setup(ext_modules=[make_extension(torch)], cmdclass={"build_ext": make_build_command(torch)})


if __name__ == "__main__":
    main()
