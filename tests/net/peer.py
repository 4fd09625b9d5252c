"""The other side of a connection as a process of its own, to be killed, frozen or cut off.

    python -m tests.net.peer LIBRARY listen|connect send|recv SIZE [HANDLE]

It listens and prints the handle, or connects to HANDLE; then it sends or receives messages of SIZE bytes for
ever, one line per message, and "error CODE TEXT" at last. `idle` instead of send or recv does nothing at all.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.net.vtable import HANDLE_BYTES, Net, NetFailure, finish, until

ROOT = Path(__file__).parents[2]


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


def main(words: list[str]) -> None:
    library, role, task, size = Path(words[0]), words[1], words[2], int(words[3])
    net = Net(library)
    if role == "listen":
        handle, listener = net.listen()
        print(handle.raw.hex(), flush=True)
        comm = until(lambda: net.accept(listener))
    else:
        theirs = ctypes.create_string_buffer(bytes.fromhex(words[4]), HANDLE_BYTES)
        comm = until(lambda: net.connect(theirs))
    print("connected", flush=True)
    room = ctypes.create_string_buffer(os.urandom(max(size, 1)), max(size, 1))
    if task == "idle":
        time.sleep(3600)
    try:
        while True:
            request = net.isend(comm, room, size) if task == "send" else net.irecv(comm, room, size)
            assert request is not None
            finish((net, request))
            print("message", flush=True)
    except NetFailure as failure:
        print("error", failure.code, failure.log, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
