"""Builds what the transport's tests run: the plugin, libraries and C++ programs.

Each object is compiled once per state of its sources, by whichever test needs it first, for all of them.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scripts import nccl_plugin
from tests.support.once import made

ROOT = Path(__file__).parents[2]
IN_CI = os.environ.get("CI") == "true"
FOLDER = ROOT / "build" / "net_tests"
# With -fPIC, so that programs and libraries are made of the same objects.
FAST = ("-O3", "-fPIC")
ADDRESS_SANITIZER = ("-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
THREAD_SANITIZER = ("-O1", "-g1", "-fsanitize=thread")
CORE, PLUGIN = nccl_plugin.CORE, nccl_plugin.FACE


def compiler() -> tuple[str, ...]:
    return tuple(os.environ.get("CXX", "c++").split())


def plugin(flags: Sequence[str] = ()) -> Path:
    """Path of the NCCL plugin, built as the one that is shipped."""
    return nccl_plugin.build(flags)


def program(
    source: Path,
    flags: Sequence[str] = FAST,
    *,
    parts: Sequence[Path] = CORE,
    source_flags: Sequence[str] = (),
    link_flags: Sequence[str] = (),
) -> Path:
    """Path of the program made of `source` and `parts`. `source_flags` are for `source` alone, `link_flags`
    for the last step."""
    objects = (*_compile([source], (*flags, *source_flags)), *_compile(parts, flags))
    return _link(source.stem, (*flags, *link_flags), objects)


def library(name: str, sources: Sequence[Path]) -> Path:
    """Path of the shared library made of `sources`."""
    return _link(name, (*FAST, "-shared"), _compile(sources, FAST))


def _words(flags: Sequence[str]) -> tuple[str, ...]:
    fixed = ("-std=c++20", "-Wall", "-Wextra", "-Werror", "-pthread", "-Icpp_ext")
    return (*compiler(), *fixed, *flags)


def _compile(sources: Sequence[Path], flags: Sequence[str]) -> tuple[Path, ...]:
    """The objects of `sources`, in their order."""
    words = _words(flags)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return tuple(pool.map(lambda source: _object(source, words), sources))


# Sources stay what they are while tests run, and there are hundreds of calls for each.
@functools.cache
def _object(source: Path, words: tuple[str, ...]) -> Path:
    digest = hashlib.sha256(repr(words).encode())
    for file in nccl_plugin.with_headers(source):
        digest.update(file.name.encode() + file.read_bytes())
    target = FOLDER / f"{source.stem}-{digest.hexdigest()[:16]}.o"
    return made(target, [*words, "-c", str(source)], ROOT)


@functools.cache
def _link(name: str, flags: tuple[str, ...], objects: tuple[Path, ...]) -> Path:
    words = [*_words(flags), *map(str, objects)]
    target = FOLDER / f"{name}-{hashlib.sha256(repr(words).encode()).hexdigest()[:16]}"
    return made(target, words, ROOT)
