"""The other side of a connection as a process of its own, to be killed, frozen or cut off.

    python -m tests.net.peer LIBRARY listen|connect send|recv SIZE [HANDLE]

It listens and prints the handle, or connects to HANDLE; then it sends or receives messages of SIZE bytes for
ever, one line per message, and "error CODE TEXT" at last. `idle` instead of send or recv does nothing at all;
`tell` and `check` move one message of each of SIZES that both sides know, twice, in order, and print "whole".
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path
from random import Random

from tests.net.vtable import HANDLE_BYTES, Net, NetFailure, Request, finish, until

ROOT = Path(__file__).parents[2]

# 0, 1, and what lies around a header, the smallest and the largest chunk, and some chunks.
SIZES = [0, 1, *(edge + step for edge in (24, 4096, 131072, 1 << 20, 3 << 20) for step in (-1, 0, 1))]
_IN_FLIGHT = 8


class Peer:
    """A running peer; use it as a context."""

    def __init__(
        self,
        library: Path,
        role: str,
        task: str,
        size: int,
        *,
        handle: bytes = b"",
        prefix: tuple[str, ...] = (),
        **settings: str,
    ) -> None:
        words = [sys.executable, "-m", "tests.net.peer", str(library), role, task, str(size), handle.hex()]
        environment = {**os.environ, "NCCL_SOCKET_IFNAME": "lo", **settings}
        self.process = subprocess.Popen(
            [*prefix, *words], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
        )

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *unused: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def line(self) -> str:
        """The next line that it prints."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> str:
        """The error that it ends with."""
        while (line := self.line()) == "message" or line == "connected":
            pass
        return line

    def handle(self) -> ctypes.Array[ctypes.c_char]:
        return ctypes.create_string_buffer(bytes.fromhex(self.line()), HANDLE_BYTES)


def converse(net: Net, comm: int, task: str) -> None:
    """Sends or receives the agreed messages, some in flight; closes and ends in order."""
    random = Random(1)
    requests: list[tuple[Request, bytes]] = []
    for size in SIZES * 2:
        text = random.randbytes(size)
        if task == "tell":
            request = net.isend(comm, ctypes.create_string_buffer(text, max(size, 1)), size)
        else:
            request = net.irecv(comm, ctypes.create_string_buffer(size + 1))
        assert request is not None
        requests.append((request, text))
        if len(requests) == _IN_FLIGHT:
            settle(net, *requests.pop(0))
    for request, text in requests:
        settle(net, request, text)
    (net.close_send if task == "tell" else net.close_recv)(comm)
    net.finalize()


def settle(net: Net, request: Request, text: bytes) -> None:
    assert finish((net, request)) == [len(text)]
    assert request.buffer.raw[: len(text)] == text


def main(words: list[str]) -> None:
    library, role, task, size = Path(words[0]), words[1], words[2], int(words[3])
    net = Net(library)
    try:
        comm = meet(net, role, bytes.fromhex(words[4]))
        print("connected", flush=True)
        if task == "idle":
            time.sleep(3600)
        if task in ("tell", "check"):
            converse(net, comm, task)
            print("whole", flush=True)
            return
        room = ctypes.create_string_buffer(os.urandom(max(size, 1)), max(size, 1))
        while True:
            request = net.isend(comm, room, size) if task == "send" else net.irecv(comm, room, size)
            assert request is not None
            finish((net, request))
            print("message", flush=True)
    except NetFailure as failure:
        print("error", failure.code, failure.log, flush=True)


def meet(net: Net, role: str, theirs: bytes) -> int:
    comm: int
    if role == "listen":
        handle, listener = net.listen()
        print(handle.raw.hex(), flush=True)
        comm = until(lambda: net.accept(listener))
    else:
        copy = ctypes.create_string_buffer(theirs, HANDLE_BYTES)
        comm = until(lambda: net.connect(copy))
    return comm


if __name__ == "__main__":
    main(sys.argv[1:])
