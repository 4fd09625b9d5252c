"""Latency between a host and the switch, through a user-space delay line (kernels here lack netem).

The delay line is a C program outside this repository: `../shared/tools/delayline.c`, or the path in
`$BAGUARUN_LAB_DELAYLINE`. Labs without `delay_ms` do not need it.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

from tests.lab.namespaces import LabError, system

_DEFAULT_SOURCE = Path(__file__).resolve().parents[3] / "shared" / "tools" / "delayline.c"


class DelayLines:
    """One process per host, in place of the host's cable."""

    def __init__(self, delay_ms: float) -> None:
        self._delay_us = round(delay_ms * 1000)
        self._lines: list[subprocess.Popen[str]] = []

    def connect(self, namespace: str, nic: str, bridge_namespace: str, port: str) -> None:
        """Make `nic` and `port`, joined with the delay one way and the other."""
        line = subprocess.Popen(
            # The line lives in no host, so the sweeper would not find it: it dies with its owner.
            [
                *("setpriv", "--pdeathsig", "KILL", str(delay_program())),
                *(namespace, nic, "-", bridge_namespace, port, "-", str(self._delay_us)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._lines.append(line)
        assert line.stdout is not None
        if line.stdout.readline() != "ready\n":
            raise LabError(
                f"delay line of {namespace}: ended with code {line.wait()}: is there a /dev/net/tun?"
            )

    def stop(self) -> None:
        """End the lines; their devices vanish with them."""
        for line in self._lines:
            line.kill()
            line.wait()
            if line.stdout is not None:
                line.stdout.close()
        self._lines.clear()


def delay_program() -> Path:
    """The compiled delay line, built when its source is newer than what was built last. Raises LabError where
    there is no source."""
    source = Path(os.environ.get("BAGUARUN_LAB_DELAYLINE", _DEFAULT_SOURCE))
    if not source.is_file():
        raise LabError(
            f"delay_ms: no delay line at {source}: point BAGUARUN_LAB_DELAYLINE at delayline.c, "
            "or use a lab without delay_ms"
        )
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    program = Path(tempfile.gettempdir()) / f"lab-delayline-{digest}"
    if not program.exists():
        building = program.with_suffix(f".{os.getpid()}")
        system("gcc", "-O2", "-pthread", str(source), "-o", str(building))
        building.replace(program)
    return program
