"""Rows are judged by their targets, cases take turns, and a missed target fails only when asked."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks import memory, quality, restart, startup, step, time_to_loss
from benchmarks.harness import Report, Row, finish, interleave, parser


def _row(value: float, target: float | None, at_least: bool = False) -> Row:
    return Row(what="w", peer="p", ours="o", value=value, target=target, at_least=at_least)


def _options(tmp_path: Path, check: bool) -> argparse.Namespace:
    words = ["--quick", "--json", str(tmp_path / "out" / "r.json"), *(["--check"] if check else [])]
    return parser("startup", "").parse_args(words)


def test_a_target_is_a_bound_from_above_or_from_below() -> None:
    assert _row(0.4, 0.4).reached and not _row(0.41, 0.4).reached
    assert _row(3.5, 3.5, at_least=True).reached and not _row(3.4, 3.5, at_least=True).reached
    assert _row(1e9, None).reached


def test_cases_take_turns_and_each_comes_first() -> None:
    order: list[str] = []

    def case(name: str) -> float:
        order.append(name)
        return float(len(order))

    values = interleave({name: lambda name=name: case(name) for name in "ab"}, 2)  # type: ignore[misc]
    assert order == ["a", "b", "b", "a"]
    assert values == {"a": [1.0, 4.0], "b": [2.0, 3.0]}


@pytest.mark.parametrize("check, code", [(False, 0), (True, 1)])
def test_a_missed_target_fails_the_run_only_with_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], check: bool, code: int
) -> None:
    report = Report(name="startup", title="title", quick=True, rows=[_row(0.3, 0.4), _row(2.0, 1.0)])
    assert finish(report, _options(tmp_path, check)) == code
    out = capsys.readouterr().out
    assert "<= 0.4" in out and "NO" in out
    written = json.loads((tmp_path / "out" / "r.json").read_text())
    assert [row["reached"] for row in written["rows"]] == [True, False]
    assert written["machine"]["cpus_usable"] >= 1


def test_a_required_target_that_is_missed_fails_the_run_without_check(tmp_path: Path) -> None:
    rows = [_row(1.0, 1.0), Row(what="w", peer="p", ours="o", value=2.0, target=1.0, required=True)]
    report = Report(name="startup", title="title", quick=True, rows=rows)
    assert finish(report, _options(tmp_path, check=False)) == 1


def test_a_quick_run_does_not_overwrite_the_kept_results(capsys: pytest.CaptureFixture[str]) -> None:
    options = parser("startup", "").parse_args(["--quick"])
    assert finish(Report(name="startup", title="title", quick=True, rows=[_row(1, 1)]), options) == 0
    assert "written" not in capsys.readouterr().out


@pytest.mark.parametrize("module", [startup, step, restart, quality, time_to_loss, memory])
def test_every_benchmark_explains_itself(module: object, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        module.main(["--help"])  # type: ignore[attr-defined]
    assert ended.value.code == 0
    assert "--quick" in capsys.readouterr().out


def test_step_is_judged_by_the_bound_of_its_ratio_and_bytegrad_by_its_speed_up() -> None:
    blocks = [
        {"case": case, "round": number, "step_s": step_s, "sent_bytes_per_step": 5e7}
        for number in range(10)
        for case, step_s in (("ddp", 4.0), ("gradient_allreduce", 3.6), ("bytegrad", 1.0))
    ]
    cases = ("ddp", "gradient_allreduce", "bytegrad")
    slow = step.rows(step.Contest(step.FAST_ETHERNET, "mlp", cases), blocks)
    assert [(row.value, row.target, row.reached) for row in slow] == [(0.9, None, True), (4.0, 3.5, True)]
    fast = step.rows(step.Contest(step.LOOPBACK, "mlp", cases), blocks)
    assert [(row.value, row.target, row.reached) for row in fast] == [(0.9, 0.95, True), (0.25, None, True)]


def test_a_job_that_never_recovers_misses_every_target() -> None:
    never = float("inf")
    rows = restart.rows({"kill": {"baguarun": [1.0, never], "torchrun": [3.0, 4.0]}})
    assert [row.reached for row in rows] == [False, False]
    rows = restart.rows({"join": {"baguarun": [1.0, 2.0], "torchrun": [never]}})
    assert [row.reached for row in rows] == [True]
    assert "never" in rows[0].peer
