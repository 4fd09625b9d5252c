"""Latency of a lab's hosts, through a delay line of our own: kernels without netem have none to offer.

`delayline.c` holds back what netfilter queues, which takes 5 % of two cores at 1 Gbit/s, two fifths of that
TCP's own work on packets that arrive. A program that carries packets from one device to another takes a
quarter of them, from whoever is measured there.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.lab.host import Host
from tests.lab.namespaces import NAMESPACE_DIR, LabError, inside, system

_SOURCE = Path(__file__).with_name("delayline.c")
_QUEUE = 0


class DelayLine:
    """Holds up what arrives at hosts: one process with a thread per core, which lives in none of them."""

    def __init__(self, delay_ms: float) -> None:
        # A packet leaves one NIC late and arrives late at another: it waits for both where it arrives.
        self._delay_us = round(2 * delay_ms * 1000)
        self._line: subprocess.Popen[str] | None = None

    def start(self, hosts: Sequence[Host]) -> None:
        """From now on all IPv4 is late there. Raises LabError where firewall or kernel cannot."""
        files = [str(NAMESPACE_DIR / host.namespace) for host in hosts]
        self._line = subprocess.Popen(
            [str(delay_program()), str(_QUEUE), str(self._delay_us), *files],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._line.stdout is not None and self._line.stderr is not None
        if self._line.stdout.readline() != "ready\n":
            raise LabError(self._line.stderr.read().strip())
        for host in hosts:
            self.hold_up(host, host.nic)

    def hold_up(self, host: Host, device: str) -> None:
        """What comes to a host by `device` is late, too; one of those it was started for."""
        # Nothing passes without a program at the queue's end: no lab goes on that has lost its latency.
        rule = ("INPUT", "-i", device, "-j", "NFQUEUE", "--queue-num", str(_QUEUE))
        system(*inside(host.namespace), "iptables", "-w", "-t", "mangle", "-A", *rule)

    def stop(self) -> None:
        """End it, and with it what still waits."""
        if self._line is None:
            return
        self._line.kill()
        self._line.communicate()
        self._line = None


def delay_program() -> Path:
    """The compiled delay line, built when its source is another than what was built last. Raises LabError
    where a tool is missing."""
    missing = [tool for tool in ("gcc", "iptables") if shutil.which(tool) is None]
    if missing:
        raise LabError(f"delay_ms: latency needs {', '.join(missing)}: apt-get install gcc iptables")
    digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    program = Path(tempfile.gettempdir()) / f"lab-delayline-{digest}"
    if not program.exists():
        with tempfile.TemporaryDirectory(dir=program.parent) as folder:
            building = Path(folder) / program.name
            system("gcc", "-O2", "-pthread", str(_SOURCE), "-o", str(building))
            building.replace(program)
    return program
