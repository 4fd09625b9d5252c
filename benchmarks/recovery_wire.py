"""What the lab's wire needs for the state that a newcomer is sent."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.lab import Host
from tests.lab.elastic_worker import WIDTH, network

_COPIES = 3
"""Weights, and what Adam keeps of each."""
_SENT_BYTES = 2**29
_PART = 0.8
"""Of the wire that the state is to use at least."""

_RECEIVER = """
import socket, sys, time
with socket.create_server((sys.argv[1], 0)) as server:
    print(server.getsockname()[1], flush=True)
    connection, _ = server.accept()
    memory = bytearray(2**20)
    connection.recv_into(memory)
    began_s, count = time.monotonic(), 0
    while got := connection.recv_into(memory):
        count += got
    print(count / (time.monotonic() - began_s))
"""
_SENDER = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as connection:
    block = bytes(2**20)
    for _ in range(int(sys.argv[3]) // len(block)):
        connection.sendall(block)
"""


def state_bytes() -> int:
    """What training of the worker's model goes on from."""
    return _COPIES * sum(parameter.nbytes for parameter in network(WIDTH).parameters())


def wire_bytes_per_s(sender: Host, receiver: Host) -> float:
    """One stream of TCP from host to host, with nothing else on the machine."""
    receiving = receiver.popen([sys.executable, "-c", _RECEIVER, receiver.address], stdout=subprocess.PIPE)
    assert receiving.stdout is not None
    port = receiving.stdout.readline().strip()
    sender.run([sys.executable, "-c", _SENDER, receiver.address, port, str(_SENT_BYTES)])
    said, _ = receiving.communicate(timeout=60)
    return float(re.findall(r"[\d.e+]+", said)[-1])


def state_s(newcomers: int, bytes_per_s: float) -> float:
    """Time that the wire needs for the state of so many newcomers, at the part of it that is asked for."""
    return newcomers * state_bytes() / (_PART * bytes_per_s)
