"""The agent from the outside: the real command line, signals, last words and what is left behind."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from baguarun.contract import World
from baguarun.errors import UsageError
from baguarun.launcher.agent import describe
from tests.support.command_line import BAGUARUN, environment
from tests.support.etcd_servers import EtcdServer, free_port, wheel_binary
from tests.support.etcd_servers import running as running_etcd

BOUND_S = 120.0


class Agent:
    """One `baguarun run` in a folder and a temporary folder of its own."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.temporary = folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            [*BAGUARUN, "run", "--node-name", "here", *words],
            cwd=folder,
            env=environment(self.temporary, PYTHONUNBUFFERED="1"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._text: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._text.append(line)

    @property
    def output(self) -> str:
        return "".join(self._text)

    def wait_for(self, text: str, times: int = 1) -> None:
        give_up_s = time.monotonic() + BOUND_S
        while self.output.count(text) < times:
            assert time.monotonic() < give_up_s and self.process.poll() is None, self.output
            time.sleep(0.02)

    def end(self) -> int:
        code = self.process.wait(BOUND_S)
        self._reader.join(BOUND_S)
        return code

    def child(self, name: str) -> psutil.Process:
        give_up_s = time.monotonic() + BOUND_S
        while time.monotonic() < give_up_s:
            for child in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if child.name() == name:
                        return child
            time.sleep(0.02)
        raise AssertionError(f"no child is called {name}: {self.output}")


@contextlib.contextmanager
def running(folder: Path, *words: str) -> Iterator[Agent]:
    agent = Agent(folder, *words)
    try:
        yield agent
    finally:
        agent.process.kill()
        agent.process.wait()


def script(folder: Path, text: str) -> str:
    (folder / "train.py").write_text("import os, pathlib, signal, sys, time\n" + text)
    return "train.py"


UNTIL_TOLD = """\
print("at work")
while not pathlib.Path("go").exists(): time.sleep(0.02)
"""
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


def test_a_job_outlives_its_private_etcd(tmp_path: Path) -> None:
    with running(tmp_path, "--nproc-per-node", "2", script(tmp_path, UNTIL_TOLD)) as agent:
        agent.wait_for("at work", times=2)
        for _ in range(3):
            etcd = agent.child("etcd")
            etcd.kill()
            psutil.wait_procs([etcd], BOUND_S)
        agent.wait_for("private etcd was killed by signal 9; starting it again")
        (tmp_path / "go").touch()
        assert agent.end() == 0, agent.output
    assert "fork" not in agent.output, "gRPC has nothing to say about it"
    assert list(agent.temporary.iterdir()) == []


def test_workers_may_save_when_the_store_shuts_their_agent_out(tmp_path: Path) -> None:
    body = (
        "def save(signum, frame):\n"
        "    print('saved', flush=True)\n"
        "    sys.exit(0)\n"
        "if os.environ['RANK'] == '1': signal.signal(signal.SIGTERM, save)\n"
        f"{UNTIL_TOLD}"
        "if os.environ['RANK'] == '0': sys.exit(7)\n"
        "time.sleep(1000)\n"
    )
    with (
        running_etcd(EtcdServer(tmp_path / "etcd", wheel_binary("etcd"))) as etcd,
        running(tmp_path, "--nproc-per-node", "2", "--store", str(etcd.url), script(tmp_path, body)) as agent,
    ):
        agent.wait_for("at work", times=2)
        for command in ("user add root:pw", "role add root", "user grant-role root root", "auth enable"):
            etcd.etcdctl(*command.split())
        # What the agent has to tell of this failure is refused.
        (tmp_path / "go").touch()
        assert agent.end() == UsageError.exit_code, agent.output
    assert "user name is empty" in agent.output
    assert "saved" in agent.output


def test_a_job_without_its_private_etcd_leaves_at_once_when_told(tmp_path: Path) -> None:
    options = ("--nnodes", "1:2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "j")
    host_options = (*options, "--rdzv-conf", "is_host=1")
    (tmp_path / "host").mkdir()
    (tmp_path / "guest").mkdir()
    with (
        running(tmp_path / "host", *host_options, script(tmp_path / "host", UNTIL_TOLD)) as host,
        running(
            tmp_path / "guest",
            *options,
            "--rdzv-conf",
            "is_host=0",
            script(tmp_path / "guest", UNTIL_TOLD),
        ) as guest,
    ):
        host.wait_for("2 workers; this is node")
        guest.wait_for("at work")
        etcd = host.child("etcd")
        host.process.kill()
        host.process.wait()
        psutil.wait_procs([etcd], BOUND_S)
        guest.process.terminate()
        assert guest.end() == 128 + signal.SIGTERM, guest.output
    assert "Traceback" not in guest.output


def test_an_agent_that_waits_for_the_meeting_place_can_be_interrupted(tmp_path: Path) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    options = ("--nnodes", "2", "--rdzv-endpoint", endpoint, "--rdzv-id", "j", "--rdzv-conf", "is_host=0")
    with running(tmp_path, *options, script(tmp_path, "")) as agent:
        agent.wait_for(f"waiting for the node that serves {endpoint}")
        agent.process.send_signal(signal.SIGINT)
        assert agent.end() == 130, agent.output
    assert "SIGINT: leaving before the job has begun" in agent.output
    assert "Traceback" not in agent.output


def test_an_agent_that_was_started_by_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with running(tmp_path, script(tmp_path, UNTIL_TOLD)) as agent:
            agent.wait_for("at work")
            agent.process.send_signal(signal.SIGHUP)
            (tmp_path / "go").touch()
            assert agent.end() == 0, agent.output
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("static", [False, True])
def test_a_signal_ends_the_wait_for_stubborn_workers_of_a_job_that_failed(
    tmp_path: Path, static: bool
) -> None:
    options = ["--nproc-per-node", "2", "--shutdown-timeout", "1000"]
    if static:
        options += ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--nnodes", "1"]
    body = STUBBORN + (
        "if os.environ['RANK'] == '1':\n"
        "    while not pathlib.Path('ready').exists(): time.sleep(0.02)\n"
        "    sys.exit(7)\n"
        "pathlib.Path('ready').touch()\n"
        "time.sleep(1000)\n"
    )
    with running(tmp_path, *options, script(tmp_path, body)) as agent:
        agent.wait_for("they have 1000 s to save their work")
        agent.process.send_signal(signal.SIGINT)
        assert agent.end() == 7, agent.output


def test_the_last_words_are_said_once(tmp_path: Path) -> None:
    with running(tmp_path, "--max-restarts", "1", script(tmp_path, "sys.exit('no data')")) as agent:
        assert agent.end() == 1
    failures = [line for line in agent.output.splitlines() if "exited with code 1" in line]
    assert len(failures) == 3, "each when it happens, and the last once more in the report"
    assert "baguarun: generation 2: restart 1 of 1\n" in agent.output
    assert "failed after 1 of 1 restarts. The first failure in the cluster:" in agent.output
    assert agent.output.rstrip().endswith("error: no data")


def test_a_killed_agents_temporary_files_are_removed_by_the_next(tmp_path: Path) -> None:
    name = script(tmp_path, UNTIL_TOLD)
    with running(tmp_path, name) as agent:
        agent.wait_for("at work")
        etcd = agent.child("etcd")
        agent.process.kill()
        agent.process.wait()
        psutil.wait_procs([etcd], BOUND_S)
    assert list(agent.temporary.iterdir())
    (tmp_path / "go").touch()
    with running(tmp_path, name) as agent:
        assert agent.end() == 0
    assert list(agent.temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("num_nodes", "local_world_size", "words"),
    [
        (1, 1, "1 node, 1 worker; this is node 0, rank 0"),
        (1, 3, "1 node, 3 workers; this is node 0, ranks 0 to 2"),
        (2, 1, "2 nodes, 2 workers; this is node 0, rank 0"),
    ],
)
def test_a_world_is_described_in_words(num_nodes: int, local_world_size: int, words: str) -> None:
    world = World(
        job_id="j",
        generation=1,
        node_rank=0,
        num_nodes=num_nodes,
        first_rank=0,
        local_world_size=local_world_size,
        world_size=num_nodes * local_world_size,
        master_addr="127.0.0.1",
        master_port=1,
        restart_count=0,
        max_restarts=0,
    )
    assert describe(world) == words
