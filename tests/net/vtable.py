"""Drives the NCCL plugin as NCCL does: through its tables, with host memory, from any number of threads.

Layouts are written here a second time, from the interface's description, so that a slip in our header shows.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUCCESS, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_USAGE, REMOTE_ERROR = 0, 2, 3, 5, 6
HOST = 1
HANDLE_BYTES = 128
VERSIONS = (10, 11, 12)
PATIENCE_S = 60.0

_POINTER, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_OUT = ctypes.POINTER(ctypes.c_void_p)
_INTS = ctypes.POINTER(ctypes.c_int)
_LOGGER = ctypes.CFUNCTYPE(
    None, _INT, ctypes.c_ulong, ctypes.c_char_p, _INT, ctypes.c_char_p, ctypes.c_char_p
)

_HEAD = [
    ("name", ctypes.c_char_p),
    ("pciPath", ctypes.c_char_p),
    ("guid", ctypes.c_uint64),
    *[(name, _INT) for name in ("ptrSupport", "regIsGlobal", "forceFlush", "speed", "port")],
    ("latency", ctypes.c_float),
    *[(name, _INT) for name in ("maxComms", "maxRecvs", "netDeviceType", "netDeviceVersion", "ndevs")],
]
_SIZES = [("maxP2pBytes", _SIZE), ("maxCollBytes", _SIZE)]


class PropertiesV10(ctypes.Structure):
    _fields_ = (*_HEAD, ("devs", _INT * 4), *_SIZES)


class PropertiesV11(ctypes.Structure):
    _fields_ = (*_HEAD, ("devs", _INT * 4), *_SIZES, ("maxMultiRequestSize", _INT))


class PropertiesV12(ctypes.Structure):
    _fields_ = (
        *_HEAD,
        ("devs", _INT * 8),
        *_SIZES,
        ("maxMultiRequestSize", _INT),
        ("railId", ctypes.c_int16),
        ("planeId", ctypes.c_int16),
    )


PROPERTIES = {10: PropertiesV10, 11: PropertiesV11, 12: PropertiesV12}

_DATA_FUNCTIONS = {
    "accept": (_POINTER, _OUT, _OUT),
    "regMr": (_POINTER, _POINTER, _SIZE, _INT, _OUT),
    "regMrDmaBuf": None,
    "deregMr": (_POINTER, _POINTER),
    "isend": (_POINTER, _POINTER, _SIZE, _INT, _POINTER, _POINTER, _OUT),
    "irecv": (_POINTER, _INT, _OUT, ctypes.POINTER(_SIZE), _INTS, _OUT, _OUT, _OUT),
    "iflush": (_POINTER, _INT, _OUT, _INTS, _OUT, _OUT),
    "test": (_POINTER, _INTS, _INTS),
    "closeSend": (_POINTER,),
    "closeRecv": (_POINTER,),
    "closeListen": (_POINTER,),
    "getDeviceMr": None,
    "irecvConsumed": None,
    "makeVDevice": None,
}
_V10 = {
    "init": (_LOGGER, _POINTER),
    "devices": (_INTS,),
    "getProperties": (_INT, _POINTER),
    "listen": (_INT, _POINTER, _OUT),
    "connect": (_INT, _POINTER, _POINTER, _OUT, _OUT),
    **_DATA_FUNCTIONS,
}
_V11 = {
    "init": (_OUT, ctypes.c_uint64, _POINTER, _LOGGER, _POINTER),
    "devices": (_INTS,),
    "getProperties": (_INT, _POINTER),
    "listen": (_POINTER, _INT, _POINTER, _OUT),
    "connect": (_POINTER, _INT, _POINTER, _OUT, _OUT),
    **_DATA_FUNCTIONS,
    "finalize": (_POINTER,),
    "setNetAttr": None,
}
FUNCTIONS: dict[int, dict[str, Any]] = {10: _V10, 11: _V11, 12: _V11}


class NetFailure(Exception):
    """A function of the plugin returned something else than success."""

    def __init__(self, function: str, code: int, log: str) -> None:
        super().__init__(f"{function}: result {code}: {log}")
        self.code = code
        self.log = log


@dataclass(frozen=True)
class Request:
    """What isend and irecv return."""

    pointer: int
    buffer: Any
    """Keeps the memory alive."""


class Net:
    """One communicator's use of one version of the plugin."""

    def __init__(self, library: Path, version: int = 11) -> None:
        self.version = version
        self._library = ctypes.CDLL(str(library))
        names = FUNCTIONS[version]
        self.table = (ctypes.c_void_p * (1 + len(names))).in_dll(self._library, f"ncclNetPlugin_v{version}")
        self.name = ctypes.string_at(self.table[0]).decode()
        self._call = {
            name: ctypes.CFUNCTYPE(_INT, *types)(pointer)
            for (name, types), pointer in zip(names.items(), self.table[1:], strict=True)
            if types is not None
        }
        self.log: list[str] = []
        self._logger = _LOGGER(self._keep_line)
        self._context = ctypes.c_void_p()
        if version == 10:
            self._check("init", self._logger, None)
        else:
            self._check("init", ctypes.byref(self._context), 1, None, self._logger, None)

    def _keep_line(self, level: int, flags: int, file: bytes, line: int, form: bytes, text: bytes) -> None:
        self.log.append(form.decode().replace("%s", text.decode(errors="replace")))

    def call(self, name: str, *arguments: Any) -> int:
        return self._call[name](*arguments)

    def _check(self, name: str, *arguments: Any) -> None:
        if (code := self.call(name, *arguments)) != SUCCESS:
            raise NetFailure(name, code, self.log[-1] if self.log else "")

    def devices(self) -> int:
        count = _INT(-1)
        self._check("devices", ctypes.byref(count))
        return count.value

    def properties(self, device: int = 0) -> Any:
        properties = PROPERTIES[self.version]()
        self._check("getProperties", device, ctypes.byref(properties))
        return properties

    def listen(self, device: int = 0) -> tuple[Any, int]:
        """(handle, listening comm)"""
        handle = ctypes.create_string_buffer(b"\xff" * HANDLE_BYTES, HANDLE_BYTES)
        comm = ctypes.c_void_p()
        context = () if self.version == 10 else (self._context,)
        self._check("listen", *context, device, handle, ctypes.byref(comm))
        assert comm.value is not None
        return handle, comm.value

    def connect(self, handle: Any, device: int = 0) -> int | None:
        comm = ctypes.c_void_p(0x1)
        if self.version == 10:
            self._check("connect", device, None, handle, ctypes.byref(comm), None)
        else:
            self._check("connect", self._context, device, handle, ctypes.byref(comm), None)
        return comm.value

    def accept(self, listener: int) -> int | None:
        comm = ctypes.c_void_p(0x1)
        self._check("accept", listener, ctypes.byref(comm), None)
        return comm.value

    def isend(self, comm: int, data: Any, size: int | None = None) -> Request | None:
        """`data`: a ctypes buffer or numpy array."""
        request = ctypes.c_void_p(0x1)
        address, length = _address(data)
        self._check(
            "isend", comm, address, length if size is None else size, 0, None, None, ctypes.byref(request)
        )
        return None if request.value is None else Request(request.value, data)

    def irecv(self, comm: int, data: Any, size: int | None = None) -> Request | None:
        request = ctypes.c_void_p(0x1)
        address, length = _address(data)
        pointers = (ctypes.c_void_p * 1)(address)
        sizes = (_SIZE * 1)(length if size is None else size)
        tags = (_INT * 1)(0)
        self._check("irecv", comm, 1, pointers, sizes, tags, None, None, ctypes.byref(request))
        return None if request.value is None else Request(request.value, data)

    def test(self, request: Request) -> int | None:
        """The message's size once it is done."""
        done, size = _INT(-1), _INT(-1)
        self._check("test", request.pointer, ctypes.byref(done), ctypes.byref(size))
        return size.value if done.value else None

    def close_send(self, comm: int) -> None:
        self._check("closeSend", comm)

    def close_recv(self, comm: int) -> None:
        self._check("closeRecv", comm)

    def close_listen(self, comm: int) -> None:
        self._check("closeListen", comm)

    def finalize(self) -> None:
        if self.version != 10:
            self._check("finalize", self._context)


