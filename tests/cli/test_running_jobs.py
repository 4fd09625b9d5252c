"""`jobs`, `status`, `scale` and `stop` on jobs of real agents that meet in a real etcd."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.command_line import BAGUARUN, environment
from tests.support.etcd_servers import EtcdServer, free_port, running, wheel_binary

BOUND_S = 60.0
WORKER = """\
import signal, sys, time

def save(*_):
    print("saved", flush=True)
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
print("started", flush=True)
time.sleep(1000)
"""


class Site:
    """Agents of jobs, and the commands that look at them, all on this machine."""

    def __init__(self, folder: Path, store: str) -> None:
        self.folder = folder
        self.store = store
        self.environ = environment(folder)
        self._agents: list[subprocess.Popen[bytes]] = []
        (folder / "train.py").write_text(WORKER)

    def start(self, name: str, *options: str) -> subprocess.Popen[bytes]:
        """One agent with two workers, called `name`."""
        command = [*BAGUARUN, "run", "--node-name", name, "--nproc-per-node", "2"]
        with (self.folder / f"{name}.log").open("wb") as log:
            agent = subprocess.Popen(
                [*command, "--detect-timeout", "2", *options, "train.py"],
                cwd=self.folder,
                env=self.environ,
                stdout=log,
                stderr=log,
            )
        self._agents.append(agent)
        return agent

    def start_elastic(self, name: str, nnodes: str = "1:3") -> subprocess.Popen[bytes]:
        return self.start(name, "--nnodes", nnodes, "--store", self.store, "--job-id", "demo")

    def output(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def ask(self, *words: str, store: bool = True) -> subprocess.CompletedProcess[str]:
        where = ["--store", self.store] if store else []
        return subprocess.run(
            [*BAGUARUN, *words, *where],
            cwd=self.folder,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def status(self, job_id: str = "demo", *, store: bool = True) -> dict[str, Any]:
        done = self.ask("status", job_id, "--json", store=store)
        return dict(json.loads(done.stdout)) if done.returncode == 0 else {"state": done.stderr, "nodes": []}

    def until(self, wanted: Callable[[dict[str, Any]], bool], job_id: str = "demo", **how: bool) -> None:
        give_up_s = time.monotonic() + BOUND_S
        while not wanted(found := self.status(job_id, **how)):
            assert time.monotonic() < give_up_s, (
                found,
                [self.output(p.stem) for p in self.folder.glob("*.log")],
            )
            time.sleep(0.1)

    def until_running_on(self, *names: str, also: Sequence[tuple[str, str]] = ()) -> None:
        """Until exactly these nodes run, in any order, and `also` are there in the given states."""
        nodes = sorted([*((name, "running") for name in names), *also])
        self.until(lambda job: sorted((node["name"], node["state"]) for node in job["nodes"]) == nodes)

    def close(self) -> None:
        for agent in self._agents:
            agent.send_signal(signal.SIGINT)
        for agent in self._agents:
            try:
                agent.wait(BOUND_S)
            finally:
                agent.kill()


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with running(EtcdServer(tmp_path_factory.mktemp("etcd"), wheel_binary("etcd"))) as server:
        yield server


@pytest.fixture
def site(tmp_path: Path, etcd: EtcdServer) -> Iterator[Site]:
    made = Site(tmp_path, str(etcd.url))
    yield made
    made.close()


def test_a_job_is_shown_to_whoever_reaches_its_store(site: Site) -> None:
    site.start_elastic("a")
    site.start_elastic("b")
    site.until_running_on("a", "b")
    job = site.status()
    assert (job["state"], job["min_nodes"], job["max_nodes"], job["desired_nodes"]) == ("running", 1, 3, None)
    assert [node["first_rank"] for node in job["nodes"]] == [0, 2]
    assert [node["leads"] for node in job["nodes"]].count(True) == 1
    assert job["world"]["world_size"] == 4 and abs(job["world"]["formed_s"] - time.time()) < BOUND_S
    assert job["events"][-1]["text"].endswith(("nodes are here", "joined"))
    text = site.ask("status", "demo").stdout
    assert text.startswith("job demo: running\n  World ")
    assert "  nodes: 2 here (1 to 3 wanted)\n" in text
    site.environ["BAGUARUN_STORE"] = site.store
    (line,) = [line for line in site.ask("jobs", store=False).stdout.splitlines() if line.startswith("demo")]
    assert line.split()[1:5] == ["running", "2", "4", str(job["world"]["generation"])]
    assert "net_secret" not in json.dumps(job)


def test_scaled_down_the_youngest_goes_politely_and_scaled_up_another_comes(site: Site) -> None:
    agents = {}
    for name in "abc":
        agents[name] = site.start_elastic(name)
        site.until_running_on(*"abc"[: len(agents)])
    done = site.ask("scale", "demo", "2")
    assert done.stdout == "job demo: scaled to 2, nodes here 3; the youngest leave\n", done.stderr
    assert agents["c"].wait(BOUND_S) == 0
    assert "the job is scaled to 2 of at most 3 nodes; c must go: stopping the workers" in site.output("c")
    assert site.output("c").count("saved") == 2
    site.until_running_on("a", "b")
    site.start_elastic("d")
    site.until_running_on("a", "b", also=[("d", "standby")])
    assert site.ask("scale", "demo", "3").returncode == 0
    site.until_running_on("a", "b", "d")
    job = site.status()
    assert (job["desired_nodes"], job["restarts"], job["state"]) == (3, 0, "running")
    refused = site.ask("scale", "demo", "4")
    assert refused.returncode == 2
    assert "scale demo 4: want 1 to 3, the job was started with --nnodes 1:3" in refused.stderr


@pytest.mark.parametrize(("words", "code", "saved"), [([], 143, 2), (["--now"], 137, 0)])
def test_a_stopped_job_ends_on_every_node_with_the_code_of_the_signal(
    site: Site, words: list[str], code: int, saved: int
) -> None:
    agents = [site.start_elastic(name) for name in "ab"]
    site.until_running_on("a", "b")
    give_up_s = time.monotonic() + BOUND_S
    while any(site.output(name).count("started") < 2 for name in "ab"):
        assert time.monotonic() < give_up_s
        time.sleep(0.05)
    before = {name: site.output(name).count("saved") for name in "ab"}
    done = site.ask("stop", "demo", *words)
    assert done.stdout.startswith("job demo: stopped: by `baguarun stop"), done.stderr
    assert [agent.wait(BOUND_S) for agent in agents] == [code, code]
    for name in "ab":
        assert "baguarun: job demo was stopped: by `baguarun stop" in site.output(name)
        assert site.output(name).count("saved") - before[name] == saved
    job = site.status()
    assert (job["state"], job["outcome"]["exit_code"]) == ("stopped", code)
    assert {node["state"] for node in job["nodes"]} == {"gone"}
    again = site.ask("stop", "demo")
    assert (again.returncode, again.stdout) == (0, done.stdout)


def test_a_job_with_a_private_store_is_found_on_its_own_node(site: Site) -> None:
    agent = site.start("a", "--job-id", "alone")
    site.until(lambda job: job["state"] == "running", "alone", store=False)
    assert "alone" in site.ask("jobs", store=False).stdout
    unknown = site.ask("status", "alnoe", store=False)
    assert unknown.returncode == 2
    assert "found no store of it on this machine, only others (alone); did you mean alone?" in unknown.stderr
    stopped = site.ask("stop", "alone", store=False)
    assert stopped.returncode == 0, stopped.stderr
    assert agent.wait(BOUND_S) == 143
    gone = site.ask("jobs", store=False)
    assert gone.returncode == 2
    assert "found no job with a store of its own on this machine; want --store URL" in gone.stderr


def test_a_private_store_that_does_not_answer_hides_no_other_job(site: Site) -> None:
    frozen = site.start("a", "--job-id", "frozen")
    site.start("b", "--job-id", "well")
    for job_id in ("frozen", "well"):
        site.until(lambda job: job["state"] == "running", job_id, store=False)
    (etcd,) = (child for child in psutil.Process(frozen.pid).children() if child.name() == "etcd")
    etcd.suspend()
    try:
        done = site.ask("jobs", store=False)
    finally:
        etcd.resume()
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["JOB", "well"]
    assert "baguarun: job 'frozen': store etcd://" in done.stderr


def test_a_job_at_a_torchrun_endpoint_is_reached_by_the_same_words(site: Site) -> None:
    meet = ["--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    site.start("a", "--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-id", "told", *meet)
    site.until(lambda job: job["state"] == "running", "told", store=False)
    done = site.ask("status", "told", *meet, store=False)
    assert done.stdout.startswith("job told: running"), done.stderr


def test_an_unknown_job_is_answered_with_those_there_are(site: Site) -> None:
    site.start_elastic("a")
    site.until_running_on("a")
    for words in (["status", "dmeo"], ["scale", "dmeo", "1"], ["stop", "dmeo"]):
        done = site.ask(*words)
        assert done.returncode == 2
        assert f"job 'dmeo': {site.store} knows no such job (demo); did you mean demo?" in done.stderr


def test_a_store_that_nobody_serves_is_told_as_by_run(site: Site) -> None:
    site.store = f"etcd://127.0.0.1:{free_port()}"
    ran, asked = site.start_elastic("a"), site.ask("status", "demo")
    assert ran.wait(BOUND_S) == asked.returncode == 1
    error = asked.stderr.removeprefix("baguarun: error: ")
    assert "found nobody listening" in error and error.strip() in site.output("a")
