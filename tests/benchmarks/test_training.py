"""Contestants that train: all algorithms take part, see the same data, and are judged by their targets."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from baguarun.comm.algorithms import ALGORITHMS
from benchmarks import quality, time_to_loss
from benchmarks.cases import CASES, chosen, is_on_gloo, with_peers
from benchmarks.step_worker import VARIANTS
from benchmarks.tasks import TASKS

ROOT = Path(__file__).resolve().parents[2]


def curves(case: str, losses: list[float], task: str = "charlm") -> list[dict[str, Any]]:
    """One per seed, which ends with that loss."""
    return [
        {
            "task": task,
            "case": case,
            "seed": seed,
            "steps": [1, 2],
            "seconds": [1.0, 2.0],
            "losses": [9.0, loss],
        }
        for seed, loss in enumerate(losses)
    ]


def test_every_algorithm_takes_part() -> None:
    present = {case.algorithm.name for case in CASES.values() if case.algorithm is not None}
    missing = {kind.name for kind in ALGORITHMS.values()} - present
    assert not missing, f"want a line in benchmarks/cases.py for {missing}"


def test_a_case_that_nobody_knows_is_refused_with_those_that_are_known() -> None:
    assert chosen("bytegrad,ddp,diloco@gloo") == ["ddp", "bytegrad", "diloco@gloo"]
    assert [is_on_gloo(name) for name in ("ddp_fp16", "diloco@gloo", "diloco")] == [True, True, False]
    with pytest.raises(SystemExit, match=r"bytegard: want some of ddp, .*bytegrad"):
        chosen("bytegard,diloco")


@pytest.mark.parametrize("name", sorted(TASKS))
def test_contestants_of_one_seed_see_the_same_and_ranks_do_not(name: str) -> None:
    task = TASKS[name]

    def seen(seed: int, rank: int) -> torch.Tensor:
        return torch.cat([inputs.float().flatten() for inputs, _ in islice(task.batches(seed, rank, 4), 3)])

    assert torch.equal(seen(0, 1), seen(0, 1))
    assert not torch.equal(seen(0, 1), seen(0, 2))
    assert not torch.equal(seen(0, 1), seen(1, 1))
    shares = [task.validation(rank, 4) for rank in range(4)]
    assert len({len(wanted) for _, wanted in shares}) == 1
    assert not torch.equal(shares[0][0], shares[1][0])


def test_a_synchronous_algorithm_may_be_one_standard_deviation_worse_and_others_any() -> None:
    found = [
        *curves("ddp", [2.0, 2.2, 2.4]),
        *curves("bytegrad", [2.2, 2.4, 2.6]),
        *curves("gradient_allreduce", [2.3, 2.4, 2.6]),
        *curves("diloco", [3.0, 3.0, 2.4]),
    ]
    rows = quality.rows(found)
    assert [round(row.value, 3) for row in rows] == [1.0, 1.167, 3.0]
    assert [row.target for row in rows] == [1.0, 1.0, None]
    assert "bytegrad (2 of 3 under 2.5)" in rows[0].what


def test_torchs_own_are_compared_and_not_judged() -> None:
    found = [*curves("ddp", [2.0, 2.2, 2.4]), *curves("ddp_powersgd", [9.0, 9.0, 9.0])]
    (row,) = quality.rows(found)
    assert "ddp_powersgd" in row.what and row.target is None


def test_each_case_is_held_to_a_peer_with_its_optimizer() -> None:
    found = [
        *curves("ddp", [2.0, 2.2, 2.4]),
        *curves("ddp_sgd", [3.0, 3.2, 3.4]),
        *curves("ddp_qadam", [2.1, 2.2, 2.3]),
        *curves("sparse", [3.1, 3.2, 3.3]),
        *curves("qadam", [2.2, 2.3, 2.4]),
    ]
    rows = {row.what.partition(" (")[0]: row for row in quality.rows(found)}
    judged = {what: round(row.value, 3) for what, row in rows.items() if row.target is not None}
    assert judged == {
        "charlm: sparse to ddp_sgd": 0.0,
        "charlm: qadam": 0.5,
        "charlm: qadam to ddp_qadam": 1.0,
    }


@pytest.mark.parametrize("name", sorted(CASES))
def test_one_peer_at_least_has_the_same_optimizer_and_is_torchs(name: str) -> None:
    peers = [CASES[peer] for peer in CASES[name].peers]
    assert all(peer.is_stock for peer in peers)
    assert CASES[name].is_stock or CASES[name].optimizer in [peer.optimizer for peer in peers]


def test_peers_take_part_even_if_nobody_names_them() -> None:
    assert with_peers(["ddp", "sparse"]) == ["ddp", "ddp_sgd", "sparse"]
    assert with_peers(["ddp", "qadam", "bytegrad"]) == ["ddp", "ddp_qadam", "qadam", "bytegrad"]


@pytest.mark.parametrize("name", ["low_precision_decentralized_4bit", "diloco_int8", "diloco_overlapped"])
def test_quality_is_of_what_speed_is_measured_of(name: str) -> None:
    timed, trained = vars(VARIANTS[name]), vars(CASES[name].algorithm)
    assert {key for key in timed if timed[key] != trained[key]} <= {"local_steps", "outer_momentum"}


def test_the_clock_stops_where_the_curve_is_first_at_the_target() -> None:
    seconds = [10.0, 20.0, 30.0, 40.0]
    assert time_to_loss.time_to(2.5, seconds, [4.0, 3.0, 2.0, 3.0]) == 30.0
    assert time_to_loss.time_to(5.0, seconds, [4.0, 3.0, 2.0, 3.0]) == 10.0
    assert time_to_loss.time_to(2.0, seconds, [4.0, 3.0, 2.0, 1.0]) == 30.0
    assert math.isinf(time_to_loss.time_to(1.0, seconds, [4.0, math.nan, 2.0, 3.0]))


def timed(case: str, seconds: list[float]) -> list[dict[str, Any]]:
    """One curve per seed that reaches any target at that second, or never."""
    found = curves(case, [9.0 if math.isinf(second) else 0.0 for second in seconds], task="charlm_wide")
    for curve, second in zip(found, seconds, strict=True):
        curve |= {"steps": [1], "seconds": [min(second, 1e6)], "losses": curve["losses"][1:]}
    return found


def test_times_are_compared_seed_by_seed_and_the_best_of_ours_also_with_powersgd() -> None:
    found = [
        *timed("ddp", [100.0, 200.0, 100.0]),
        *timed("ddp_powersgd", [20.0, 40.0, math.inf]),
        *timed("bytegrad", [28.0, 70.0, 29.0]),
        *timed("diloco", [10.0, math.inf, 10.0]),
    ]
    rows = {row.what.partition(" (")[0]: row for row in time_to_loss.rows(found)}
    assert rows["to DDP: bytegrad"].value == pytest.approx(0.29)
    assert rows["to DDP: bytegrad"].target == 0.30
    assert rows["to DDP: diloco"].value == pytest.approx(0.1)
    assert "0.100-inf" in rows["to DDP: diloco"].what
    assert rows["best: diloco to DDP"].target == 0.12
    assert rows["best: diloco to PowerSGD"].value == pytest.approx(0.5)


def test_without_a_peer_that_gets_there_nothing_is_claimed() -> None:
    with pytest.raises(ValueError, match="DDP did not reach"):
        time_to_loss.rows([*timed("ddp", [100.0, math.inf]), *timed("bytegrad", [30.0, 30.0])])


def test_alone_all_contestants_train_alike(tmp_path: Path) -> None:
    out = tmp_path / "curves.json"
    words = ["--tasks", "digits", "--cases", "ddp,bytegrad,diloco", "--seed", "1", "--every", "50"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.train_worker", *words, "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=170,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert sorted(curve["case"] for curve in found) == ["bytegrad", "ddp", "diloco"]
    for curve in found:
        assert curve["steps"] == [50, 100, 120]
        assert curve["seconds"] == sorted(curve["seconds"])
        assert curve["losses"] == pytest.approx(found[0]["losses"], rel=1e-3)
        assert curve["losses"][-1] < TASKS["digits"].target_loss
