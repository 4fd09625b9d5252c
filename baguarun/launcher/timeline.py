"""`--timeline FILE`: every worker records into its own file; the agent joins those of its node at the end.

One node: FILE. Several: each node writes FILE with its node rank before the suffix, `out.node1.json`, since
FILE may lie on a disk that they share; one viewer can open them together. A node that joined a job resized in
place has started no worker with a rank: its name stands there, `out.node-NAME.json`. A job that restarts its
workers shows all generations in one file, one after the other.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import tempfile
from collections.abc import Iterable, Iterator

from baguarun.contract import WorkerEnv
from baguarun.errors import UsageError
from baguarun.launcher.settings import RunSettings

_HEAD_END = '"traceEvents":['
_TAIL = "]}"
_HEAD = '{"displayTimeUnit":"ms","otherData":{"ts counts from":"2026-01-01T00:00:00Z"},' + _HEAD_END
"""As cpp_ext/engine/timeline_file.cc begins its files: one line, then an event per line."""


def check(settings: RunSettings) -> None:
    """Raise `UsageError` if the file cannot be written on this node."""
    if settings.timeline is None:
        return
    path = os.path.abspath(settings.timeline)
    if not settings.timeline or os.path.isdir(path):
        raise UsageError(f"--timeline={settings.timeline}: found a folder; want the name of a file")
    try:
        # The workers' files lie beside it, and a full disk shows only in a write.
        with tempfile.NamedTemporaryFile(dir=os.path.dirname(path), prefix=".baguarun-timeline-") as trial:
            trial.write(b" " * 4096)
            trial.flush()
    except OSError as error:
        raise UsageError(
            f"--timeline={settings.timeline}: {error.strerror}; want a file in a folder that can be written"
        ) from error


class TimelineMerge:
    """Knows which files the workers of this node write. Threads: the agent's event loop."""

    def __init__(self, settings: RunSettings) -> None:
        self.path = "" if settings.timeline is None else os.path.abspath(settings.timeline)
        """What workers are told; absolute, as they may change their folder."""
        self._node = f"-{settings.node_name}" if settings.max_nodes > 1 else ""
        """What names the file of this node among several: its rank, once it has had one."""
        self._parts: list[str] = []

    def expect(self, env: WorkerEnv) -> None:
        """A worker is about to start; what an earlier job left in its place goes."""
        if not self.path:
            return
        # A newcomer is started for no World, and its node may never have had a rank in one.
        if self._node and env.generation:
            self._node = str(env.node_rank)
        if env.timeline_part not in self._parts:
            self._parts.append(env.timeline_part)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(env.timeline_part)

    def finish(self) -> list[str]:
        """Join the files of the workers, all of which have ended; returns lines for the user."""
        if not self._parts:
            return []
        parts = [part for part in self._parts if os.path.exists(part)]
        self._parts = []
        if not parts:
            return [
                "no worker recorded a timeline; want a script that wraps its model with "
                "baguarun.DistributedDataParallel"
            ]
        try:
            merge(parts, self._target())
        except OSError as error:
            return [
                f"timeline {self._target()}: {error.strerror}; the workers' files are kept: {parts[0]} ..."
            ]
        for part in parts:
            with contextlib.suppress(OSError):
                os.unlink(part)
        return [f"timeline of {len(parts)} workers: {self._target()} (open it at https://ui.perfetto.dev)"]

    def _target(self) -> str:
        if not self._node:
            return self.path
        stem, suffix = os.path.splitext(self.path)
        return f"{stem}.node{self._node}{suffix}"


def merge(parts: Iterable[str], target: str) -> None:
    """Write the events of all `parts` into `target`, which is valid JSON and appears at once.

    A part may end in the middle of a line: its worker was killed while it wrote.
    """
    unfinished = f"{target}.{secrets.token_hex(4)}.part"
    try:
        with open(unfinished, "w", encoding="utf-8") as out:
            out.write(_HEAD)
            separator = "\n"
            for part in parts:
                for event in _events(part):
                    out.write(separator + event)
                    separator = ",\n"
            out.write(f"\n{_TAIL}\n")
        os.replace(unfinished, target)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise


def _events(part: str) -> Iterator[str]:
    """The lines with events. The last one alone may be cut."""
    before = ""
    with open(part, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            event = line.strip().removesuffix(",")
            if event.endswith(_HEAD_END) or event == _TAIL:
                continue
            if before:
                yield before
            before = event
    if before and _is_whole(before):
        yield before


def _is_whole(event: str) -> bool:
    try:
        json.loads(event)
    except ValueError:
        return False
    return True
