"""One distributed job on hosts of a lab, and the etcd that its nodes meet in."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.lab.host import Host
from tests.lab.steps import Step, StepLog

REPOSITORY = Path(__file__).resolve().parents[2]
ETCD_PORT = 2379


def baguarun_command() -> list[str]:
    """How to call `baguarun`: the installed script, or the package of this checkout."""
    installed = Path(sys.executable).with_name("baguarun")
    if installed.exists():
        return [str(installed)]
    return [sys.executable, "-c", "import sys; from baguarun.cli.main import main; sys.exit(main())"]


def torchrun_command() -> list[str]:
    """How to call the torchrun of this Python's torch."""
    return [str(Path(sys.executable).with_name("torchrun"))]


class Etcd:
    """An etcd on a host of the lab, which can be killed and started again on its data."""

    def __init__(self, host: Host, data_dir: Path) -> None:
        self.host = host
        self.url = f"etcd://{host.address}:{ETCD_PORT}"
        self._data_dir = data_dir
        self._process: subprocess.Popen[Any] | None = None

    def start(self) -> None:
        program = os.environ.get("BAGUARUN_ETCD") or shutil.which("etcd")
        if program is None:
            raise FileNotFoundError("no etcd: apt-get install etcd-server, or set BAGUARUN_ETCD")
        url = f"http://{self.host.address}:{ETCD_PORT}"
        self._process = self.host.popen(
            [
                *(program, "--data-dir", str(self._data_dir), "--log-level", "error"),
                *("--listen-client-urls", url, "--advertise-client-urls", url),
                *("--listen-peer-urls", "http://127.0.0.1:2380"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(10)


class Job:
    """Agents on hosts of a lab, all running `step_worker.py`; its `with` block crashes the hosts it used."""

    def __init__(self, scratch: Path, command: Callable[[Host], Sequence[str]]) -> None:
        """`command` is the whole command line of the agent on one host."""
        scratch.mkdir(parents=True, exist_ok=True)
        self.folder = scratch
        self.steps = StepLog(scratch / "steps.jsonl")
        self.agents: dict[str, subprocess.Popen[Any]] = {}
        self._command = command
        self.hosts: list[Host] = []
        """Where agents were started."""

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exc: object) -> None:
        for host in self.hosts:
            host.crash()

    def start(self, *hosts: Host, env: Mapping[str, str] | None = None) -> None:
        """Start the agents of `hosts`; `env` is added to the environment."""
        for host in hosts:
            self.hosts.append(host)
            with self._log_path(host.name).open("ab") as output:
                self.agents[host.name] = host.popen(
                    self._command(host),
                    env={**os.environ, **self._environment(host), **(env or {})},
                    cwd=REPOSITORY,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )

    def wait_for_world(self, world_size: int, timeout_s: float, since: float = 0.0, settled: int = 5) -> Step:
        """Some steps (`settled`) into a World of that size after `since`; raises with the agents' output."""
        found = self.steps.wait_for(
            lambda step: step.world_size == world_size and step.step >= settled,
            timeout_s,
            since=since,
            alive=self.alive,
        )
        if found is None:
            raise AssertionError(f"no World of {world_size} within {timeout_s:.0f} s\n{self.logs()}")
        return found

    def wait_for_exit(self, host: Host, timeout_s: float) -> int:
        """Exit code of the agent on `host`; raises with the agents' output when it stays."""
        try:
            code: int = self.agents[host.name].wait(timeout_s)
        except subprocess.TimeoutExpired as late:
            raise AssertionError(f"{host.name} still runs after {timeout_s:.0f} s\n{self.logs()}") from late
        return code

    def alive(self) -> bool:
        return any(agent.poll() is None for agent in self.agents.values())

    def worker(self, host: Host) -> Step:
        """The latest step of the worker on `host`."""
        return [step for step in self.steps.all() if step.node == host.name][-1]

    def kill_worker(self, host: Host) -> None:
        os.kill(self.worker(host).pid, signal.SIGKILL)

    def terminate(self, host: Host) -> None:
        """Ask the agent to leave (SIGTERM), as a batch system does before it takes a node away."""
        self.agents[host.name].send_signal(signal.SIGTERM)

    def output(self, host: Host) -> str:
        """All that the agent on `host` has printed so far."""
        return self._log_path(host.name).read_text(errors="replace")

    def logs(self, tail_chars: int = 3000) -> str:
        """The ends of all agents' outputs, for error messages."""
        paths = [self._log_path(name) for name in self.agents]
        return "\n".join(
            f"--- {path.stem}\n{path.read_text(errors='replace')[-tail_chars:]}" for path in paths
        )

    def _log_path(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _environment(self, host: Host) -> dict[str, str]:
        return {
            "STEP_LOG": str(self.steps.path),
            "GLOO_SOCKET_IFNAME": host.nic,
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "PYTHONPATH": str(REPOSITORY),
        }
