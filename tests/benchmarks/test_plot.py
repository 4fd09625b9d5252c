"""Results become pictures, whatever is missing in them; without matplotlib one is told what to install."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plot
from benchmarks.harness import Report, Row, finish, parser

pytest.importorskip("matplotlib", reason="matplotlib is in the extra `plot`")

PNG = b"\x89PNG\r\n\x1a\n"


def row(what: str, value: float, target: float | None = None) -> dict[str, Any]:
    reached = target is None or value <= target
    return {"what": what, "value": value, "target": target, "reached": reached, "unit": "x"}


def curve(case: str, seed: int, losses: list[float], **more: Any) -> dict[str, Any]:
    seconds = [(seed + 1) * step for step in (10.0, 20.0)]
    return {"task": "t", "case": case, "steps": [10, 20], "seconds": seconds, "losses": losses, **more}


@pytest.mark.parametrize(
    "result",
    [
        {"rows": [row("one", 1.0)]},
        {"rows": [row("net: a (b)", 0.5, 1.0), row("net: c", 2.0, 1.0), row("other: a", -1.0, 1.0)]},
        {"title": "t", "rows": [row("never: a", math.inf, 1.0)], "raw": {"blocks": [1]}},
        {"rows": [row("a: b", 1.0)], "raw": {"curves": [curve("ddp", 0, [2.0, 1.0])]}},
        {
            "rows": [row("a: b", 1.0)],
            "raw": {"curves": [curve("x", seed, [2.0, math.nan], network="n") for seed in range(3)]},
        },
    ],
    ids=["one row", "groups", "never reached", "curves over steps", "curves over time, one diverged"],
)
def test_a_result_becomes_a_picture(tmp_path: Path, result: dict[str, Any]) -> None:
    plot.draw(result, tmp_path / "new" / "r.png")
    assert (tmp_path / "new" / "r.png").read_bytes().startswith(PNG)


def test_a_picture_as_text_is_the_same_each_time(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"rows": [row("net: a", 0.5, 1.0)]}))
    made = []
    for _ in range(2):
        assert plot.main([str(path), "--svg"]) == 0
        made.append(path.with_suffix(".svg").read_text())
    assert made[0] == made[1] and made[0].startswith("<?xml")


@pytest.mark.parametrize("result", [{}, {"benchmark": "step", "rows": []}])
def test_a_result_without_rows_is_refused(tmp_path: Path, result: dict[str, Any]) -> None:
    with pytest.raises(plot.PlotError, match="no rows"):
        plot.draw(result, tmp_path / "r.png")
    assert not (tmp_path / "r.png").exists()


def test_rows_of_one_network_share_a_panel_and_those_without_a_colon_another() -> None:
    panels = plot.bar_panels([row("a: x", 1.0), row("b: x", 2.0), row("a: y", 3.0), row("plain", 4.0)])
    assert {title: [one["what"] for one in rows] for title, rows in panels.items()} == {
        "a": ["x", "y"],
        "b": ["x"],
        "": ["plain"],
    }


def test_a_curve_is_the_median_of_its_seeds() -> None:
    seeds = [curve("x", seed, [loss, 1.0]) for seed, loss in enumerate((3.0, 9.0, 4.0))]
    assert plot.middle_curve(seeds, "seconds") == ([20.0, 40.0], [4.0, 1.0])


def test_results_that_are_kept_can_be_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "r.json"
    kept.write_text(json.dumps({"rows": [row("a", 1.0)]}))
    assert plot.main([str(kept)]) == 0
    assert (tmp_path / "r.png").read_bytes().startswith(PNG)
    kept.write_text("{")
    assert plot.main([str(kept)]) == 1
    assert str(kept) in capsys.readouterr().err


def test_every_benchmark_draws_when_asked(tmp_path: Path) -> None:
    report = Report(name="startup", title="title", quick=True)
    report.rows.append(Row(what="w", peer="p", ours="o", value=1.0, target=2.0))
    assert (
        finish(report, parser("startup", "").parse_args(["--quick", "--plot", str(tmp_path / "r.png")])) == 0
    )
    assert (tmp_path / "r.png").read_bytes().startswith(PNG)


def test_without_matplotlib_a_picture_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        parser("startup", "").parse_args(["--plot", "r.png"])
    assert "pip install 'baguarun[plot]'" in capsys.readouterr().err
    with pytest.raises(plot.PlotError, match="matplotlib is not installed"):
        plot.draw({"rows": [row("a", 1.0)]}, tmp_path / "r.png")
