"""The examples train: alone, under torchrun and through the whole chain."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BAGUARUN = [sys.executable, "-m", "baguarun", "run", "--nproc-per-node", "2"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
PLAIN = [sys.executable]


def run(launcher: list[str], script: str, *args: str) -> str:
    """The output of one example, which has to succeed."""
    done = subprocess.run(
        [*launcher, f"examples/{script}/train.py", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        timeout=170,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def losses(output: str) -> list[float]:
    """Of training, one per line of progress."""
    return [float(text) for text in re.findall(r"(?:step|epoch) .* loss ([0-9.]+)", output)]


def digits_moved_mb(algorithm: str) -> float:
    """Megabytes that two workers moved in four epochs, in which they have to learn."""
    output = run(BAGUARUN, "digits", "--epochs", "4", "--algorithm", algorithm)
    assert len(losses(output)) == 4
    assert losses(output)[-1] < losses(output)[0] / 4
    accuracy = re.search(r"test accuracy ([0-9.]+)%", output)
    assert accuracy is not None and float(accuracy[1]) > 90
    assert "next: baguarun run" in output
    return float(re.findall(r"([0-9.]+) MB moved between 2 worker", output)[0])


@pytest.mark.slow
def test_digits_learns_through_the_whole_chain_and_bytegrad_moves_a_quarter_of_the_bytes() -> None:
    assert 0.2 < digits_moved_mb("bytegrad") / digits_moved_mb("gradient_allreduce") < 0.3


def test_digits_runs_alone_and_moves_nothing() -> None:
    assert " 0.0 MB moved between 1 worker" in run(PLAIN, "digits", "--epochs", "1")


def test_digits_repeats_with_a_seed_and_not_with_another() -> None:
    seen = [
        re.findall(r"test loss ([0-9.]+)", run(PLAIN, "digits", "--epochs", "1", "--seed", seed))
        for seed in ("3", "3", "4")
    ]
    assert seen[0] == seen[1] != seen[2]


def test_digits_runs_under_torchrun() -> None:
    assert "moved between 2 worker" in run(TORCHRUN, "digits", "--epochs", "1")


@pytest.mark.slow
def test_charlm_learns_and_writes_on_two_workers() -> None:
    output = run(BAGUARUN, "charlm", "--steps", "20", "--sample", "40", "--algorithm", "bytegrad")
    assert losses(output)[-1] < losses(output)[0] - 1
    validation = re.search(r"validation loss ([0-9.]+)", output)
    assert validation is not None and abs(float(validation[1]) - losses(output)[-1]) < 0.5
    assert "The model writes:" in output and "def " in output


@pytest.mark.slow
def test_preemptible_goes_on_on_another_number_of_workers(tmp_path: Path) -> None:
    folder = ["--checkpoints", str(tmp_path)]
    begun = run(BAGUARUN, "preemptible", "--epochs", "2", *folder)
    assert "epoch  2/2   step 58" in begun
    # 29 steps of 64 samples in each epoch, as before; the last 8 steps were after the last checkpoint.
    ended = run(PLAIN, "preemptible", "--epochs", "4", *folder)
    assert "without what was each worker's own" in ended
    assert "epoch  1/4" not in ended
    assert "epoch  4/4   step 116" in ended
    assert float(re.findall(r"accuracy ([0-9.]+)%", ended)[0]) > 90


@pytest.mark.slow
def test_preemptible_trains_in_place_as_it_does_with_restarts(tmp_path: Path) -> None:
    """The same script, to which nothing happens."""
    seen = [
        run([*BAGUARUN, *mode], "preemptible", "--epochs", "3", "--checkpoints", str(tmp_path / name))
        for name, mode in (("restart", []), ("in place", ["--elastic", "in-place"]))
    ]
    assert "has not called baguarun.elastic.run" not in seen[1]
    assert losses(seen[0]) == losses(seen[1]) and len(losses(seen[0])) == 3
    assert re.findall(r"accuracy .*", seen[0]) == re.findall(r"accuracy .*", seen[1])
