from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from baguarun.cli.main import main
from baguarun.cli.run import help_text
from baguarun.errors import JobFailedError, SetupError
from baguarun.launcher.options import OPTIONS
from baguarun.launcher.settings import RunSettings


class FakeAgent:
    """Stands in for the agent: remembers the settings, ends as told."""

    def __init__(self) -> None:
        self.runs: list[RunSettings] = []
        self.outcome: int | Exception = 0

    def run_job(self, settings: RunSettings) -> int:
        self.runs.append(settings)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeAgent:
    fake = FakeAgent()
    monkeypatch.setitem(sys.modules, "baguarun.launcher.run", SimpleNamespace(run_job=fake.run_job))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    for variable in (variable for option in OPTIONS for variable in option.variables):
        monkeypatch.delenv(variable, raising=False)
    return fake


def test_the_agent_gets_the_settings_and_its_exit_code_is_ours(agent: FakeAgent) -> None:
    agent.outcome = 17
    assert main(["run", "--nproc-per-node", "2", "train.py", "--nnodes", "3"]) == 17
    (settings,) = agent.runs
    assert (settings.nproc_per_node, settings.max_nodes) == ("2", 1)
    assert settings.script_args == ("--nnodes", "3")


def test_the_real_environment_counts(agent: FakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_MAX_RESTARTS", "5")
    assert main(["run", "train.py"]) == 0
    assert agent.runs[0].max_restarts == 5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no script: want baguarun run [options] SCRIPT"),
        (["gone.py"], "gone.py: no such script in "),
        (["."], ".: found a directory without __main__.py"),
        (["--nodes", "2", "train.py"], "--nodes: unknown flag; did you mean --nnodes?"),
        (["--nnodes", "4:1", "train.py"], "--nnodes=4:1: want 1 <= MIN <= MAX"),
        (["--nnodes", "2", "train.py"], "--nnodes=2: want to know where the nodes meet"),
        (["--store", "etcd://e", "--master-addr", "n", "train.py"], "--store=etcd://e, --master-addr=n: "),
        (
            ["--elastic", "in-place", "--master-addr", "n", "train.py"],
            "--elastic=in-place, --master-addr=n: want a place where nodes can agree",
        ),
        (["--spares", "1", "train.py"], "--spares=1: want --elastic in-place"),
        (["-m", "no_such_module_here"], "-m no_such_module_here: no module named"),
        (
            ["--no-python", "no-such-program-here"],
            "--no-python no-such-program-here: no such program on PATH",
        ),
    ],
)
def test_bad_input_ends_with_one_message_before_anything_starts(
    agent: FakeAgent, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *words]) == 2
    assert agent.runs == []
    err = capsys.readouterr().err
    assert err.startswith(f"baguarun: error: {message}")
    assert "Traceback" not in err


def test_a_conflict_with_a_variable_names_the_variable(
    agent: FakeAgent, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PET_RDZV_ENDPOINT", "n1:29400")
    assert main(["run", "--standalone", "train.py"]) == 2
    assert "(--rdzv-endpoint is set by PET_RDZV_ENDPOINT)" in capsys.readouterr().err


def test_notices_come_once_each_before_the_job_starts(
    agent: FakeAgent, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--monitor-interval", "1", "--standalone", "--master-port", "9", "train.py"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "baguarun: --monitor-interval has no effect: a worker's end is seen at once",
        "baguarun: --master-port has no effect: rank 0's address and port are chosen anew for each World",
    ]


@pytest.mark.parametrize(
    ("error", "code"), [(JobFailedError("rank 1 failed", 43), 43), (SetupError("no etcd"), 3)]
)
def test_an_error_of_the_agent_is_one_message_and_its_exit_code(
    agent: FakeAgent, error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    agent.outcome = error
    assert main(["run", "train.py"]) == code
    assert capsys.readouterr().err == f"baguarun: error: {error}\n"


def test_help_lists_every_option_that_works_and_none_that_does_not(
    agent: FakeAgent, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--help"]) == 0
    out = capsys.readouterr().out
    assert out == help_text() + "\n"
    assert agent.runs == []
    for option in OPTIONS:
        assert (f"{option.flag} " in out or f"{option.flag}\n" in out) != bool(option.refusal), option.name


def test_help_has_one_line_per_option_and_ends_with_an_example() -> None:
    lines = help_text().splitlines()
    assert max(map(len, lines)) <= 110
    assert lines[-1].strip().startswith("baguarun run ")
    shown = [line for line in lines if line.startswith("  -")]
    assert len(shown) == len([option for option in OPTIONS if not option.refusal])
