"""A lab's latency: there for every packet, in their order, and never lost without a word."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab import Host, Lab, LabError, delay

pytestmark = [pytest.mark.root, pytest.mark.timeout(120)]

_DELAY_MS = 15.0

_ANSWERER = """
import socket
server = socket.socket(type=socket.SOCK_DGRAM)
server.bind(("", 5003))
print("listening", flush=True)
while True:
    data, asker = server.recvfrom(100)
    server.sendto(data, asker)
"""

_ASK = """
import socket, sys, time
client = socket.socket(type=socket.SOCK_DGRAM)
client.settimeout(float(sys.argv[2]))
for count in map(int, sys.argv[3:]):
    asked = time.monotonic()
    for number in range(count):
        client.sendto(str(number).encode(), (sys.argv[1], 5003))
    answers = [int(client.recv(100)) for _ in range(count)]
    assert answers == list(range(count)), answers
    print(time.monotonic() - asked)
"""


def _answerer(host: Host) -> subprocess.Popen[str]:
    server = host.popen([sys.executable, "-c", _ANSWERER], stdout=subprocess.PIPE)
    assert server.stdout is not None and server.stdout.readline() == "listening\n"
    return server


def _ask(asker: Host, server: Host, *counts: int, patience_s: float = 30.0) -> list[float]:
    """Seconds until the last of so many questions, asked in a row, was answered, in the order asked."""
    words = [server.address, str(patience_s), *map(str, counts)]
    return [float(line) for line in asker.run([sys.executable, "-c", _ASK, *words]).stdout.split()]


def test_a_question_and_its_answer_are_late_at_both_nics() -> None:
    with Lab(hosts=3, delay_ms=_DELAY_MS) as lab:
        _answerer(lab.hosts[1])
        # Half a tick early at most, each way. How late a busy machine makes it is not the lab's to promise.
        least_s = 4 * _DELAY_MS / 1e3 - 2 * 0.0005
        # More than one tick brings, and one alone on a line that had been empty.
        for took_s in _ask(lab.hosts[0], lab.hosts[1], 1, 100, 1):
            assert took_s >= least_s
        # Answered before 40 times that have gone by: they wait at the same time, not one after the other.
        assert min(_ask(lab.hosts[2], lab.hosts[1], *[100] * 5)) < 40 * least_s


def test_a_lab_whose_delay_line_died_is_cut_off_not_fast() -> None:
    with Lab(hosts=2, delay_ms=_DELAY_MS) as lab:
        _answerer(lab.hosts[1])
        assert _ask(lab.hosts[0], lab.hosts[1], 1)
        assert lab._delay is not None
        lab._delay.stop()
        with pytest.raises(subprocess.CalledProcessError):
            _ask(lab.hosts[0], lab.hosts[1], 1, patience_s=0.5)


def test_a_missing_firewall_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LabError, match="latency needs gcc, iptables: apt-get install"):
        delay.delay_program()


def test_a_line_that_cannot_be_says_why() -> None:
    line = [str(delay.delay_program()), "0", "1000", "/nowhere/netns"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert done.stderr == "delayline: /nowhere/netns: No such file or directory\n"
