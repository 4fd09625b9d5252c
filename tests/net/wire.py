"""The wire format, written a second time: a peer of plain sockets that may also break the rules."""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import os
import socket
import struct
from dataclasses import dataclass, field

from tests.net.vtable import Net, until

MAGIC = b"BAGUANET"
VERSION = 1
_HANDLE = struct.Struct("<QQ16s")
_HELLO = struct.Struct("<8sHHHHII16s16sQ")
_WELCOME = struct.Struct("<8sHHHHII")
_TAG_BYTES = 32
_FRAME = struct.Struct("<IIQQ")


def tag(secret: bytes, *parts: bytes) -> bytes:
    return hmac.new(secret, b"".join(parts), hashlib.sha256).digest()


def endpoint(handle: ctypes.Array[ctypes.c_char]) -> tuple[str, int]:
    """The IPv4 address in a handle: a sockaddr_in behind magic, ticket and nonce."""
    family, port, packed = struct.unpack_from("=H2s4s", handle.raw, _HANDLE.size)
    assert family == socket.AF_INET
    return socket.inet_ntoa(packed), int.from_bytes(port, "big")


def nonce(handle: ctypes.Array[ctypes.c_char]) -> bytes:
    return _HANDLE.unpack_from(handle.raw)[2]


def frame(sequence: int, length: int, offset: int, total: int) -> bytes:
    return _FRAME.pack(sequence, length, offset, total)


@dataclass(kw_only=True)
class Dialer:
    """Dials a listener as a connecting side does, stream by stream."""

    handle: ctypes.Array[ctypes.c_char]
    streams: int = 1
    chunk: int = 4096
    secret: bytes = b""
    link_id: bytes = field(default_factory=lambda: os.urandom(16))

    def hello(self, stream: int) -> bytes:
        body = _HELLO.pack(
            MAGIC, VERSION, stream, self.streams, 0, self.chunk, 0, nonce(self.handle), self.link_id, 0
        )
        return body + tag(self.secret, body)

    def dial(self, stream: int) -> socket.socket:
        """A connection that has said its hello."""
        sock = socket.create_connection(endpoint(self.handle))
        sock.setblocking(False)
        sock.sendall(self.hello(stream))
        return sock

    def welcome(self, sock: socket.socket, net: Net, listener: int) -> tuple[int, int, int | None]:
        """Drives the listener until it welcomed `sock`: (streams, chunk bytes, what accept() gave)."""
        answer = b""
        accepted = None

        def step() -> bool:
            nonlocal answer, accepted
            accepted = accepted or net.accept(listener)
            try:
                answer += sock.recv(_WELCOME.size + _TAG_BYTES - len(answer))
            except BlockingIOError:
                pass
            return len(answer) == _WELCOME.size + _TAG_BYTES

        until(step)
        body = answer[: _WELCOME.size]
        # The tag is over the hello of that stream; stream 0 tells us what was agreed.
        assert answer[_WELCOME.size :] in {
            tag(self.secret, self.hello(stream), body) for stream in range(self.streams)
        }
        magic, version, verdict, streams, _, chunk, _ = _WELCOME.unpack(body)
        assert (magic, version, verdict) == (MAGIC, VERSION, 0)
        return streams, chunk, accepted


def dialled(net: Net, streams: int = 1, chunk: int = 4096) -> tuple[int, list[socket.socket]]:
    """A receiving comm of `net`, and the sockets of a peer made by hand."""
    handle, listener = net.listen()
    dialer = Dialer(handle=handle, streams=streams, chunk=chunk)
    socks: list[socket.socket] = []
    comm = None
    for stream in range(streams):
        socks.append(dialer.dial(stream))
        agreed = dialer.welcome(socks[-1], net, listener)
        assert agreed[:2] == (streams, chunk)
        comm = agreed[2]
    comm = comm or until(lambda: net.accept(listener))
    net.close_listen(listener)
    return comm, socks
