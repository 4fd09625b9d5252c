"""Labs carry their owner in their names; what a dead owner left is found and removed."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.lab import namespaces

_NAME = re.compile(r"^lab-(?P<pid>\d+)-(?P<start>\d+)-(?P<serial>\d+)\.(?P<part>[a-z0-9]+)$")


def _start_ticks(pid: int) -> int | None:
    """When process `pid` began (clock ticks since boot): tells a process from a later one with its pid."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])


def lab_name(serial: int) -> str:
    """Name of this process's lab number `serial`; namespaces append `.b`, `.h0`, `.h1`…"""
    return f"lab-{os.getpid()}-{_start_ticks(os.getpid())}-{serial}"


def orphans() -> list[str]:
    """Namespaces of labs whose owner is dead."""
    found = []
    for name in namespaces.names():
        match = _NAME.match(name)
        if match and _start_ticks(int(match["pid"])) != int(match["start"]):
            found.append(name)
    return found


def sweep() -> list[str]:
    """Remove every lab whose owner is dead, its processes too; returns the namespaces removed."""
    dead = orphans()
    namespaces.remove(dead)
    return dead
