"""The tables of docs/results/algorithms.md, out of the files beside it: `python -m benchmarks.results_page`.

A table stands between `<!-- FILE: place; place -->` and `<!-- end -->`, and has a figure of each place in
every cell. tests/house looks whether the page has what the files have.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
PAGE = RESULTS / "algorithms.md"

_TABLE = re.compile(r"(<!-- (\S+\.json): ([^\n]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_COLUMNS = {
    "speed": "DDP's time / ours",
    "stock": "the best stock one's / ours",
    "stock on baguanet": "the best stock one's on `baguanet` / ours",
    "alone": "speed of training alone",
    "efficiency": "efficiency",
    "growth": "growth by latency",
    "waiting": "growth in waiting",
    "memory": "peak above DDP's, of the model",
}
"""By what is in them."""
_OF_ROWS = (
    ("speed", re.compile(r"(?P<case>\S+), .*(our time / DDP's|DDP's time / ours$)")),
    ("alone", re.compile(r"(?P<case>\S+), .*the speed of training alone$")),
    ("efficiency", re.compile(r"(?P<case>\S+), limit by (?P<whose>.*) / measured$")),
    ("growth", re.compile(r"growth of (?P<case>\S+) by latency")),
    ("waiting", re.compile(r"growth in waiting of (?P<case>\S+) by latency")),
    ("memory", re.compile(r"above DDP's peak: (?P<case>\S+)$")),
)
_STOCK = re.compile(r"(?P<ratio>[\d.]+) x the best stock one on (?P<transport>\S+) \((?P<name>[^)]+)\)")


@dataclass(frozen=True)
class Figure:
    """What one place has for a cell."""

    text: str
    is_missed: bool = False
    says_more: bool = True
    """Than the other columns."""

    def __str__(self) -> str:
        return f"**{self.text} (missed)**" if self.is_missed else self.text


def render(page: str) -> str:
    """`page` with its tables made anew."""

    def made_anew(found: re.Match[str]) -> str:
        head, file, places, end = found.groups()
        return f"{head}{''.join(_table(file, places.split('; ')))}{end}"

    return _TABLE.sub(made_anew, page)


def _table(file: str, places: list[str]) -> Iterator[str]:
    """Lines of Markdown."""
    rows = json.loads((RESULTS / file).read_text())["rows"]
    of_places = [_figures(rows, place) for place in places]
    found = {key: figure for figures in of_places for key, figure in figures.items()}
    columns = [
        column for column in _COLUMNS if any(key[1] == column and found[key].says_more for key in found)
    ]
    yield f"| | {' | '.join(_COLUMNS[column] for column in columns)} |\n|---|{'---|' * len(columns)}\n"
    for case in sorted({case for case, _ in found}, key=lambda case: (not case.startswith("ddp"), case)):
        cells = [_cell([figures.get((case, column)) for figures in of_places]) for column in columns]
        yield f"| `{case}` | {' | '.join(cells)} |\n"


def _cell(figures: list[Figure | None]) -> str:
    """A dash for what a place has no figure of: growth has one in the place with latency only."""
    if not any(figures):
        return ""
    return ", ".join("–" if figure is None else str(figure) for figure in figures)


def _figures(rows: Iterable[Mapping[str, Any]], place: str) -> dict[tuple[str, str], Figure]:
    """Of one place, by contestant and column."""
    figures: dict[tuple[str, str], Figure] = {}
    for row in rows:
        at, _, what = row["what"].partition(": ")
        for column, pattern in _OF_ROWS if at == place else ():
            if found := pattern.match(what):
                key = found["case"], column
                # Two rows may ask for the same: so many times as fast, and never slower.
                was_missed = key in figures and figures[key].is_missed
                figures[key] = Figure(_text(column, found, row), was_missed or not row["reached"])
                for stock in _STOCK.finditer(what):
                    is_gloo = stock["transport"] == "Gloo"
                    figures[found["case"], "stock" if is_gloo else "stock on baguanet"] = Figure(
                        stock["ratio"], says_more=not (is_gloo and stock["name"] == "ddp")
                    )
                break
    return figures


def _text(column: str, found: re.Match[str], row: Mapping[str, Any]) -> str:
    value = row["value"]
    if column == "speed":
        speed = value if row["at_least"] else 1 / value
        return f"{speed:.3f}" if 0.9 < speed < 1.1 else f"{speed:.2f}"
    if column == "memory":
        return f"{value:.0f} %"
    is_cores = column == "efficiency" and found["whose"].startswith("the cores")
    return f"{value:.3f}{' of the cores' if is_cores else ''}"


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text()))
