"""What waits in front of a slow line, between two hosts of the lab."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab import Lab
from tests.net import native

pytestmark = pytest.mark.root

_SINK = """
import socket
server = socket.create_server(("", 5002))
print("listening", flush=True)
peer, _ = server.accept()
while peer.recv(1 << 20):
    pass
"""

_SOURCE = """
import socket, subprocess, sys
connection = socket.create_connection((sys.argv[1], 5002))
fd = connection.fileno()
sys.exit(subprocess.run([sys.argv[2], "backlog", str(fd), "1000"], pass_fds=[fd]).returncode)
"""


def test_streams_on_trial_have_no_more_under_way_than_the_one_that_had_no_limit() -> None:
    probe = native.program(Path(__file__).parent / "probe.cpp")
    with Lab(hosts=2, rate_mbit=400) as lab:
        source, sink = lab.hosts
        server = sink.popen([sys.executable, "-c", _SINK], stdout=subprocess.PIPE)
        assert server.stdout is not None and server.stdout.readline() == "listening\n"
        done = source.run([sys.executable, "-c", _SOURCE, sink.address, str(probe)])
    limit, one, each_of_four = map(int, done.stdout.split())
    assert limit == 0
    assert one > 128 << 10
    assert one / 5 < each_of_four < one / 3
