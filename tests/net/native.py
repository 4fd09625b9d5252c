"""Builds what the transport's tests run: the plugin and C++ programs, once per state of their sources."""

from __future__ import annotations

import hashlib
import os
import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scripts import nccl_plugin

ROOT = Path(__file__).parents[2]
IN_CI = os.environ.get("CI") == "true"
FOLDER = ROOT / "build" / "net_tests"
ADDRESS_SANITIZER = ("-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
THREAD_SANITIZER = ("-O1", "-g1", "-fsanitize=thread")
CORE, PLUGIN = nccl_plugin.CORE, nccl_plugin.FACE


def compiler() -> list[str]:
    return os.environ.get("CXX", "g++").split()


def _digest(words: Sequence[str], source: Path) -> str:
    digest = hashlib.sha256(repr([compiler(), list(words)]).encode())
    for file in nccl_plugin.with_headers(source):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _make(target: Path, command: Sequence[str]) -> Path:
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(f".{os.getpid()}.{threading.get_ident()}.part")
        done = subprocess.run([*command, "-o", str(part)], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        part.rename(target)
    return target


def plugin(flags: Sequence[str] = ()) -> Path:
    """Path of the NCCL plugin, built as the one that is shipped."""
    return nccl_plugin.build(flags)


def program(
    source: Path,
    flags: Sequence[str] = ("-O2",),
    link_flags: Sequence[str] = (),
    others: Sequence[Path] = (),
) -> Path:
    """Path of the program made of `source`, the core and `others`. `link_flags` go to the last step only."""
    words = ["-std=c++20", "-Wall", "-Wextra", "-Werror", "-pthread", "-Icpp_ext", *flags]

    def compile_one(file: Path) -> Path:
        target = FOLDER / f"{file.stem}-{_digest(words, file)}.o"
        return _make(target, [*compiler(), *words, "-c", str(file)])

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(compile_one, [source, *CORE, *others]))
    names = [*words, *link_flags, *map(str, objects)]
    target = FOLDER / f"{source.stem}-{hashlib.sha256(repr(names).encode()).hexdigest()[:16]}"
    return _make(target, [*compiler(), *words, *link_flags, *map(str, objects)])
