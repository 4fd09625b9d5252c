"""docs/writing_an_algorithm.md tells the truth: its code is the example's, trains, and mixes as it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from baguarun.comm.algorithms import Algorithm, GradientAllReduce
from baguarun.errors import UsageError
from examples.own_algorithm.half_bytes import HalfBytes
from examples.own_algorithm.ring import Ring
from tests.comm.algorithms.simulation import (
    assert_same_training,
    run_for_tensors,
    simulate,
    train,
    train_each,
)
from tests.examples.test_examples import BAGUARUN, losses, run

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "writing_an_algorithm.md").read_text()
FILES = ("ring.py", "half_bytes.py")


@pytest.mark.parametrize("name", FILES)
def test_the_page_shows_the_file_which_has_fewer_than_40_lines_of_code(name: str) -> None:
    code = (ROOT / "examples" / "own_algorithm" / name).read_text()
    assert textwrap.indent(code, "    ") in PAGE
    assert len([line for line in code.splitlines() if line.strip()]) < 40


def test_the_algorithms_use_public_names_only() -> None:
    for name in FILES:
        code = (ROOT / "examples" / "own_algorithm" / name).read_text()
        assert set(re.findall(r"from (\S+) import", code)) <= {
            "baguarun.comm.algorithms",
            "dataclasses",
            "typing",
        }


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_step_is_that_of_the_written_out_ring(world_size: int) -> None:
    algorithms = [Ring(), Ring(share=0.25)]
    found = run_for_tensors(train_each, world_size, algorithms, 5, 2)
    for index, algorithm in enumerate(algorithms):

        def mix(_step: int, weights: torch.Tensor, share: float = algorithm.share) -> torch.Tensor:
            return torch.lerp(weights, weights.roll(1, 0), share)

        expected = simulate(world_size, 5, before_step=mix, micro_batches=2)
        assert_same_training([each[index] for each in found], expected)


def train_in_float32(*algorithms: Algorithm) -> list[torch.Tensor]:
    return [train(algorithm, 5, dtype=torch.float32) for algorithm in algorithms]


def test_half_bytes_follow_full_averages() -> None:
    for coarse, exact in run_for_tensors(train_in_float32, 2, HalfBytes(), GradientAllReduce()):
        moved = (exact[-1] - exact[0]).abs().max()
        assert 0 < (coarse - exact).abs().max() < 0.2 * moved


@pytest.mark.parametrize("name", ["ring", "half_bytes"])
def test_the_example_learns_on_two_workers(name: str) -> None:
    output = run(BAGUARUN, "own_algorithm", "--algorithm", name)
    assert losses(output)[-1] < losses(output)[0] / 2
    assert not output.endswith("\n0 bytes sent by each worker\n")


def test_the_refusal_is_the_one_on_the_page() -> None:
    with pytest.raises(UsageError) as caught:
        Ring(share=2)
    assert f"\n      {caught.value}\n" in PAGE


def test_the_launcher_takes_the_name_of_a_registered_algorithm_and_ranks_refuse_an_unknown_one() -> None:
    launcher = [*BAGUARUN, "--algorithm", "ring"]
    assert "step  20   loss" in run(launcher, "own_algorithm", "--steps", "20")
    done = subprocess.run(
        [sys.executable, "examples/own_algorithm/train.py", "--algorithm", "rnig"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert "did you mean 'ring'?" in done.stderr
