"""ShmGroup through its C ABI, and ranks as processes that take commands."""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np

from tests.net import native

NET = native.ROOT / "cpp_ext" / "net"
SOURCES = tuple(
    NET / f"{name}.cc"
    for name in (
        "call",
        "reduce",
        "shm_handover",
        "shm_segment",
        "shm_sync",
        "shm_group",
        "shm_move",
        "socket",
        "address",
    )
)
FAULTS = ("system", "remote", "usage", "aborted", "timeout")
OPS = ("sum", "avg", "min", "max", "product", "band", "bor", "bxor")
DTYPES = ("float64", "float32", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "bool")
DEADLINE_S = 60
Exchange = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_P, _Z, _I = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "baguaShmError": (ctypes.c_char_p, []),
    "baguaShmCreate": (_P, [_I, _I, ctypes.c_char_p, ctypes.c_double, _Z, Exchange]),
    "baguaShmDestroy": (None, [_P]),
    "baguaShmAllReduce": (_I, [_P, _P, _Z, _I, _I]),
    "baguaShmReduce": (_I, [_P, _P, _Z, _I, _I, _I]),
    "baguaShmReduceScatter": (_I, [_P, _P, _P, _Z, _I, _I]),
    "baguaShmAllGather": (_I, [_P, _P, _P, _Z]),
    "baguaShmBroadcast": (_I, [_P, _P, _Z, _I]),
    "baguaShmGather": (_I, [_P, _P, _P, _Z, _I]),
    "baguaShmScatter": (_I, [_P, _P, _P, _Z, _I]),
    "baguaShmAllToAllV": (_I, [_P, _P, _P, _P, _P]),
    "baguaShmBarrier": (_I, [_P]),
    "baguaShmAllocate": (_P, [_P, _Z]),
    "baguaShmAbort": (None, [_P]),
    "baguaReduce": (_I, [_I, _I, _P, _Z, _P, _Z, _Z, _I]),
    "baguaBestReducePath": (_I, []),
}


@functools.cache
def library_path() -> Path:
    return native.library("libshm", [*SOURCES, NET / "shm_capi.cc"])


@functools.cache
def load() -> ctypes.CDLL:
    library = ctypes.CDLL(str(library_path()))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class Failed(Exception):
    """An Error of the library: its fault and its message."""

    def __init__(self, fault: str, message: str) -> None:
        super().__init__(fault, message)
        self.fault, self.message = fault, message


def pointer(array: np.ndarray) -> int:
    assert array.flags.c_contiguous
    return array.ctypes.data


def exchange_by_files(folder: Path, nonce: str, rank: int, size: int) -> Any:
    """A C callback that hands blobs around."""
    rounds = 0

    def exchange(mine: int, everybody: int, blob_bytes: int) -> int:
        nonlocal rounds
        stem = f"{uuid.uuid5(uuid.NAMESPACE_OID, nonce)}-{rounds}"
        rounds += 1
        part = folder / f"{stem}-{rank}.part"
        part.write_bytes(ctypes.string_at(mine, blob_bytes))
        part.rename(folder / f"{stem}-{rank}")
        deadline = time.monotonic() + DEADLINE_S
        for peer in range(size):
            file = folder / f"{stem}-{peer}"
            while not file.exists():
                if time.monotonic() > deadline:
                    return -1
                time.sleep(0.002)
            ctypes.memmove(everybody + peer * blob_bytes, file.read_bytes(), blob_bytes)
        return 0

    return Exchange(exchange)


class Group:
    """A ShmGroup; blobs are exchanged by files in `folder`."""

    def __init__(
        self, folder: Path, rank: int, size: int, *, nonce: str, timeout_s: float = 30, arena_bytes: int = 0
    ) -> None:
        self.library, self.rank, self.size = load(), rank, size
        callback = exchange_by_files(folder, nonce, rank, size)
        self.handle = self.library.baguaShmCreate(
            rank, size, nonce.encode(), timeout_s, arena_bytes, callback
        )
        if not self.handle:
            raise Failed("create", self.library.baguaShmError().decode())

    def call(self, name: str, *arguments: Any) -> None:
        result = getattr(self.library, f"baguaShm{name}")(self.handle, *arguments)
        if result != 0:
            raise Failed(FAULTS[-result - 1], self.library.baguaShmError().decode())

    def all_reduce(self, data: np.ndarray, op: str = "sum", dtype: str = "") -> None:
        kind = DTYPES.index(dtype or data.dtype.name)
        self.call("AllReduce", pointer(data), data.size, kind, OPS.index(op))

    def allocate(self, count: int, dtype: str = "float32") -> np.ndarray:
        item = np.dtype(dtype)
        address = self.library.baguaShmAllocate(self.handle, count * item.itemsize)
        if not address:
            raise Failed("allocate", self.library.baguaShmError().decode())
        memory = (ctypes.c_char * (count * item.itemsize)).from_address(address)
        return np.frombuffer(memory, dtype=item)

    def abort(self) -> None:
        self.library.baguaShmAbort(self.handle)

    def close(self) -> None:
        self.library.baguaShmDestroy(self.handle)
        self.handle = None


def _serve(make: Any, link: Connection, folder: Path, rank: int, size: int, options: dict[str, Any]) -> None:
    group = make(folder, rank, size, **options)
    link.send(("ready", None))
    while True:
        task, arguments = link.recv()
        try:
            link.send(("value", task(group, *arguments)))
        except Failed as failed:
            link.send(("failed", failed))
        except Exception as error:
            link.send(("broken", repr(error)))


class Ranks:
    """Ranks as processes. `start()` hands each a task, `result()` collects values and `Failed`s.

    `make(folder, rank, size, **options)` is what a rank's tasks get; what `each` says is for one rank.
    """

    def __init__(
        self, folder: Path, size: int, make: Any = Group, each: Sequence[dict[str, Any]] = (), **options: Any
    ) -> None:
        options = {"nonce": uuid.uuid4().hex, **options}
        each = each or [{}] * size
        context = multiprocessing.get_context("fork")
        self.size = size
        self.links: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(make, theirs, folder, rank, size, {**options, **each[rank]}), daemon=True
            )
            process.start()
            theirs.close()
            self.links.append(ours)
            self.processes.append(process)
        assert [self.result(rank) for rank in range(size)] == [None] * size

    def start(self, rank: int, task: Callable[..., Any], *arguments: Any) -> None:
        self.links[rank].send((task, arguments))

    def result(self, rank: int) -> Any:
        assert wait([self.links[rank]], DEADLINE_S), f"rank {rank} hangs"
        kind, value = self.links[rank].recv()
        assert kind != "broken", value
        return value

    def run(self, task: Callable[..., Any], *arguments: Any) -> list[Any]:
        for rank in range(self.size):
            self.start(rank, task, *arguments)
        return [self.result(rank) for rank in range(self.size)]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@contextmanager
def ranks(folder: Path, size: int, **options: Any) -> Iterator[Ranks]:
    library_path()
    group = Ranks(folder, size, **options)
    try:
        yield group
    finally:
        group.close()
