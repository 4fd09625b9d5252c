"""The few Linux calls that Python lacks: prctl, and the tree of processes out of /proc."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection
from dataclasses import dataclass

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class ProcessInfo:
    """One line of the process table."""

    pid: int
    ppid: int
    group: int
    state: str
    """One letter as in `ps`: R, S, D, T, Z."""
    name: str


def set_child_subreaper() -> None:
    """From now on, orphans below this process become its children instead of init's."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_parent_death_signal(signum: int) -> None:
    """The kernel sends `signum` to this process when the *thread* that forked it ends; kept over exec."""
    _prctl(_PR_SET_PDEATHSIG, signum)


def set_process_name(name: str) -> None:
    """What `ps` and `top` show, at most 15 bytes."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]))


def _prctl(option: int, value: int | ctypes.c_char_p) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    argument = ctypes.c_ulong(value) if isinstance(value, int) else value
    if libc.prctl(option, argument, ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


def process_table() -> dict[int, ProcessInfo]:
    """Every process of this PID namespace that /proc shows; one that ends meanwhile is left out."""
    table = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            info = read_process(int(entry))
            if info is not None:
                table[info.pid] = info
    return table


def read_process(pid: int) -> ProcessInfo | None:
    """One process, or None if it has gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name is in parentheses and may itself hold spaces and parentheses: the last one closes it.
    name = text[text.index("(") + 1 : text.rindex(")")]
    state, ppid, group = text[text.rindex(")") + 1 :].split()[:3]
    return ProcessInfo(pid=pid, ppid=int(ppid), group=int(group), state=state, name=name)


def descendants(
    root: int, table: dict[int, ProcessInfo], spare: Collection[int] = ()
) -> tuple[ProcessInfo, ...]:
    """All processes below `root`, parents first, without those in `spare` and what is below them."""
    children: dict[int, list[ProcessInfo]] = {}
    for info in table.values():
        children.setdefault(info.ppid, []).append(info)
    found: list[ProcessInfo] = []
    frontier = [root]
    while frontier:
        below = [info for pid in frontier for info in children.get(pid, ()) if info.pid not in spare]
        found += below
        frontier = [info.pid for info in below]
    return tuple(found)
