"""One host of a lab: run commands on it, kill, freeze and crash them, cut it off."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tests.lab import filters
from tests.lab.namespaces import inside, is_inside, kill_all, processes, stop_all, system

# No NIC of the lab has it: the bridge floods such frames and every host drops them, silently, as a broken
# path does. A blackhole route would tell the sender at once.
_NOWHERE_MAC = "02:00:00:00:00:00"

# Own host name, and every host of the lab resolvable, as on a real cluster.
_ENTER_SCRIPT = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'

Stream = int | IO[Any] | None


@dataclass(frozen=True)
class Counters:
    """What a NIC has moved since the lab began, both in bytes.

    NICs carry frames of up to 64 KiB, limited ones of nearly 2 ms, whose headers are counted once instead of
    per packet.
    """

    sent_bytes: int
    received_bytes: int

    def __sub__(self, earlier: Counters) -> Counters:
        return Counters(self.sent_bytes - earlier.sent_bytes, self.received_bytes - earlier.received_bytes)


@dataclass(frozen=True)
class Host:
    """One host. Made by `Lab`; its NIC is called `eth0`."""

    name: str
    """Host name inside the lab (`h0`, `h1`…)."""
    address: str
    namespace: str
    bridge_namespace: str
    port: str
    """This host's port on the bridge."""
    hosts_file: Path
    nic: str = "eth0"
    _started: list[subprocess.Popen[Any]] = field(default_factory=list, repr=False, compare=False)

    def popen(
        self,
        argv: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        stdout: Stream = None,
        stderr: Stream = None,
        text: bool = True,
    ) -> subprocess.Popen[Any]:
        """Start a command here, in its own session; the pid is the command's own.

        `env` is the whole environment, None for the caller's.
        """
        process = subprocess.Popen(
            self._entering(argv),
            env=None if env is None else dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            text=text,
            start_new_session=True,
        )
        self._started.append(process)
        # Until it has entered, whatever hits the host would miss it.
        while not is_inside(process.pid, self.namespace) and process.poll() is None:
            time.sleep(0.001)
        return process

    def run(
        self,
        argv: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        timeout_s: float = 60.0,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command here to its end and capture its output; raises CalledProcessError if `check`."""
        return subprocess.run(
            self._entering(argv),
            env=None if env is None else dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=check,
        )

    def kill(self, process: subprocess.Popen[Any], number: signal.Signals = signal.SIGKILL) -> None:
        """Signal one process of this host; one that has ended is left alone."""
        process.send_signal(number)

    def pids(self) -> list[int]:
        """All processes of this host, however they were started."""
        return list(processes(self.namespace))

    def freeze(self) -> None:
        """Stop every process of the host (SIGSTOP); the kernel goes on answering for its sockets."""
        stop_all([self.namespace])

    def thaw(self) -> None:
        """Let frozen processes go on."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def crash(self) -> None:
        """Kill every process of the host at once (SIGKILL); peers see their sockets close."""
        kill_all([self.namespace])
        self.reap()

    def power_off(self) -> None:
        """As `crash`, but peers hear nothing: the link goes first. `heal` before using the host again."""
        self.cut()
        self.crash()

    def cut(self) -> None:
        """Drop every frame from and to this host; nobody is told."""
        self._set_port_state("0")

    def cut_tcp_except(self, port: int) -> None:
        """Drop all TCP of this host but that on `port`: what is left to an agent whose store is there."""
        filters.install(self.bridge_namespace, self.port, filters.tcp_except(port))

    def cut_udp_and_tcp(self, port: int) -> None:
        """Drop all UDP of this host, and TCP on `port`: all that an agent says whose store is there."""
        filters.install(self.bridge_namespace, self.port, filters.udp_and_tcp(port))

    def heal(self) -> None:
        """Undo `cut`, `cut_tcp_except` and `cut_udp_and_tcp`."""
        self._set_port_state("3")
        filters.remove(self.bridge_namespace, self.port)

    def cut_from(self, other: Host) -> None:
        """Drop all between this host and `other`, both ways; links to third hosts stay up."""
        for one, two in ((self, other), (other, self)):
            where = ("lladdr", _NOWHERE_MAC, "dev", one.nic, "nud", "permanent")
            one._ip("neigh", "replace", two.address, *where)

    def heal_to(self, other: Host) -> None:
        """Undo `cut_from`."""
        for one, two in ((self, other), (other, self)):
            one._ip("neigh", "del", two.address, "dev", one.nic)

    def counters(self) -> Counters:
        """Bytes on the NIC so far."""
        stats = json.loads(self._ip("-j", "-s", "link", "show", "dev", self.nic))[0]["stats64"]
        return Counters(sent_bytes=stats["tx"]["bytes"], received_bytes=stats["rx"]["bytes"])

    def _entering(self, argv: Sequence[str | os.PathLike[str]]) -> list[str]:
        return [
            *inside(self.namespace),
            *("unshare", "--uts", "--mount", "sh", "-c", _ENTER_SCRIPT, "lab"),
            *(str(self.hosts_file), self.name),
            *(os.fspath(word) for word in argv),
        ]

    def _ip(self, *words: str) -> str:
        return system(*inside(self.namespace), "ip", *words)

    def _set_port_state(self, state: str) -> None:
        system(*inside(self.bridge_namespace), "bridge", "link", "set", "dev", self.port, "state", state)

    def reap(self) -> None:
        """Kill what `popen` started and collect it."""
        for process in self._started:
            process.kill()
            process.wait(10)
