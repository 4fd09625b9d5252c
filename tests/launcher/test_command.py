from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from baguarun.errors import UsageError
from baguarun.launcher.command import check_command, worker_argv
from baguarun.launcher.settings import CommandKind, RunSettings

HOSTILE = ["a'; echo foo", 'say "hi"', "two  spaces", "$(touch x)", "-x", "--", "", "ünï\ncode", "*"]


def script(
    name: str | Path, *args: str, kind: CommandKind = CommandKind.SCRIPT, **environ: str
) -> RunSettings:
    return RunSettings(script=str(name), script_args=args, command_kind=kind, environ=environ)


def test_a_script_runs_unbuffered_in_our_python() -> None:
    assert worker_argv(script("train.py", "--lr", "1")) == [sys.executable, "-u", "train.py", "--lr", "1"]


def test_the_interpreter_may_be_another() -> None:
    settings = RunSettings(script="train.py", python="/opt/python")
    assert worker_argv(settings) == ["/opt/python", "-u", "train.py"]


def test_a_module_runs_by_its_name() -> None:
    assert worker_argv(script("pkg.train", "x", kind=CommandKind.MODULE)) == [
        *(sys.executable, "-u", "-m"),
        *("pkg.train", "x"),
    ]


def test_a_program_runs_by_itself() -> None:
    assert worker_argv(script("/bin/echo", "x", kind=CommandKind.PROGRAM)) == ["/bin/echo", "x"]


def test_hostile_names_and_arguments_arrive_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / 'it\'s "my" $script; rm.py'
    path.write_text("import sys; print(ascii(sys.argv[1:]))")
    settings = script(path, *HOSTILE)
    check_command(settings)
    output = subprocess.run(worker_argv(settings), check=True, capture_output=True, text=True).stdout
    assert output.strip() == ascii(HOSTILE)


def test_a_missing_script_is_named_with_the_folder_it_was_looked_for_in(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"nope.py: no such script in {os.getcwd()}"):
        check_command(script("nope.py"))
    with pytest.raises(UsageError, match="no such script"):
        (tmp_path / "dangling.py").symlink_to(tmp_path / "gone.py")
        check_command(script(tmp_path / "dangling.py"))


def test_a_directory_is_a_script_only_with_a_main_module(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"found a directory without __main__\.py"):
        check_command(script(tmp_path))
    (tmp_path / "__main__.py").touch()
    check_command(script(tmp_path))


def test_a_script_that_may_not_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "train.py"
    path.touch()
    monkeypatch.setattr(os, "access", lambda _path, mode: mode != os.R_OK)
    with pytest.raises(UsageError, match="not readable by this user"):
        check_command(script(path))


def test_a_module_is_looked_for_here_and_among_the_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trainer_of_mine.py").write_text("raise SystemExit('must not be imported')")
    for name in ("trainer_of_mine", "json.tool", "sys"):
        check_command(script(name, kind=CommandKind.MODULE))
    with pytest.raises(
        UsageError, match=f"-m no_such_thing.train: no module named no_such_thing in {tmp_path}"
    ):
        check_command(script("no_such_thing.train", kind=CommandKind.MODULE))


@pytest.mark.parametrize("name", ["train.py/", "dir/train.py", "a..b", "1x"])
def test_what_cannot_be_a_module_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"-m {name}: want a module name"):
        check_command(script(name, kind=CommandKind.MODULE))


def test_a_module_for_another_interpreter_is_left_to_that_interpreter() -> None:
    check_command(
        RunSettings(script="only_there", command_kind=CommandKind.MODULE, python="/opt/other/bin/python")
    )


def test_a_program_is_looked_for_on_the_path_of_the_environment(tmp_path: Path) -> None:
    tool = tmp_path / "tool"
    tool.touch(mode=0o755)
    check_command(script("tool", kind=CommandKind.PROGRAM, PATH=f"/nowhere:{tmp_path}"))
    check_command(script(tool, kind=CommandKind.PROGRAM, PATH="/nowhere"))
    with pytest.raises(UsageError, match="--no-python tool: no such program on PATH"):
        check_command(script("tool", kind=CommandKind.PROGRAM, PATH="/nowhere"))


def test_a_program_in_the_working_folder_is_pointed_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tool").touch(mode=0o755)
    with pytest.raises(UsageError, match=r"want \./tool, the file here"):
        check_command(script("tool", kind=CommandKind.PROGRAM, PATH="/nowhere"))


def test_a_program_must_be_executable_and_a_file(tmp_path: Path) -> None:
    (tmp_path / "tool").touch(mode=0o644)
    with pytest.raises(UsageError, match=r"not executable; want chmod \+x"):
        check_command(script(tmp_path / "tool", kind=CommandKind.PROGRAM))
    with pytest.raises(UsageError, match="found a directory"):
        check_command(script(tmp_path, kind=CommandKind.PROGRAM))
    with pytest.raises(UsageError, match="no such program; want its path"):
        check_command(script(tmp_path / "gone", kind=CommandKind.PROGRAM))
