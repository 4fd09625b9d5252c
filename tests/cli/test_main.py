from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import baguarun
from baguarun.cli.main import COMMANDS, main


def test_without_a_command_the_commands_are_shown_and_it_is_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 2
    out = capsys.readouterr().out
    assert all(command in out for command in COMMANDS)


@pytest.mark.parametrize("word", ["-h", "--help", "help"])
def test_help_is_no_error(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 0
    assert "usage: baguarun COMMAND" in capsys.readouterr().out


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"baguarun {baguarun.__version__}\n"


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["train.py"], "baguarun run train.py"),
        (["dir/train", "--lr", "a b"], "baguarun run dir/train --lr 'a b'"),
        (["--nnodes", "2", "train.py"], "baguarun run --nnodes 2 train.py"),
    ],
)
def test_a_script_without_a_command_is_answered_with_the_line_that_runs_it(
    words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert (
        capsys.readouterr().err
        == f"baguarun: error: {words[0]}: want a command first; to start a script: {meant}\n"
    )


@pytest.mark.parametrize(
    "words",
    [
        ["--host_list", "10.0.0.1,10.0.0.2", "--ssh_port", "22", "--nproc_per_node", "8", "train.py"],
        ["--nproc_per_node=8", "--host_list=10.0.0.1,10.0.0.2", "train.py", "--autotune_level", "1"],
    ],
)
def test_the_line_of_bagua_s_own_command_is_answered_with_what_to_do(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("baguarun: error: --host-list: not here: nothing is started over ssh; start ")
    assert "baguarun run --nnodes N --rdzv-backend c10d --rdzv-endpoint HOST" in error


def test_a_flag_of_the_script_is_none_of_bagua_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--nnodes", "2", "train.py", "--host_list", "a"]) == 2
    assert "to start a script: baguarun run --nnodes 2 train.py --host_list a" in capsys.readouterr().err


def test_a_misspelt_command_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rnu"]) == 2
    assert (
        "rnu: unknown command; want run, jobs, status, scale, stop; did you mean run?"
        in capsys.readouterr().err
    )


def test_the_module_is_the_command_and_neither_torch_nor_grpc_is_loaded_for_an_error(tmp_path: Path) -> None:
    check = (
        "import sys, baguarun.cli.main as m; code = m.main(['run', '--nnodes', '4:1', 'x.py'])\n"
        "heavy = {'torch', 'grpc', 'google', 'psutil', 'asyncio', 'argparse', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("baguarun: error: --nnodes=4:1: want 1 <= MIN <= MAX")
    done = subprocess.run(
        [sys.executable, "-m", "baguarun", "run", "gone.py"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "gone.py: no such script" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_reader_that_has_seen_enough_of_the_help_causes_no_traceback() -> None:
    line = f"{sys.executable} -m baguarun run --help | true"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert done.stderr == ""
