"""Communicator through a C ABI, for ranks as processes (`shm_peer.Ranks`)."""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tests.net import native
from tests.net.shm_peer import (
    DTYPES,
    FAULTS,
    NET,
    OPS,
    Exchange,
    Failed,
    Ranks,
    exchange_by_files,
    pointer,
)

SOURCES = tuple(file for file in sorted(NET.glob("*.cc")) if file.name != "shm_capi.cc")
DRIVER = native.ROOT / "tests" / "net" / "communicator_library.cc"
ANY = -1
_P, _Z, _I, _U, _S, _D = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_char_p,
    ctypes.c_double,
)
Arrived = ctypes.CFUNCTYPE(None, _Z)
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "Error": (_S, []),
    "Create": (_P, [_I, _I, _S, _D, _Z, _S, _I, Exchange]),
    "Destroy": (None, [_P]),
    "AllReduce": (_I, [_P, _D, _P, _Z, _I, _I]),
    "AllReduceInto": (_I, [_P, _D, _P, _P, _Z, _I, _I, Arrived]),
    "LookAhead": (None, [_P, _P, _Z, _I, _I]),
    "Reduce": (_I, [_P, _D, _P, _Z, _I, _I, _I]),
    "ReduceScatter": (_I, [_P, _D, _P, _P, _Z, _I, _I]),
    "AllGather": (_I, [_P, _D, _P, _P, _Z]),
    "Broadcast": (_I, [_P, _D, _P, _Z, _I]),
    "Gather": (_I, [_P, _D, _P, _P, _Z, _I]),
    "Scatter": (_I, [_P, _D, _P, _P, _Z, _I]),
    "AllToAllV": (_I, [_P, _D, _P, _P, _P, _P]),
    "Barrier": (_I, [_P, _D]),
    "Send": (_P, [_P, _P, _Z, _I, _U]),
    "Recv": (_P, [_P, _P, _Z, _I, _U]),
    "IsDone": (_I, [_P]),
    "Source": (_I, [_P]),
    "Forget": (None, [_P]),
    "Progress": (_I, [_P]),
    "HasUnsent": (_I, [_P]),
    "Sleep": (None, [_P, _D]),
    "Wake": (None, [_P]),
    "Abort": (None, [_P, _S]),
    "Failure": (_I, [_P]),
    "BytesSent": (ctypes.c_uint64, [_P]),
}


@functools.cache
def library_path() -> Path:
    return native.library("libcommunicator", [DRIVER, *SOURCES])


@functools.cache
def load() -> ctypes.CDLL:
    library = ctypes.CDLL(str(library_path()))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, f"bagua{name}")
        function.restype, function.argtypes = result, arguments
    return library


class Message:
    """A message under way; keeps its buffer alive."""

    def __init__(self, library: ctypes.CDLL, handle: int | None, data: np.ndarray) -> None:
        if not handle:
            raise Failed("post", library.baguaError().decode())
        self.library, self.handle, self.data = library, handle, data

    def is_done(self) -> bool:
        result = self.library.baguaIsDone(self.handle)
        if result < 0:
            raise Failed(FAULTS[-result - 1], self.library.baguaError().decode())
        return bool(result)

    def source(self) -> int:
        return int(self.library.baguaSource(self.handle))


class Member:
    """A Communicator; blobs are exchanged by files in `folder`."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        size: int,
        *,
        nonce: str,
        timeout_s: float = 30,
        arena_bytes: int = 0,
        host: str = "",
        share: bool = True,
        deadline_s: float = 30,
    ) -> None:
        self.library, self.rank, self.size, self.deadline_s = load(), rank, size, deadline_s
        callback = exchange_by_files(folder, nonce, rank, size)
        arguments = (rank, size, nonce.encode(), timeout_s, arena_bytes, host.encode(), int(share), callback)
        self.handle = self.library.baguaCreate(*arguments)
        if not self.handle:
            raise Failed("create", self.library.baguaError().decode())

    def call(self, name: str, *arguments: Any) -> None:
        result = getattr(self.library, f"bagua{name}")(self.handle, self.deadline_s, *arguments)
        if result != 0:
            raise Failed(FAULTS[-result - 1], self.library.baguaError().decode())

    def all_reduce(self, data: np.ndarray, op: str = "sum", dtype: str = "") -> None:
        kind = DTYPES.index(dtype or data.dtype.name)
        self.call("AllReduce", pointer(data), data.size, kind, OPS.index(op))

    def all_reduce_into(
        self, source: np.ndarray, out: np.ndarray, op: str, arrived: Callable[[int], None]
    ) -> None:
        kind = DTYPES.index(source.dtype.name)
        told = Arrived(arrived)
        self.call("AllReduceInto", pointer(source), pointer(out), source.size, kind, OPS.index(op), told)

    def look_ahead(self, data: np.ndarray, op: str = "sum") -> None:
        """The call after the next one reduces `data`, or nobody knows if that is empty."""
        self.library.baguaLookAhead(
            self.handle, pointer(data), data.size, DTYPES.index(data.dtype.name), OPS.index(op)
        )

    def bytes_sent(self) -> int:
        return int(self.library.baguaBytesSent(self.handle))

    def barrier(self) -> None:
        self.call("Barrier")

    def send(self, data: np.ndarray, to: int, tag: int = 0) -> Message:
        handle = self.library.baguaSend(self.handle, pointer(data), data.nbytes, to, tag)
        return Message(self.library, handle, data)

    def recv(self, data: np.ndarray, source: int, tag: int = 0) -> Message:
        handle = self.library.baguaRecv(self.handle, pointer(data), data.nbytes, source, tag)
        return Message(self.library, handle, data)

    def progress(self) -> bool:
        result = self.library.baguaProgress(self.handle)
        if result < 0:
            raise Failed(FAULTS[-result - 1], self.library.baguaError().decode())
        return bool(result)

    def sleep(self, seconds: float) -> None:
        self.library.baguaSleep(self.handle, seconds)

    def wait(self, *messages: Message) -> None:
        """Drives until all are done."""
        deadline = time.monotonic() + self.deadline_s
        while not all(message.is_done() for message in messages):
            assert time.monotonic() < deadline, "messages hang"
            if not self.progress():
                self.sleep(0.5)

    def abort(self, reason: str) -> None:
        self.library.baguaAbort(self.handle, reason.encode())

    def failure(self) -> str:
        self.library.baguaFailure(self.handle)
        return str(self.library.baguaError().decode())

    def close(self) -> None:
        self.library.baguaDestroy(self.handle)
        self.handle = None


@contextmanager
def members(folder: Path, size: int, hosts: Sequence[str] = (), **options: Any) -> Iterator[Ranks]:
    """Ranks whose hosts are called `hosts`."""
    library_path()
    each = [{"host": host} for host in hosts] or [{}] * size
    group = Ranks(folder, size, Member, each, **options)
    try:
        yield group
    finally:
        group.close()
