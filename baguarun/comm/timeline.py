"""Records the engine's work into a file for Perfetto: which bucket, codec or message, when, on which thread.

One recording per process, since one file shows all of its engines: `start` and `stop`, or `baguarun run
--timeline FILE` and BAGUARUN_TIMELINE=FILE, which start it when the first model is wrapped. docs/timeline.md
says how to read it. torch.profiler sees the engine's spans with and without a recording; `trace_handler` adds
the other rows to a profile.
"""

from __future__ import annotations

import atexit
import functools
import os
import socket
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from baguarun.comm.extension import load_extension
from baguarun.comm.groups import read_worker_env
from baguarun.comm.joined_trace import join
from baguarun.errors import UsageError

_recording: _Recording | None = None
_asked_environment = False


def start(path: str | os.PathLike[str], *, max_events: int | None = None) -> None:
    """Record from now on into `path`, on this rank; the file is replaced and is valid JSON at any time.

    Ranks need files of their own. The first `max_events` events are kept (None: about a million, some 150
    MB). Raises `UsageError` if the file cannot be written or a recording is going on.
    """
    global _recording
    rank = read_worker_env().rank
    extension = _engine()
    extension.timeline_start(
        os.fspath(path),
        rank,
        f"rank {rank} ({socket.gethostname()})",
        extension.TIMELINE_MAX_EVENTS if max_events is None else max_events,
    )
    _recording = _Recording(os.path.abspath(path))


def stop() -> None:
    """End the recording, if there is one; the file is complete when this returns.

    Warns if events were left out. Raises `UsageError` if the file could not be written to the end (disk
    full); it then holds what was written before.
    """
    global _recording
    if _recording is None:
        return
    recording, _recording = _recording, None
    recording.close()


def is_recording() -> bool:
    """Whether a recording is going on and can still be written."""
    return _recording is not None and bool(_engine().timeline_is_on())


def trace_handler(path: str | os.PathLike[str]) -> Callable[[torch.profiler.profile], None]:
    """For `torch.profiler.profile(on_trace_ready=...)`: writes the profile to `path` with the rows of the
    recording that is going on then, on one clock.

    `{step}` in the path becomes the profiler's step; ranks need files of their own; `.gz` at the end packs.
    The handler warns, and training goes on, where there is no recording (the profile is torch's alone then),
    where it has come to its end (`max_events`, a full disk), and where a file cannot be written.
    """

    def write(profile: torch.profiler.profile) -> None:
        recording = _recording
        written_bytes, left_out = _engine().timeline_flush()
        trace = Path(os.fspath(path).replace("{step}", str(profile.step_num)))
        if recording is None or not written_bytes:
            warnings.warn(
                f"profile {trace}: nothing is being recorded; want timeline.start(), or --timeline",
                stacklevel=2,
            )
        elif left_out or not is_recording():
            warnings.warn(f"profile {trace}: the recording ended before; rows are missing", stacklevel=2)
        try:
            trace.unlink(missing_ok=True)
            profile.export_chrome_trace(os.fspath(trace))
            if recording is not None and written_bytes:
                join(trace, Path(recording.path), written_bytes)
        except (OSError, ValueError) as error:
            warnings.warn(f"profile {trace}: without the timeline's rows: {error}", stacklevel=2)

    return write


def start_if_asked() -> None:
    """Start what BAGUARUN_TIMELINE asks for, once per process. Raises as `start` does."""
    global _asked_environment
    if _asked_environment:
        return
    _asked_environment = True
    path = read_worker_env().timeline_part
    if path and _recording is None:
        start(path)


def span(name: str, category: str, size_bytes: int = -1) -> AbstractContextManager[None]:
    """What happens inside of `with`, on this thread. Names are kept for ever: use few."""
    found: AbstractContextManager[None] = _engine().TimelineSpan(name, category, size_bytes)
    return found


def flight(name: str, category: str, size_bytes: int = -1) -> Any:
    """Something that is on its way until the result's `end()` is called, on a row of its own."""
    return _engine().TimelineFlight(name, category, size_bytes)


def now_ns() -> int:
    """Where a span may begin; 0 if nothing is being recorded."""
    return int(_engine().timeline_now_ns()) if _recording is not None else 0


def record_since(start_ns: int, name: str, category: str) -> None:
    """A span from `now_ns()` of then until now."""
    if start_ns and _recording is not None:
        _engine().timeline_record(name, category, start_ns)


class _Recording:
    """What must be undone when a recording ends."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._step_start_ns = 0
        self._hooks = (
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        )
        atexit.register(_stop_at_exit)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        atexit.unregister(_stop_at_exit)
        left_out = int(_engine().timeline_stop())
        if left_out:
            warnings.warn(
                f"timeline {self.path}: {left_out} events at the end were left out; record fewer steps",
                stacklevel=3,
            )

    def _before_step(self, *_call: object) -> None:
        self._step_start_ns = now_ns()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_call: object) -> None:
        record_since(self._step_start_ns, f"{type(optimizer).__name__} step", "compute")


def _stop_at_exit() -> None:
    try:
        stop()
    except UsageError as error:
        print(f"baguarun: {error}", flush=True)


@functools.cache
def _engine() -> Any:
    return load_extension()
