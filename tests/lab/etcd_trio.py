"""A cluster of three etcd on one host of a lab, whose leader can be killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.lab.host import Host

_CLIENT_PORTS = (2379, 2381, 2383)
_START_S = 30.0


class EtcdTrio:
    """Elections take half a second to a second. What is killed can be started again on its data."""

    def __init__(self, host: Host, folder: Path) -> None:
        self.host = host
        self._folder = folder
        self._processes: dict[int, subprocess.Popen[Any]] = {}
        self.url = "etcd://" + ",".join(f"{host.address}:{port}" for port in _CLIENT_PORTS)

    def start(self) -> None:
        """All that do not run; returns when each has a leader."""
        for port in _CLIENT_PORTS:
            if port not in self._processes:
                self._processes[port] = self.host.popen(
                    self._command(port), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
        give_up_s = time.monotonic() + _START_S
        while self.leader() is None and time.monotonic() < give_up_s:
            time.sleep(0.1)

    def kill_leader(self) -> None:
        """SIGKILL; the two that are left elect another one."""
        leader = self.leader()
        assert leader is not None
        process = self._processes.pop(leader)
        process.kill()
        process.wait(10)

    def leader(self) -> int | None:
        """Client port of the member that leads."""
        for port in self._processes:
            with contextlib.suppress(subprocess.CalledProcessError, subprocess.TimeoutExpired):
                url = f"http://{self.host.address}:{port}/metrics"
                found = self.host.run(["curl", "-sf", "-m", "2", url], timeout_s=5)
                if "etcd_server_is_leader 1" in found.stdout:
                    return port
        return None

    def _command(self, port: int) -> list[str]:
        program = os.environ.get("BAGUARUN_ETCD") or shutil.which("etcd")
        if program is None:
            raise FileNotFoundError("no etcd: apt-get install etcd-server, or set BAGUARUN_ETCD")
        client = f"http://{self.host.address}:{port}"
        peers = ",".join(f"m{each}=http://127.0.0.1:{each + 1}" for each in _CLIENT_PORTS)
        peer = f"http://127.0.0.1:{port + 1}"
        return [
            *(program, "--name", f"m{port}", "--data-dir", str(self._folder / f"m{port}")),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", peers, "--heartbeat-interval", "50", "--election-timeout", "500"),
            *("--log-level", "error"),
        ]