def _address(data: Any) -> tuple[int, int]:
    if hasattr(data, "ctypes"):
        return data.ctypes.data, data.nbytes
    return ctypes.addressof(data), len(data)


def until(what: Callable[[], Any], patience_s: float = PATIENCE_S) -> Any:
    """Calls `what` again and again until it gives something else than None or False."""
    deadline = time.monotonic() + patience_s
    while (result := what()) is None or result is False:
        assert time.monotonic() < deadline, f"nothing after {patience_s} s"
        time.sleep(0)
    return result


def join(sender: Net, receiver: Net) -> tuple[int, int]:
    """A connection: (sending comm, receiving comm). Both sides are driven in turns."""
    handle, listener = receiver.listen()
    comms: dict[str, int | None] = {"send": None, "recv": None}

    def step() -> bool:
        if comms["send"] is None:
            comms["send"] = sender.connect(handle)
        if comms["recv"] is None:
            comms["recv"] = receiver.accept(listener)
        return None not in comms.values()

    until(step)
    receiver.close_listen(listener)
    assert comms["send"] is not None
    assert comms["recv"] is not None
    return comms["send"], comms["recv"]


def finish(*requests: tuple[Net, Request]) -> list[int]:
    """Tests all requests in turns until all are done; their sizes."""
    sizes: dict[int, int] = {}

    def step() -> bool:
        for number, (net, request) in enumerate(requests):
            if number not in sizes and (size := net.test(request)) is not None:
                sizes[number] = size
        return len(sizes) == len(requests)

    until(step)
    return [sizes[number] for number in range(len(requests))]
