"""How the commands about running jobs read their lines and print what they find; nothing is asked."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from baguarun.cli.job_line import ago, table
from baguarun.cli.jobs import to_json as jobs_to_json
from baguarun.cli.main import main
from baguarun.cli.scale import answer
from baguarun.cli.status import to_json, to_text
from baguarun.elastic.membership.job import UNLIMITED_RESTARTS, JobSpec
from baguarun.elastic.membership.records import Happening, Outcome, WorldRecord
from baguarun.elastic.membership.report import JobReport, JobState, JobSummary, NodeReport, NodeState
from baguarun.elastic.membership.stragglers import Pace

SPEC = JobSpec(
    job_id="demo", min_nodes=1, max_nodes=4, max_restarts=3, digest="d", summary="--nnodes 1:4 train.py"
)
WORLD = WorldRecord(
    generation=3,
    token="t",
    num_nodes=2,
    world_size=3,
    master_addr="10.0.0.1",
    restart_count=1,
    charged=False,
    free_retries=0,
    reason="n3 left",
    formed_s=880.0,
    net_secret="hush",
)
REPORT = JobReport(
    summary=JobSummary(spec=SPEC, state=JobState.RUNNING, num_registered=3, world=WORLD, outcome=None),
    desired=2,
    nodes=(
        NodeReport(
            node_id="n1-1",
            name="n1",
            slots=2,
            state=NodeState.RUNNING,
            leads=True,
            node_rank=0,
            first_rank=0,
            address="10.0.0.1",
            registered_s=400.0,
        ),
        NodeReport(node_id="n2-1", name="n2", slots=1, state=NodeState.LOST, node_rank=1, first_rank=2),
        NodeReport(
            node_id="n4-1",
            name="n4",
            slots=2,
            state=NodeState.STANDBY,
            address="10.0.0.4",
            registered_s=990.0,
        ),
    ),
    note="the leases of n2 have ended; waiting for them to register again",
    events=(Happening(100.0, 1, "all nodes are here"), Happening(880.0, 3, "n3 left")),
)
TEXT = """\
job demo: running
  World 3: nodes 2, workers 3, formed 2 min ago: n3 left
  nodes: 3 here (1 to 4 wanted, scaled to 2)
  restarts: 1 of 3 used
  waiting: the leases of n2 have ended; waiting for them to register again
  command: --nnodes 1:4 train.py

  node  rank  state    workers  registered  address   id
* n1    0-1   running  2        10 min ago  10.0.0.1  n1-1
  n2    2     lost     1                              n2-1
  n4          standby  2        10 s ago    10.0.0.4  n4-1
* leads

what happened:
  15 min ago  World 1  all nodes are here
  2 min ago   World 3  n3 left"""


def test_a_report_for_people() -> None:
    assert to_text(REPORT, 1000.0) == TEXT


def test_a_report_of_a_job_that_has_ended_before_it_began() -> None:
    outcome = Outcome(success=False, failure=None, reason="1 of 2 nodes are here", exit_code=1)
    summary = JobSummary(spec=SPEC, state=JobState.FAILED, num_registered=0, world=None, outcome=outcome)
    report = JobReport(summary=summary, desired=None, nodes=(), note="", events=())
    assert to_text(report, 0.0).splitlines() == [
        "job demo: failed",
        "  nodes: 0 here (1 to 4 wanted)",
        "  restarts: 0 of 3 used",
        "  outcome: 1 of 2 nodes are here (exit code 1)",
        "  command: --nnodes 1:4 train.py",
    ]


def test_a_job_whose_workers_may_restart_for_ever_has_no_number_for_it() -> None:
    summary = replace(REPORT.summary, spec=replace(SPEC, max_restarts=UNLIMITED_RESTARTS))
    assert "  restarts: 1, no limit" in to_text(replace(REPORT, summary=summary), 1000.0).splitlines()


def test_a_report_for_programs_is_json_and_holds_no_secret() -> None:
    text = json.dumps(to_json(REPORT))
    assert "hush" not in text
    found = json.loads(text)
    assert (found["state"], found["restarts"], found["desired_nodes"]) == ("running", 1, 2)
    assert [node["state"] for node in found["nodes"]] == ["running", "lost", "standby"]
    assert found["events"][0] == {"time_s": 100.0, "generation": 1, "text": "all nodes are here"}
    assert "hush" not in json.dumps(jobs_to_json(REPORT.summary))


def test_a_report_of_a_job_in_place_names_the_straggler() -> None:
    slow = Pace(2, 3, 79, 0.1234)
    report = replace(REPORT, paces=(Pace(0, 3, 80, 0.04), Pace(1, 3, 80, 0.042), slow))
    text = """
  rank  steps  busy per step
  0     80     0.04 s
  1     80     0.042 s
  2     79     0.123 s        straggler
"""
    assert text in to_text(report, 1000.0)
    assert [worker["straggles"] for worker in to_json(report)["workers"]] == [False, False, True]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (1, "job demo: scaled to 1, nodes here 3; the youngest leave"),
        (2, "job demo: scaled to 2, nodes here 3"),
        (4, "job demo: scaled to 4, nodes here 3; it takes in more as they come"),
    ],
)
def test_scale_says_what_to_expect(wanted: int, expected: str) -> None:
    assert answer(REPORT, wanted) == expected


def test_a_job_without_a_world_loses_nobody_by_scaling() -> None:
    waiting = replace(REPORT, summary=replace(REPORT.summary, world=None))
    assert "leave" not in answer(waiting, 1)


@pytest.mark.parametrize(
    ("age_s", "text"),
    [
        (-5, "0 s ago"),
        (119, "119 s ago"),
        (120, "2 min ago"),
        (7300, "2 h ago"),
        (172800, "2 d ago"),
    ],
)
def test_ages_are_short(age_s: float, text: str) -> None:
    assert ago(1000.0, 1000.0 - age_s) == text


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert table([("a", "b"), ("long", "")]) == ["a     b", "long"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["status"], "status: the following arguments are required: JOB; see baguarun status --help"),
        (["scale", "demo", "two"], "scale: N=two: want a number of nodes; see baguarun scale --help"),
        (["scale", "demo", "-1"], "scale: "),
        (["stop", "demo", "--later"], "stop: unrecognized arguments: --later"),
        (["jobs", "demo"], "jobs: unrecognized arguments: demo"),
        (["status", "demo", "--store", "x"], "store 'x': want etcd://host:port"),
    ],
)
def test_a_wrong_line_is_answered_with_one_message(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"baguarun: error: {message}")
    assert error.count("\n") == 1


@pytest.mark.parametrize("command", ["status", "scale", "stop", "jobs"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert "--store URL" in capsys.readouterr().out
