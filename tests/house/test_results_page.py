"""docs/results/algorithms.md has the figures of the files beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import results_page

PLACE = "4 hosts of 1, 1000 Mbit/s"
TABLE = f"before\n<!-- some.json: {PLACE}, 0 ms; {PLACE}, 5 ms -->\nold\n<!-- end -->\nafter\n"


def row(what: str, value: float, *, reached: bool = True, at_least: bool = False) -> dict[str, Any]:
    return {"what": what, "value": value, "reached": reached, "at_least": at_least}


def rendered(folder: Path, monkeypatch: pytest.MonkeyPatch, *rows: dict[str, Any]) -> list[str]:
    (folder / "some.json").write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(results_page, "RESULTS", folder)
    return results_page.render(TABLE).splitlines()


def test_the_page_has_what_the_files_have() -> None:
    page = results_page.PAGE.read_text()
    assert "<!-- end -->" in page
    assert results_page.render(page) == page, "python -m benchmarks.results_page"


def test_a_table_has_a_line_for_each_contestant_and_a_figure_for_each_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = rendered(
        tmp_path,
        monkeypatch,
        row(f"{PLACE}, 0 ms: sparse, 4.00 x the best stock one on Gloo (ddp); our time / DDP's", 0.25),
        row(f"{PLACE}, 5 ms: sparse, 2.00 x the best stock one on Gloo (ddp); our time / DDP's", 0.5),
        row(f"{PLACE}, 5 ms: sparse, limit by the cores (the cost model's is 1 ms) / measured", 0.7),
        row(f"{PLACE}, 5 ms: ddp@baguanet, 1.00 x the best stock one on Gloo (ddp); our time / DDP's", 1.0),
        row("elsewhere: bytegrad; our time / DDP's", 0.5),
    )
    assert lines[0] == "before" and lines[-1] == "after" and "old" not in lines
    assert lines[2:-2] == [
        "| | DDP's time / ours | efficiency |",
        "|---|---|---|",
        "| `ddp@baguanet` | –, 1.000 |  |",
        "| `sparse` | 4.00, 2.00 | –, 0.700 of the cores |",
    ]


def test_what_is_missed_is_said_also_where_another_row_asks_for_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = rendered(
        tmp_path,
        monkeypatch,
        row(f"{PLACE}, 0 ms: qadam, 9 samples/s; DDP's time / ours", 3.7, reached=False, at_least=True),
        row(f"{PLACE}, 0 ms: qadam, 9 samples/s; our time / DDP's", 1 / 3.7),
        row(f"{PLACE}, 5 ms: growth of qadam by latency, by the least of ddp", 1.05, reached=False),
    )
    assert "| `qadam` | **3.70 (missed)**, – | –, **1.050 (missed)** |" in lines


def test_the_best_stock_one_has_a_column_where_it_is_not_ddp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    what = "qadam, 0.90 x the best stock one on Gloo (ddp_fp16), 9 samples/s; our time / DDP's"
    assert "| `qadam` | 2.00, – | 0.90, – |" in rendered(
        tmp_path, monkeypatch, row(f"{PLACE}, 0 ms: {what}", 0.5)
    )


def test_memory_is_in_percent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = rendered(tmp_path, monkeypatch, row(f"{PLACE}, 5 ms: above DDP's peak: bytegrad", 8.948))
    assert lines[2:-2] == [
        "| | peak above DDP's, of the model |",
        "|---|---|",
        "| `bytegrad` | –, 9 % |",
    ]


def test_the_best_stock_one_on_our_transport_has_a_column_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = "2.00 x the best stock one on Gloo (ddp), 1.25 x the best stock one on baguanet (ddp)"
    lines = rendered(
        tmp_path, monkeypatch, row(f"{PLACE}, 0 ms: qadam, {stock}, 9 samples/s; our time / DDP's", 0.5)
    )
    assert lines[2:-2] == [
        "| | DDP's time / ours | the best stock one's on `baguanet` / ours |",
        "|---|---|---|",
        "| `qadam` | 2.00, – | 1.25, – |",
    ]
