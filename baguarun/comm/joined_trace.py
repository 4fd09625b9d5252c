"""A trace of torch.profiler's with the rows of our own timeline in it."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_EPOCH_NS = 1_767_225_600_000_000_000
"""From where timelines count (2026-01-01 UTC; cpp_ext/engine/timeline_file.cc)."""
_FIRST_PROCESS = 1 << 30
"""Ranks as processes come after all process ids that Linux gives out, and after devices, numbered from 0."""

_Event = dict[str, Any]


def join(trace: Path, timeline: Path, timeline_bytes: int) -> None:
    """Add to `trace`, written by `export_chrome_trace`, what the first bytes of `timeline` have of the same
    time, an event per line.

    Packed with gzip is what ends in `.gz`. Raises OSError and ValueError, and leaves the trace as it was.
    """
    whole = _read(trace)
    taken = [event for event in whole["traceEvents"] if event.get("ph") == "X"]
    if not taken:
        return
    first = min(event["ts"] for event in taken)
    last = max(event["ts"] + event.get("dur", 0) for event in taken)
    # Microseconds, both; torch counts from a moment that it names.
    shift = (_EPOCH_NS - int(whole.get("baseTimeNanoseconds", 0))) / 1e3
    moved = (_moved(event, shift) for event in _events(timeline, timeline_bytes))
    whole["traceEvents"] += [event for event in moved if _lies_between(event, first, last)]
    _write(trace, whole)


def _events(timeline: Path, left: int) -> Iterator[_Event]:
    """One at a time, as a recording may be much longer than a profile. Behind the bytes all is in motion."""
    with timeline.open("rb") as file:
        left -= len(file.readline())
        while left > 0:
            line = file.readline(left)
            if not line:
                raise ValueError(f"{timeline} is shorter than what was written to it")
            left -= len(line)
            yield json.loads(line.rstrip(b",\n"))


def _moved(event: _Event, shift: float) -> _Event:
    moved = event | {"pid": _FIRST_PROCESS + event["pid"]}
    if "ts" in event:
        moved["ts"] = event["ts"] + shift
    if event["name"] == "process_name":
        moved["args"] = {"name": f"baguarun {event['args']['name']}"}
    return moved


def _lies_between(event: _Event, first: float, last: float) -> bool:
    """In part, or it names something."""
    return "ts" not in event or (event["ts"] <= last and event["ts"] + event.get("dur", 0) >= first)


def _read(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    found: dict[str, Any] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return found


def _write(path: Path, trace: dict[str, Any]) -> None:
    data = json.dumps(trace).encode()
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
