"""Jobs resized in place, from the outside: the real command line and etcd, workers that only talk."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from baguarun.elastic.membership.etcd import EtcdStore
from baguarun.elastic.membership.keys import JobKeys
from baguarun.elastic.membership.records import NodeRecord
from baguarun.errors import NO_PROGRESS_EXIT_CODE
from tests.support import fake_worker
from tests.support.command_line import BAGUARUN, environment, start_agent
from tests.support.etcd_servers import EtcdServer, running, wheel_binary

T = TypeVar("T")
BOUND_S = 60.0


class Job:
    """Nodes of one job on this machine, each an agent of its own."""

    def __init__(self, folder: Path, store: EtcdServer, nnodes: str, *options: str) -> None:
        self.notes = folder / "notes"
        self.notes.mkdir()
        self._folder, self._store = folder, store
        self._words = ["--elastic", "in-place", "--nnodes", nnodes, "--store", str(store.url)]
        self._words += ["--job-id", "j", "--detect-timeout", "2", "--shutdown-timeout", "5", *options]
        self.agents: dict[str, subprocess.Popen[str]] = {}

    def start(self, *names: str, slots: int = 1) -> None:
        for name in names:
            words = [*self._words, "--node-name", name, "--nproc-per-node", str(slots)]
            environ = environment(self._folder, PYTHONUNBUFFERED="1", NODE=name)
            out = self._folder / f"{name}.out"
            script = (fake_worker.__file__, str(self.notes))
            self.agents[name] = start_agent(out, environ, *words, *script)

    def scale(self, num_nodes: int) -> None:
        words = ["scale", "j", str(num_nodes), "--store", self._words[self._words.index("--store") + 1]]
        subprocess.run([*BAGUARUN, *words], env=environment(), check=True, timeout=BOUND_S)

    def node_of(self, pid: int) -> str:
        """Name of the node whose agent started that worker."""
        keeper = psutil.Process(psutil.Process(pid).ppid())
        return next(name for name, agent in self.agents.items() if agent.pid == keeper.ppid())

    def output(self) -> str:
        return "\n".join(f"-- {name}\n{(self._folder / f'{name}.out').read_text()}" for name in self.agents)

    def workers(self) -> dict[int, list[dict[str, Any]]]:
        """What each worker has noted, by process id, oldest first."""
        found = {}
        for path in self.notes.iterdir():
            if path.name.isdecimal():
                lines = path.read_text().splitlines()
                found[int(path.name)] = [json.loads(line) for line in lines if line.endswith("}")]
        return dict(sorted(found.items(), key=lambda item: item[1][0]["time"] if item[1] else 0.0))

    def until(self, condition: Callable[[dict[int, list[dict[str, Any]]]], T | None]) -> T:
        """The first true result of `condition` on what the workers have noted."""
        give_up_s = time.monotonic() + BOUND_S
        while True:
            result = condition(self.workers())
            if result:
                return result
            assert time.monotonic() < give_up_s, f"{self.output()}\n{self.workers()}"
            time.sleep(0.02)

    def until_world(self, size: int, *, beyond: int = 0) -> dict[int, list[dict[str, Any]]]:
        """All workers of a World of that size and a generation above `beyond`, once they have entered it."""

        def is_there(
            workers: dict[int, list[dict[str, Any]]],
        ) -> dict[int, list[dict[str, Any]]] | None:
            last = {pid: _last(notes, "start", "entered") for pid, notes in workers.items()}
            newest = max((note["generation"] for note in last.values() if note), default=0)
            inside = {pid: note for pid, note in last.items() if note and note["generation"] == newest}
            ranks = sorted(note["rank"] for note in inside.values())
            sizes = {note["world_size"] for note in inside.values()}
            if newest > beyond and ranks == list(range(size)) and sizes == {size}:
                return {pid: workers[pid] for pid in inside}
            return None

        return self.until(is_there)

    def nodes(self) -> dict[str, NodeRecord]:
        """What the agents that are registered have told, by name."""

        async def read() -> list[NodeRecord]:
            store = await EtcdStore.open(self._store.url)
            try:
                found = await store.list(JobKeys("j").nodes)
            finally:
                await store.close()
            return [NodeRecord.from_json(entry.value) for entry in found.entries]

        return {record.name: record for record in asyncio.run(read())}

    def arriving(self) -> int:
        """Newcomers that have arrived and are not ready, as their agents have told."""
        return sum(record.state.arriving for record in self.nodes().values())

    def finish(self) -> None:
        (self.notes / "finish").touch()
        for agent in self.agents.values():
            if agent.poll() is None:
                assert agent.wait(BOUND_S) == 0, self.output()


def _last(notes: list[dict[str, Any]], *events: str) -> dict[str, Any] | None:
    return next((note for note in reversed(notes) if note["event"] in events), None)


def _events(notes: list[dict[str, Any]]) -> list[str]:
    return [note["event"] for note in notes]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[EtcdServer]:
    with running(EtcdServer(tmp_path / "etcd", wheel_binary("etcd"))) as server:
        yield server


@pytest.fixture
def job(tmp_path: Path, store: EtcdServer) -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def make(nnodes: str, *options: str) -> Job:
        made.append(Job(tmp_path, store, nnodes, *options))
        return made[-1]

    yield make
    for one in made:
        for agent in one.agents.values():
            agent.kill()
            agent.wait()
        print(one.output())


def test_a_lost_worker_is_left_out_and_its_replacement_taken_in(job: Callable[..., Job]) -> None:
    two = job("2")
    two.start("a", "b")
    first = two.until_world(2)
    victim, survivor = [pid for pid in first if first[pid][0]["rank"] == 1] + [
        pid for pid in first if first[pid][0]["rank"] == 0
    ]
    killed_s = time.time()
    os.kill(victim, signal.SIGKILL)
    alone = two.until_world(1, beyond=1)
    assert list(alone) == [survivor]
    again = two.until_world(2, beyond=2)
    notes = again[survivor]
    told = [event for event in _events(notes) if event.isupper() and "EXPECTS" not in event]
    assert told == ["ABORT", "WORLD", "SWITCH", "WORLD"]
    told_s = next(note["time"] for note in notes if note["event"] == "WORLD") - killed_s
    print(f"from the kill to WORLD at the survivor: {told_s * 1000:.0f} ms")
    (newcomer,) = set(again) - {survivor}
    start = again[newcomer][0]
    assert (start["generation"], start["rank"], start["world_size"], start["port"]) == (0, 0, 1, None)
    assert start["time"] > next(note["time"] for note in notes if note["event"] == "entered")
    two.finish()


def test_a_node_joins_and_leaves_while_the_other_goes_on(job: Callable[..., Job]) -> None:
    one = job("1:2")
    one.start("a")
    (survivor,) = one.until_world(1)
    one.start("b", slots=2)
    three = one.until_world(3)
    assert [three[pid][0]["generation"] for pid in three] == [1, 0, 0]
    one.agents["b"].send_signal(signal.SIGTERM)
    alone = one.until_world(1, beyond=2)
    assert list(alone) == [survivor]
    assert one.agents["b"].wait(BOUND_S) == 128 + signal.SIGTERM, one.output()
    for pid in set(three) - {survivor}:
        assert _events(one.workers()[pid])[-2:] == ["LEAVE", "left"]
    assert "ABORT" not in _events(alone[survivor])
    one.finish()


def test_a_leave_outlasts_a_store_that_is_away_for_longer_than_the_detection_time(
    job: Callable[..., Job], store: EtcdServer
) -> None:
    two = job("1:2", "--shutdown-timeout", "20")
    two.start("a", "b")
    (gone,) = (pid for pid in two.until_world(2) if two.node_of(pid) == "b")
    store.freeze()
    two.agents["b"].send_signal(signal.SIGTERM)
    time.sleep(3.5)
    assert two.agents["b"].poll() is None
    assert "waiting for the" in two.output()
    store.thaw()
    assert two.agents["b"].wait(BOUND_S) == 128 + signal.SIGTERM, two.output()
    assert _events(two.workers()[gone])[-2:] == ["LEAVE", "left"], two.output()
    two.until_world(1, beyond=1)
    two.finish()


@pytest.mark.parametrize("nnodes", ["1", "1:2"])
def test_the_workers_of_a_job_that_ends_are_told_that_it_halts(job: Callable[..., Job], nnodes: str) -> None:
    one = job(nnodes)
    one.start("a", slots=2)
    one.until_world(2)
    one.agents["a"].send_signal(signal.SIGTERM)
    assert one.agents["a"].wait(BOUND_S) == 128 + signal.SIGTERM, one.output()
    for notes in one.workers().values():
        assert _events(notes)[-2:] == ["LEAVE", "left"]
        body = _last(notes, "LEAVE")["body"]
        assert (body["generation"], body["halts"]) == (2, True)


def test_who_waits_for_a_lost_node_leaves_without_waiting_for_it(job: Callable[..., Job]) -> None:
    two = job("2", "--shutdown-timeout", "20")
    two.start("a", "b")
    two.until_world(2)
    two.agents["b"].kill()
    two.until(lambda _: "1 of 2 nodes are here" in two.output())
    told_s = time.monotonic()
    two.agents["a"].send_signal(signal.SIGTERM)
    assert two.agents["a"].wait(BOUND_S) == 128 + signal.SIGTERM, two.output()
    assert time.monotonic() - told_s < 10.0


def test_workers_that_never_enter_the_loop_are_stopped_at_once(job: Callable[..., Job]) -> None:
    one = job("1", "--shutdown-timeout", "20")
    (one.notes / "idle").touch()
    one.start("a")
    one.until(lambda workers: any("idles" in _events(notes) for notes in workers.values()))
    told_s = time.monotonic()
    one.agents["a"].send_signal(signal.SIGTERM)
    assert one.agents["a"].wait(BOUND_S) == 128 + signal.SIGTERM, one.output()
    assert time.monotonic() - told_s < 10.0
    assert "leaving after the present step" not in one.output()


def test_workers_are_told_of_newcomers_that_are_on_their_way(job: Callable[..., Job]) -> None:
    two = job("1:2")
    hold = two.notes / "hold"

    def has_heard(pid: int, *events: str) -> bool:
        return [event for event in _events(two.workers()[pid]) if "EXPECTS" in event] == list(events)

    two.start("a")
    (survivor,) = two.until_world(1)
    hold.touch()
    two.start("b")
    two.until(lambda _: has_heard(survivor, "EXPECTS"))
    two.until(lambda _: two.arriving() == 1)
    hold.unlink()
    (victim,) = set(two.until_world(2)) - {survivor}
    two.until(lambda _: has_heard(survivor, "EXPECTS", "EXPECTS NONE"))
    hold.touch()
    os.kill(victim, signal.SIGKILL)
    two.until(lambda _: has_heard(survivor, "EXPECTS", "EXPECTS NONE", "EXPECTS"))
    hold.unlink()
    two.until_world(2, beyond=3)
    two.until(lambda _: has_heard(survivor, "EXPECTS", "EXPECTS NONE", "EXPECTS", "EXPECTS NONE"))
    assert two.arriving() == 0
    two.finish()


def test_a_node_that_does_not_lead_knows_that_its_world_is_short_of_workers(job: Callable[..., Job]) -> None:
    two = job("2")
    two.start("a")
    two.until(lambda _: "a" in two.nodes())
    two.start("b")
    first = two.until_world(2)
    (victim,) = (pid for pid in first if two.node_of(pid) == "a")
    (survivor,) = set(first) - {victim}
    (two.notes / "hold").touch()
    os.kill(victim, signal.SIGKILL)
    two.until(lambda _: "EXPECTS" in _events(two.workers()[survivor]))
    (two.notes / "hold").unlink()
    two.until_world(2, beyond=2)
    two.until(lambda _: "EXPECTS NONE" in _events(two.workers()[survivor]))
    two.finish()


def test_when_all_workers_die_all_are_started_afresh(job: Callable[..., Job]) -> None:
    two = job("2")
    two.start("a", "b")
    old = two.until_world(2)
    for pid in old:
        os.kill(pid, signal.SIGKILL)
    fresh = two.until(
        lambda workers: {pid: notes for pid, notes in workers.items() if notes and notes[0]["generation"] > 1}
    )
    new = two.until_world(2, beyond=1)
    assert not set(new) & set(old)
    assert {notes[0]["generation"] for notes in fresh.values()} != {0}
    two.finish()


def test_failing_again_and_again_without_progress_ends_the_job(job: Callable[..., Job]) -> None:
    two = job("2")
    (two.notes / "fail").write_text("5")
    two.start("a", "b")
    for agent in two.agents.values():
        assert agent.wait(BOUND_S) == NO_PROGRESS_EXIT_CODE, two.output()
    assert two.output().count("baguarun: no progress: ") == 2
    assert "ValueError: told to fail" in two.output()


def test_newcomers_that_fail_time_after_time_cost_the_others_few_worlds_until_one_does_not(
    job: Callable[..., Job],
) -> None:
    two = job("1:2")
    two.start("a")
    (survivor,) = two.until_world(1)
    (two.notes / "fail-on-b").write_text("1")
    give_up_s = time.monotonic() + BOUND_S / 2
    two.start("b", slots=2)
    two.until(lambda _: "started in 4 s\n" in two.output() or time.monotonic() > give_up_s)
    (two.notes / "fail-on-b").unlink()
    worlds = _events(two.workers()[survivor]).count("entered")
    # The other one of b may have come a moment earlier or later than the first of those that fail.
    assert worlds <= 7, "three newcomers have come and gone"
    for number, pause in (("the newcomer has", "1 s"), ("2 newcomers", "2 s"), ("3 newcomers", "4 s")):
        told = rf"local rank 1: {number}.*no data on this node\); the next is started in {pause}\n"
        assert len(re.findall(told, two.output())) == 1
    assert survivor in two.until_world(3, beyond=worlds)
    assert _events(two.workers()[survivor]).count("entered") <= worlds + 2
    two.finish()


def test_a_newcomer_that_dies_before_it_is_taken_in_is_replaced_on_a_node_without_workers(
    job: Callable[..., Job],
) -> None:
    two = job("1:2")
    two.start("a", "b")
    first = two.until_world(2)
    (victim,) = (pid for pid in first if two.node_of(pid) == "b")
    (two.notes / "hold").touch()
    os.kill(victim, signal.SIGKILL)
    seen = set(first)
    for _ in range(2):
        (newcomer,) = two.until(lambda workers: {pid for pid in workers if workers[pid]} - seen)
        assert two.node_of(newcomer) == "b"
        seen.add(newcomer)
        os.kill(newcomer, signal.SIGKILL)
    (two.notes / "hold").unlink()
    assert not (seen - {*first}) & set(two.until_world(2, beyond=2))
    two.finish()


def test_a_frozen_worker_is_killed_and_replaced(job: Callable[..., Job]) -> None:
    one = job("1")
    one.start("a", slots=2)
    first = one.until_world(2)
    victim = max(first, key=lambda pid: first[pid][0]["rank"])
    one.until(lambda workers: "trains" in _events(workers[victim]))
    os.kill(victim, signal.SIGSTOP)
    again = one.until_world(2, beyond=2)
    assert victim not in again and set(first) & set(again)
    assert re.search(r"has not answered for \d+\.\d s; killing it", one.output())
    one.finish()


def test_workers_end_with_their_agent_and_the_others_go_on(job: Callable[..., Job]) -> None:
    two = job("1:2")
    two.start("a", "b")
    first = two.until_world(2)
    two.agents["b"].kill()
    (survivor,) = two.until_world(1, beyond=1)
    (lost,) = set(first) - {survivor}
    two.until(lambda workers: not os.path.exists(f"/proc/{lost}") and workers)
    del two.agents["b"]
    two.finish()


def test_two_losses_one_after_the_other_leave_the_rest(job: Callable[..., Job]) -> None:
    four = job("2")
    four.start("a", "b", slots=2)
    first = four.until_world(4)
    victims = [pid for pid in first if first[pid][0]["rank"] in (1, 2)]
    os.kill(victims[0], signal.SIGKILL)
    four.until(lambda workers: any("ABORT" in _events(notes) for notes in workers.values()))
    os.kill(victims[1], signal.SIGKILL)
    again = four.until_world(4, beyond=2)
    assert set(first) - set(victims) <= set(again)
    four.finish()


def test_a_job_is_scaled_down_and_up_again_in_place(job: Callable[..., Job]) -> None:
    two = job("1:2")
    two.start("a", "b")
    two.until_world(2)
    two.scale(1)
    (survivor,) = two.until_world(1, beyond=1)
    (gone,) = set(two.agents) - {two.node_of(survivor)}
    assert two.agents.pop(gone).wait(BOUND_S) == 0, two.output()
    two.start("c")
    two.until(lambda workers: "standing by" in two.output() and workers)
    two.scale(2)
    assert survivor in two.until_world(2, beyond=2)
    two.finish()


def test_a_spare_takes_the_place_of_a_lost_worker_at_once(job: Callable[..., Job]) -> None:
    one = job("1", "--spares", "1")
    one.start("a", slots=2)
    first = one.until_world(2)
    (spare,) = one.until(lambda workers: [pid for pid in workers if pid not in first])
    one.until(lambda workers: "waits" in _events(workers[spare]))
    os.kill(max(first), signal.SIGKILL)
    again = one.until_world(2, beyond=1)
    assert set(again) == {min(first), spare}
    assert again[spare][-1]["generation"] == 2, "no World was formed without it"
    one.finish()


def test_a_script_that_never_enters_the_loop_is_told_of_and_ends_well(job: Callable[..., Job]) -> None:
    one = job("1")
    (one.notes / "stay-out").touch()
    one.start("a")
    assert one.agents["a"].wait(BOUND_S) == 0, one.output()
    assert "ended without calling baguarun.elastic.run" in one.output()


def test_a_node_that_was_frozen_comes_back_as_a_newcomer(job: Callable[..., Job]) -> None:
    two = job("1:2")
    two.start("a", "b")
    first = two.until_world(2)
    agent = two.agents["b"]
    agent.send_signal(signal.SIGSTOP)
    (survivor,) = two.until_world(1, beyond=1)
    agent.send_signal(signal.SIGCONT)
    again = two.until_world(2, beyond=2)
    assert survivor in again and not set(first) - {survivor} & set(again)
    two.finish()
