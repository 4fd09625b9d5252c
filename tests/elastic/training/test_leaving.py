"""Jobs that are told to go, as a whole: real agents, a real store and workers that train."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.command_line import BAGUARUN, environment, start_agent
from tests.support.etcd_servers import EtcdServer, running, wheel_binary

BOUND_S = 60.0
EPOCHS = 2
ALL_SAMPLES = [(epoch, name) for epoch in range(EPOCHS) for name in range(62)]

SCRIPT = """
import json, os, resource, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
import baguarun
from baguarun.elastic import Checkpoints, State
from tests.elastic.training.programs import make_loader, make_model, make_state

folder = Path(sys.argv[1])
torch.set_num_threads(1)
baguarun.init_process_group()
kept = folder / "kept" if (folder / "checkpoints").exists() else None
every_steps = int(os.environ.get("EVERY_STEPS", 1000))
state = make_state(kept, every_steps=every_steps, keep=1, normalise=nn.LayerNorm)
log = open(folder / f"{os.environ['LIFE']}-{os.getpid()}.log", "a", buffering=1)

@baguarun.elastic.run
def train(state, loader):
    while state.epoch < EPOCHS:
        for micro_batches in state.steps(loader):
            state.optimizer.zero_grad()
            given = []
            for inputs, wanted, names in micro_batches:
                nn.functional.mse_loss(state.model(inputs), wanted).backward()
                given += [(state.epoch, name) for name in names.tolist()]
            state.optimizer.step()
            state.commit()
            if (folder / "full").exists():
                resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
            # What stands behind a commit is kept as well.
            state.scheduler.step()
            state.seen = [state.committed_steps]
            log.write(json.dumps([state.committed_steps, given]) + "\\n")
            if (folder / "hold").exists():
                log.write("[]\\n")
            while (folder / "hold").exists():
                time.sleep(0.01)
            time.sleep(float(os.environ.get("STEP_S", 0)))
        state.epoch += 1

