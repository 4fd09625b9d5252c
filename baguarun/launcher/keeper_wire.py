"""Messages between agent and keeper: a length, then JSON; file descriptors travel beside a spawn message.

    agent → keeper   {"op": "spawn", "id", "argv", "env", "cwd", "cpus", "control"}
                         + 2 descriptors (stdout, stderr), or 3 if "control"
                     {"op": "signal", "pid", "signum"}
                     {"op": "stop", "id", "grace_s"}
    keeper → agent   {"op": "spawned", "id", "pid"}
                     {"op": "refused", "id", "stage", "error"}     stage: fork, prepare, cwd, cpus or exec
                     {"op": "exits", "time_s", "exits": [[pid, exit code or None, signal or None], …]}
                     {"op": "stopped", "id", "left": [[pid, name, state], …]}

Text that is no UTF-8 (paths, arguments) passes as surrogates, as Python's own `os` has it.
"""

from __future__ import annotations

import json
import struct
from typing import Any

_LENGTH = struct.Struct("!I")

Message = dict[str, Any]


def encode(message: Message) -> bytes:
    payload = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(len(payload)) + payload


class Decoder:
    """Cuts a byte stream into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that `data` completes."""
        self._buffer += data
        messages: list[Message] = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            messages.append(json.loads(bytes(self._buffer[_LENGTH.size : end])))
            del self._buffer[:end]
        return messages
