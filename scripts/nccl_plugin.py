"""What the NCCL network plugin is made of, and how it is built. setup.py and the tests build it from here.

One shared object without torch and CUDA. It exports NCCL's tables and nothing else, and stays loaded after
dlclose (-z nodelete): NCCL 2.28 and 2.29 unload plugins with the last communicator and load them again.

    python scripts/nccl_plugin.py [compiler flags, for instance -fsanitize=address]     prints where it lies
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE_NAME = "libnccl-net-baguanet.so"

_NET_DIR = ROOT / "cpp_ext" / "net"
_PLUGIN_DIR = ROOT / "cpp_ext" / "nccl_plugin"
_HANDSHAKE = ("address", "connector", "env", "hello", "interfaces", "listener", "sha256", "socket")
_CONNECTION = ("backlog", "frame", "link", "link_send", "stream", "stream_count")
CORE = tuple(_NET_DIR / f"{name}.cc" for name in (*_HANDSHAKE, *_CONNECTION))
"""The TCP part of the transport."""
FACE = (_PLUGIN_DIR / "context.cc", _PLUGIN_DIR / "plugin.cc")
"""What makes a plugin of it."""
_EXPORTS = _PLUGIN_DIR / "exports.map"

_COMPILE = ("-std=c++20", "-O3", "-g0", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden")
_WARNINGS = ("-Wall", "-Wextra", "-Werror")
_LINK = ("-shared", "-Wl,-z,nodelete", f"-Wl,--version-script={_EXPORTS}")


class PluginBuildError(Exception):
    """The compiler or the linker failed; the text has its own words."""


def build(flags: Sequence[str] = (), folder: Path = ROOT / "build" / "nccl_plugin") -> Path:
    """Path of the plugin, built by $CXX in `folder`; what is there already, of equal sources, is taken.

    `flags` come after ours, in compiling and in linking. Raises PluginBuildError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [*os.environ.get("CXX", "c++").split(), *_COMPILE, *_WARNINGS, *flags, f"-I{ROOT / 'cpp_ext'}"]

    def compile_one(source: Path) -> Path:
        words = [*command, "-c", str(source)]
        return _make(folder / f"{source.stem}-{_digest(words, with_headers(source))}.o", words)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(compile_one, (*CORE, *FACE)))
    words = [*command, *_LINK, *map(str, objects)]
    stem, suffix = os.path.splitext(FILE_NAME)
    return _make(folder / f"{stem}-{_digest(words, [_EXPORTS])}{suffix}", words)


def with_headers(source: Path) -> list[Path]:
    """The file and all of ours that it includes, in a fixed order."""
    found, left = {source}, [source]
    while left:
        file = left.pop()
        for name in re.findall(r'^#include "([^"]+)"', file.read_text(), re.MULTILINE):
            beside = file.parent / name
            header = beside if beside.exists() else ROOT / "cpp_ext" / name
            if header not in found:
                found.add(header)
                left.append(header)
    return sorted(found)


def _digest(words: Sequence[str], files: Sequence[Path]) -> str:
    digest = hashlib.sha256(repr(words).encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _make(target: Path, command: Sequence[str]) -> Path:
    if not target.exists():
        part = target.with_suffix(f".{os.getpid()}.{threading.get_ident()}.part")
        done = subprocess.run([*command, "-o", str(part)], capture_output=True, text=True)
        if done.returncode != 0:
            raise PluginBuildError(f"{' '.join(command)}\n{done.stderr.strip()}")
        part.rename(target)
    return target


if __name__ == "__main__":
    try:
        print(build(sys.argv[1:]))
    except (PluginBuildError, OSError) as error:
        sys.exit(f"the NCCL plugin cannot be built: {error}")
