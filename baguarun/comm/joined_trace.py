"""A trace of torch.profiler's with the rows of our own timeline in it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

_EPOCH_NS = 1_767_225_600_000_000_000
"""From where timelines count (2026-01-01 UTC; cpp_ext/engine/timeline_file.cc)."""
_FIRST_PROCESS = 1 << 30
"""Ranks as processes come after all process ids that Linux gives out, and after devices, numbered from 0."""

_Event = dict[str, Any]


def join(trace: Path, timeline: Path) -> None:
    """Add to `trace`, written by `export_chrome_trace`, what `timeline` has of the same time.

    Packed with gzip is what ends in `.gz`.
    """
    whole = _read(trace)
    taken = [event for event in whole["traceEvents"] if event.get("ph") == "X"]
    if taken:
        first = min(event["ts"] for event in taken)
        last = max(event["ts"] + event["dur"] for event in taken)
        # Microseconds, both; torch counts from a moment that it names.
        shift = (_EPOCH_NS - int(whole.get("baseTimeNanoseconds", 0))) / 1e3
        moved = (_moved(event, shift) for event in _read(timeline)["traceEvents"])
        whole["traceEvents"] += [event for event in moved if _lies_between(event, first, last)]
    _write(trace, whole)


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
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
