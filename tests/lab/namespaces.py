"""Network namespaces by name: make, enter, list their processes, remove them for good."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

NAMESPACE_DIR = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
TOOLS = ("ip", "tc", "bridge", "nsenter", "unshare", "mount", "hostname")


class LabError(Exception):
    """The lab cannot be built or used here; the message says what is missing."""


def lab_possible() -> str | None:
    """None when a lab can be built on this machine, else the reason why not."""
    if os.geteuid() != 0:
        return "the lab makes network namespaces: run as root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"the lab needs {', '.join(missing)}: apt-get install iproute2 util-linux hostname"
    return None


def system(*argv: str) -> str:
    """Output of a configuration command; raises LabError with its stderr when it fails."""
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode != 0:
        raise LabError(f"{' '.join(argv)}: exit code {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def inside(namespace: str) -> list[str]:
    """Prefix that runs a command in `namespace` and keeps its pid.

    Not `ip netns exec`: that remounts /sys without cgroups.
    """
    return ["nsenter", f"--net={NAMESPACE_DIR / namespace}"]


@contextmanager
def entered(namespace: str) -> Iterator[None]:
    """This thread is in `namespace`, and so are the processes that it starts."""
    with Path("/proc/thread-self/ns/net").open() as own, (NAMESPACE_DIR / namespace).open() as other:
        _enter(other.fileno())
        try:
            yield
        finally:
            _enter(own.fileno())


def _enter(descriptor: int) -> None:
    # os.setns is there from Python 3.12 on.
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        raise LabError(f"cannot enter a network namespace: {os.strerror(ctypes.get_errno())}")


def create(namespace: str) -> None:
    system("ip", "netns", "add", namespace)
    system(*inside(namespace), "ip", "link", "set", "lo", "up")


def names() -> list[str]:
    """Names of all network namespaces of this machine."""
    return sorted(entry.name for entry in NAMESPACE_DIR.iterdir()) if NAMESPACE_DIR.is_dir() else []


def is_inside(pid: int, namespace: str) -> bool:
    """Whether process `pid` lives in `namespace`; a zombie or a process that is gone lives nowhere."""
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino == os.stat(NAMESPACE_DIR / namespace).st_ino
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False


def processes(namespace: str) -> Iterator[int]:
    """Pids of all processes in `namespace`, however they were started, zombies left out."""
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and is_inside(int(entry.name), namespace):
            yield int(entry.name)


def process_state(pid: int) -> str:
    """The kernel's letter for a process (`R`, `S`, `T`, `Z`…), `X` when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "X"
    return stat.rpartition(")")[2].split()[0]


def kill_all(namespaces: Sequence[str], timeout_s: float = 10.0) -> None:
    """Kill every process of the namespaces."""
    _signal_until(namespaces, signal.SIGKILL, lambda pid, signalled: False, timeout_s)


def stop_all(namespaces: Sequence[str], timeout_s: float = 10.0) -> None:
    """SIGSTOP every process of the namespaces and see them all stopped."""

    def stopped(pid: int, signalled: bool) -> bool:
        # A parent in vfork whose child was stopped before its exec sleeps in `D` and cannot run either.
        return process_state(pid) in ("TtD" if signalled else "Tt")

    _signal_until(namespaces, signal.SIGSTOP, stopped, timeout_s)


def _signal_until(
    namespaces: Sequence[str],
    number: signal.Signals,
    obeyed: Callable[[int, bool], bool],
    timeout_s: float,
) -> None:
    """Signal whoever has not `obeyed(pid, signalled before)`, again and again until nobody is left.

    More than one round is needed: a process may fork between two looks.
    """
    deadline = time.monotonic() + timeout_s
    signalled: set[int] = set()
    while True:
        alive = [pid for name in namespaces for pid in processes(name) if process_state(pid) not in "XZ"]
        left = [pid for pid in alive if not obeyed(pid, pid in signalled)]
        if not left:
            return
        if time.monotonic() > deadline:
            raise LabError(f"processes {left} in {', '.join(namespaces)} do not obey {number.name}")
        for pid in left:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
            signalled.add(pid)
        time.sleep(0.005)


def remove(namespaces: Sequence[str]) -> None:
    """Kill all that runs in the namespaces and remove them; those already gone are no error."""
    present = [name for name in namespaces if (NAMESPACE_DIR / name).exists()]
    kill_all(present)
    for name in present:
        try:
            system("ip", "netns", "delete", name)
        except LabError:
            # Somebody else may remove what a dead owner has left.
            if (NAMESPACE_DIR / name).exists():
                raise
