"""From `--timeline FILE` to one file with all workers."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baguarun.contract import WorkerEnv
from baguarun.errors import UsageError
from baguarun.launcher.settings import RunSettings
from baguarun.launcher.timeline import TimelineMerge, check, merge
from tests.support.command_line import BAGUARUN, environment

HEAD = '{"displayTimeUnit":"ms","traceEvents":[\n'


def settings(path: Path | str, *, max_nodes: int = 1, node_name: str = "n") -> RunSettings:
    return RunSettings(script="x", timeline=str(path), max_nodes=max_nodes, node_name=node_name)


def worker(path: str, rank: int, *, generation: int = 1, node_rank: int = 0) -> WorkerEnv:
    return WorkerEnv(
        rank=rank,
        local_rank=rank,
        node_rank=node_rank,
        num_nodes=2,
        world_size=4,
        local_world_size=2,
        master_addr="h",
        master_port=1,
        job_id="j",
        restart_count=0,
        max_restarts=0,
        generation=generation,
        timeline=path,
    )


def write_part(path: str | Path, *names: str, end: str = "\n]}\n") -> str:
    Path(path).write_text(HEAD + ",\n".join(json.dumps({"name": name}) for name in names) + end)
    return str(path)


def names(path: Path) -> list[str]:
    return [event["name"] for event in json.loads(path.read_text())["traceEvents"]]


def test_workers_are_told_an_absolute_path_and_find_files_of_their_own() -> None:
    told = TimelineMerge(settings("out.json")).path
    assert told == os.path.abspath("out.json")
    env = worker(told, 3, generation=2)
    assert WorkerEnv.from_environ(env.to_environ()).timeline_part == f"{told}.generation2.rank3"
    assert WorkerEnv.from_environ({"BAGUARUN_TIMELINE": "t", "RANK": "1"}).timeline_part == "t.rank1"
    assert WorkerEnv.from_environ({}).timeline_part == ""
    assert "BAGUARUN_TIMELINE" not in worker("", 0).to_environ()


def test_at_the_end_one_file_holds_all_workers_of_all_generations(tmp_path: Path) -> None:
    joining = TimelineMerge(settings(tmp_path / "out.json"))
    envs = [worker(joining.path, rank, generation=generation) for generation in (1, 2) for rank in (0, 1)]
    for env in envs:
        joining.expect(env)
        write_part(env.timeline_part, f"{env.generation}.{env.rank}")
    [line] = joining.finish()
    assert names(tmp_path / "out.json") == ["1.0", "1.1", "2.0", "2.1"]
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    assert "timeline of 4 workers" in line
    assert joining.finish() == []


def test_with_several_nodes_the_file_is_named_by_the_node_rank(tmp_path: Path) -> None:
    joining = TimelineMerge(settings(tmp_path / "out.json", max_nodes=2))
    env = worker(joining.path, 2, node_rank=1)
    joining.expect(env)
    write_part(env.timeline_part, "a")
    joining.finish()
    assert names(tmp_path / "out.node1.json") == ["a"]


def test_newcomers_take_no_other_node_s_file(tmp_path: Path) -> None:
    path = str(tmp_path / "out.json")
    first, second, joined = (
        TimelineMerge(settings(path, max_nodes=3, node_name=name)) for name in ("a", "b", "c")
    )
    for node_rank, node in enumerate((first, second)):
        node.expect(worker(path, node_rank, node_rank=node_rank))
    for name, node in (("b", second), ("c", joined)):
        env = WorkerEnv.for_newcomer(
            "j", 0, restart_count=0, max_restarts=0, timeline=f"{path}.{name}.newcomer1"
        )
        node.expect(env)
        write_part(env.timeline_part, name)
    write_part(worker(path, 0).timeline_part, "a")
    for node in (first, second, joined):
        node.finish()
    found = {path.name: names(path) for path in tmp_path.iterdir()}
    assert found == {"out.node0.json": ["a"], "out.node1.json": ["b"], "out.node-c.json": ["c"]}


def test_two_that_join_into_one_file_do_not_mix(tmp_path: Path) -> None:
    first, second = write_part(tmp_path / "a", "1"), write_part(tmp_path / "b", "2")
    target = tmp_path / "out"

    def parts() -> Iterator[str]:
        yield first
        merge([second], str(target))
        assert names(target) == ["2"]

    merge(parts(), str(target))
    assert names(target) == ["1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "out"]


def test_a_file_left_by_an_earlier_job_is_not_taken_for_this_one_s(tmp_path: Path) -> None:
    joining = TimelineMerge(settings(tmp_path / "out.json"))
    env = worker(joining.path, 0)
    write_part(env.timeline_part, "old")
    joining.expect(env)
    [line] = joining.finish()
    assert "no worker recorded a timeline; want a script that wraps its model" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("end", [',\n{"na', ",\n", ",\n}\n", "\n]", "", ',\n{"name":"x"}]}\n'])
def test_a_worker_that_died_while_it_wrote_loses_its_last_line_at_most(tmp_path: Path, end: str) -> None:
    parts = [write_part(tmp_path / "a", "1", "2", end=end), write_part(tmp_path / "b", "3")]
    merge(parts, str(tmp_path / "out"))
    assert names(tmp_path / "out") == ["1", "2", "3"]


@pytest.mark.parametrize("text", ["", '{"displayTimeUn', HEAD, HEAD + "]}\n"])
def test_a_worker_that_died_before_its_first_event_adds_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "a").write_text(text)
    merge([str(tmp_path / "a"), write_part(tmp_path / "b", "3")], str(tmp_path / "out"))
    assert names(tmp_path / "out") == ["3"]
    merge([str(tmp_path / "a")], str(tmp_path / "out"))
    assert names(tmp_path / "out") == []


def test_if_they_cannot_be_joined_the_workers_files_are_kept(tmp_path: Path) -> None:
    joining = TimelineMerge(settings(tmp_path / "out.json"))
    env = worker(joining.path, 0)
    joining.expect(env)
    write_part(env.timeline_part, "a")
    (tmp_path / "out.json").mkdir()
    [line] = joining.finish()
    assert "Is a directory; the workers' files are kept" in line
    assert names(Path(env.timeline_part)) == ["a"]


@pytest.mark.parametrize(
    ("path", "why"),
    [("/no/such/folder/o", "No such file or directory"), ("/dev/null/o", "Not a directory"), ("", "found a")],
)
def test_a_path_that_cannot_be_written_is_refused_before_anything_starts(path: str, why: str) -> None:
    with pytest.raises(UsageError, match=f"--timeline={path}: {why}"):
        check(settings(path))


def test_a_path_that_can_be_written_stays_as_it_is(tmp_path: Path) -> None:
    check(settings(tmp_path / "out.json"))
    assert list(tmp_path.iterdir()) == []


SCRIPT = """\
import os, signal, sys, torch, baguarun
baguarun.init_process_group()
module = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
model = baguarun.DistributedDataParallel(module, algorithm="bytegrad")
os.chdir("/")
for step in range(4):
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
torch.distributed.destroy_process_group()
"""


def launch(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    return subprocess.run(
        [*BAGUARUN, "run", *words, "train.py"],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=150,
    )


def test_two_workers_under_the_launcher_leave_one_file(tmp_path: Path) -> None:
    done = launch(tmp_path, "--nproc-per-node", "2", "--timeline", "out.json")
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert f"timeline of 2 workers: {tmp_path / 'out.json'}" in output
    events: list[dict[str, Any]] = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert processes[0].startswith("rank 0 (")
    assert processes[1].startswith("rank 1 (")
    for rank in (0, 1):
        mine = [event for event in events if event["pid"] == rank]
        assert len([event for event in mine if event["name"] == "backward"]) == 4
        assert {"encode", "decode", "on the wire", "forward", "SGD step"} <= {event["name"] for event in mine}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "train.py"]


def test_the_launcher_ends_at_once_if_the_file_cannot_be_written(tmp_path: Path) -> None:
    done = launch(tmp_path, "--timeline", "gone/out.json")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "baguarun: error: --timeline=gone/out.json: No such file or directory; want"
    )