train(state, make_loader(2))
assert state.seen == [state.committed_steps] and state.scheduler.last_epoch == state.committed_steps
(folder / "result").write_text(json.dumps([p.tolist() for p in state.model.parameters()]))
dist.barrier()
"""


class Job:
    """Agents of one job on this machine, in one life after the other."""

    def __init__(self, folder: Path, store: EtcdServer, nnodes: str = "1", *options: str) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self._script = folder / "train.py"
        self._script.write_text(SCRIPT.replace("EPOCHS", str(EPOCHS)))
        self._words = ["--elastic", "in-place", "--nnodes", nnodes, "--store", str(store.url)]
        self._words += ["--job-id", "j", "--detect-timeout", "1", "--shutdown-timeout", "20", *options]
        self._store = store
        self._life = 0
        self.agents: dict[str, subprocess.Popen[str]] = {}

    def start(self, *names: str, step_s: float = 0.05, slots: int = 1) -> None:
        """A life of the job."""
        self._life += 1
        self.agents = {}
        self.join(*names, step_s=step_s, slots=slots)

    def join(self, *names: str, step_s: float = 0.05, slots: int = 1) -> None:
        """More nodes."""
        environ = environment(self.folder, OMP_NUM_THREADS="1", LIFE=str(self._life), STEP_S=str(step_s))
        for name in names:
            words = [*self._words, "--node-name", name, "--nproc-per-node", str(slots)]
            out = self.folder / f"{self._life}-{name}.out"
            self.agents[name] = start_agent(out, environ, *words, str(self._script), str(self.folder))

    def tell(self, signum: int, *names: str) -> None:
        for name in names:
            self.agents[name].send_signal(signum)

    def stop(self, *options: str) -> None:
        words = [*BAGUARUN, "stop", "j", "--store", str(self._store.url), *options]
        subprocess.run(words, env=environment(), check=True, timeout=BOUND_S)

    def wait(self) -> set[int]:
        """What agents ended with."""
        return {agent.wait(BOUND_S) for agent in self.agents.values()}

    def output(self) -> str:
        return "\n".join(f"-- {path.name}\n{path.read_text()}" for path in self.folder.glob("*.out"))

    def steps(self, life: int | None = None) -> list[int]:
        """Steps that some worker of that life, or of any, has committed."""
        lines = self._lines(life or self._life)
        return sorted({line[0] for line in lines if line})

    def samples(self) -> list[tuple[int, int]]:
        """All that were trained on, by all lives."""
        lines = [line for life in range(1, self._life + 1) for line in self._lines(life)]
        return sorted(tuple(sample) for line in lines if line for sample in line[1])

    def is_held(self, workers: int) -> bool:
        return sum(line == [] for line in self._lines(self._life)) >= workers

    def _lines(self, life: int) -> list[list]:
        found = []
        for path in self.folder.glob(f"{life}-*.log"):
            found += [json.loads(line) for line in path.read_text().splitlines() if line.endswith("]")]
        return found

    def until(self, condition: Callable[[], bool]) -> None:
        give_up_s = time.monotonic() + BOUND_S
        while not condition():
            assert time.monotonic() < give_up_s, self.output()
            time.sleep(0.02)

    def kept(self) -> list[int]:
        """Steps of the checkpoints that are there."""
        return sorted(int(path.name.removeprefix("step-")) for path in self.folder.glob("kept/step-*"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[EtcdServer]:
    with running(EtcdServer(tmp_path / "etcd", wheel_binary("etcd"))) as server:
        yield server


@pytest.fixture
def job(tmp_path: Path, store: EtcdServer) -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def make(nnodes: str = "1", *options: str, checkpoints: bool = True) -> Job:
        made.append(Job(tmp_path / "job", store, nnodes, *options))
        if checkpoints:
            (made[-1].folder / "checkpoints").touch()
        return made[-1]

    yield make
    for one in made:
        for agent in one.agents.values():
            agent.kill()
            agent.wait()
        print(one.output())


def goes_on_from_the_commit(job: Job, *names: str, slots: int = 1) -> None:
    """The job was left at a checkpoint of its last commit: another life does the rest, and nothing twice."""
    done = job.steps()
    assert job.kept() == [done[-1]], job.output()
    job.start(*names, step_s=0.0, slots=slots)
    assert job.wait() == {0}, job.output()
    assert job.steps()[0] == done[-1] + 1
    assert done + job.steps() == list(range(1, job.steps()[-1] + 1))
    assert job.samples() == ALL_SAMPLES


@pytest.mark.parametrize(
    ("signum", "every_steps"),
    [
        (signal.SIGTERM, 1000),
        (signal.SIGINT, 1000),
        pytest.param(signal.SIGTERM, 1, id="at a commit that has a checkpoint of its own"),
    ],
)
def test_a_job_of_one_node_is_left_at_a_commit_and_gone_on_with_there(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, signum: int, every_steps: int
) -> None:
    monkeypatch.setenv("EVERY_STEPS", str(every_steps))
    one = job()
    one.start("a", slots=2)
    one.until(lambda: len(one.steps()) >= 3)
    one.tell(signum, "a")
    assert one.wait() == {128 + signum}
    goes_on_from_the_commit(one, "a", slots=2)


def test_a_job_is_stopped_at_a_commit_and_gone_on_with_there(job: Callable[..., Job]) -> None:
    two = job("2")
    # Long enough for a command that has to start first.
    two.start("a", "b", step_s=0.5)
    two.until(lambda: len(two.steps()) >= 3)
    two.stop()
    assert two.wait() == {128 + signal.SIGTERM}
    goes_on_from_the_commit(two, "a", "b")


@pytest.mark.parametrize(("nnodes", "pause_s"), [("1:2", 0.0), ("1:2", 0.3), ("2", 0.03)])
def test_a_job_all_of_whose_nodes_are_told_is_left_at_a_commit(
    job: Callable[..., Job], nnodes: str, pause_s: float
) -> None:
    two = job(nnodes)
    two.start("a", "b")
    two.until(lambda: len(two.steps()) >= 3)
    two.tell(signal.SIGTERM, "a")
    time.sleep(pause_s)
    two.tell(signal.SIGTERM, "b")
    assert two.wait() == {128 + signal.SIGTERM}
    goes_on_from_the_commit(two, "a", "b")


def test_where_too_few_are_left_they_wait_at_the_commit_of_the_leave(job: Callable[..., Job]) -> None:
    two = job("2")
    two.start("a", "b")
    two.until(lambda: len(two.steps()) >= 3)
    two.tell(signal.SIGTERM, "a")
    assert two.agents["a"].wait(BOUND_S) == 128 + signal.SIGTERM
    left_at = two.steps()[-1]
    assert two.kept() == [left_at]
    two.until(lambda: "1 of 2 nodes are here" in two.output())
    assert two.steps()[-1] == left_at and two.agents["b"].poll() is None
    told_s = time.monotonic()
    two.tell(signal.SIGTERM, "b")
    assert two.agents["b"].wait(BOUND_S) == 128 + signal.SIGTERM
    assert time.monotonic() - told_s < 12.0, two.output()
    goes_on_from_the_commit(two, "a", "b")


def test_those_who_wait_at_a_commit_go_on_from_it_with_who_comes(job: Callable[..., Job]) -> None:
    two = job("2")
    two.start("a", "b")
    two.until(lambda: len(two.steps()) >= 3)
    two.tell(signal.SIGTERM, "a")
    assert two.agents.pop("a").wait(BOUND_S) == 128 + signal.SIGTERM
    left_at = two.steps()[-1]
    two.join("c")
    assert two.wait() == {0}, two.output()
    assert two.kept() == [left_at]
    assert two.steps() == list(range(1, two.steps()[-1] + 1))
    assert two.samples() == ALL_SAMPLES
    assert "2 nodes, 2 workers" in two.output() and "starting all anew" not in two.output()


def test_a_second_signal_stops_at_once(job: Callable[..., Job]) -> None:
    one = job()
    (one.folder / "hold").touch()
    one.start("a")
    one.until(lambda: one.is_held(1))
    one.tell(signal.SIGINT, "a")
    one.until(lambda: "leaving after the present step" in one.output())
    told_s = time.monotonic()
    one.tell(signal.SIGINT, "a")
    assert one.wait() == {128 + signal.SIGINT}
    assert time.monotonic() - told_s < 12.0
    assert one.kept() == []


@pytest.mark.parametrize("by", ["signal", "stop"])
def test_workers_that_come_to_no_commit_are_stopped_in_the_end(job: Callable[..., Job], by: str) -> None:
    one = job("1", "--shutdown-timeout", "3")
    (one.folder / "hold").touch()
    one.start("a", slots=2)
    one.until(lambda: one.is_held(2))
    told_s = time.monotonic()
    if by == "stop":
        one.stop()
    else:
        one.tell(signal.SIGTERM, "a")
    assert one.wait() == {128 + signal.SIGTERM}
    assert time.monotonic() - told_s > 2.0
    assert "waiting for rank 0, 1 to come to a commit and end, for 2 s in all" in one.output()
    assert one.kept() == []


def test_without_a_checkpoints_folder_the_step_is_finished(job: Callable[..., Job]) -> None:
    one = job(checkpoints=False)
    one.start("a", slots=2)
    one.until(lambda: len(one.steps()) >= 3)
    one.tell(signal.SIGTERM, "a")
    assert one.wait() == {128 + signal.SIGTERM}
    assert "stopping the workers" not in one.output(), one.output()


def test_a_checkpoint_that_cannot_be_written_holds_nobody_up(job: Callable[..., Job]) -> None:
    one = job()
    (one.folder / "full").touch()
    one.start("a", slots=2)
    one.until(lambda: len(one.steps()) >= 3)
    told_s = time.monotonic()
    one.tell(signal.SIGTERM, "a")
    assert one.wait() == {128 + signal.SIGTERM}
    assert time.monotonic() - told_s < 12.0
    assert "no checkpoint of the last commit: " in one.output(), one.output()
    assert one.kept() == []


def test_a_store_that_is_away_does_not_keep_a_job_from_ending(
    job: Callable[..., Job], store: EtcdServer
) -> None:
    one = job("1", "--shutdown-timeout", "3")
    one.start("a")
    one.until(lambda: len(one.steps()) >= 3)
    store.freeze()
    one.tell(signal.SIGTERM, "a")
    assert one.wait() == {128 + signal.SIGTERM}
    assert ", for 2 s in all; after that the workers are stopped" in one.output()
    store.thaw()
