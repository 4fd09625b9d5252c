"""Pictures of what benchmarks wrote: `python -m benchmarks.plot NAME.json` makes NAME.png beside it, with
`--svg` NAME.svg, the same text from the same file.

Needs matplotlib (`pip install 'baguarun[plot]'`).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

_PANEL_INCHES = (7.5, 4.5)
_INCHES_PER_BAR = 0.3
_GOOD, _BAD, _UNJUDGED = "tab:green", "tab:red", "tab:gray"

Rows = Sequence[Mapping[str, Any]]
Curves = Sequence[Mapping[str, Any]]


class PlotError(Exception):
    """There is nothing to draw, or nothing to draw it with."""


def missing() -> str:
    """What keeps this process from drawing, and what to do; "" when nothing does."""
    if importlib.util.find_spec("matplotlib") is None:
        return "matplotlib is not installed; want: pip install 'baguarun[plot]' (or leave the picture out)"
    return ""


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Write the picture of one benchmark's JSON: a bar per row, and the curves of training if there are any.

    The format is that of `path`'s suffix. Raises `PlotError` without matplotlib or without rows.
    """
    if reason := missing():
        raise PlotError(reason)
    import matplotlib

    matplotlib.use("Agg")
    # Else names in it are drawn anew each time.
    matplotlib.rcParams["svg.hashsalt"] = "baguarun"
    from matplotlib import pyplot

    bars = bar_panels(result.get("rows", []))
    curves = curve_panels(result.get("raw", {}).get("curves", []))
    if not bars:
        raise PlotError(f"benchmark {result.get('benchmark', '?')}: its JSON has no rows to draw")
    columns = min(2, len(bars) + len(curves))
    lines = -(-(len(bars) + len(curves)) // columns)
    width, height = _PANEL_INCHES
    height = max(height, _INCHES_PER_BAR * max(len(rows) + 3 for rows in bars.values()))
    figure, grid = pyplot.subplots(
        lines, columns, squeeze=False, figsize=(width * columns, height * lines), layout="constrained"
    )
    places = [place for line in grid for place in line]
    for place, (title, rows) in zip(places, bars.items(), strict=False):
        _draw_bars(place, title, rows)
    for place, (title, cases) in zip(places[len(bars) :], curves.items(), strict=False):
        _draw_curves(place, title, cases)
    for place in places[len(bars) + len(curves) :]:
        place.set_axis_off()
    figure.suptitle(f"{result.get('title', '')}\n(green: reached its target, the black line; red: missed it)")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=100, metadata={"Date": None} if path.suffix == ".svg" else None)
    finally:
        pyplot.close(figure)


def bar_panels(rows: Rows) -> dict[str, Rows]:
    """The rows of each panel: those whose text before the first colon is the same."""
    panels: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        title, colon, rest = row["what"].partition(": ")
        panels.setdefault(title if colon else "", []).append({**row, "what": rest if colon else title})
    return dict(panels)


def curve_panels(curves: Curves) -> dict[str, dict[str, Curves]]:
    """The curves of each panel, by case: a panel per task, or per task and network."""
    panels: dict[str, dict[str, Any]] = {}
    for curve in curves:
        title = ", ".join(curve[key] for key in ("task", "network") if key in curve)
        panels.setdefault(title, {}).setdefault(curve["case"], []).append(curve)
    return panels


def middle_curve(curves: Curves, x: str) -> tuple[list[float], list[float]]:
    """The median over seeds, point by point: what stands under `x`, and the loss."""
    xs = zip(*(curve[x] for curve in curves), strict=True)
    losses = zip(*(curve["losses"] for curve in curves), strict=True)
    return [median(values) for values in xs], [median(values) for values in losses]


def _draw_bars(place: Any, title: str, rows: Rows) -> None:
    """The first row on top; the target is a line across the bar."""
    for height, row in enumerate(rows):
        value, target = row["value"], row["target"]
        # What was never reached has no length.
        length = value if math.isfinite(value) else 0.0
        colour = _UNJUDGED if target is None else _GOOD if row["reached"] else _BAD
        place.barh(height, length, color=colour)
        place.annotate(f" {value:.3g}{row['unit']}", (max(length, 0.0), height), va="center")
        if target is not None:
            place.plot([target, target], [height - 0.45, height + 0.45], color="black")
    # What stands in brackets is in the table.
    place.set_yticks(range(len(rows)), [row["what"].partition(" (")[0] for row in rows], fontsize="small")
    place.invert_yaxis()
    place.margins(x=0.15)
    place.set_title(title)


def _draw_curves(place: Any, title: str, cases: Mapping[str, Curves]) -> None:
    """Loss over time where the network is given, else over steps."""
    timed = all("network" in curve for curves in cases.values() for curve in curves)
    for name, curves in cases.items():
        style = "--" if name.startswith("ddp") else "-"
        place.plot(*middle_curve(curves, "seconds" if timed else "steps"), style, label=name)
    if timed:
        place.set_xscale("log")
    place.set_xlabel("seconds" if timed else "steps")
    place.set_ylabel("validation loss")
    place.set_title(title)
    place.legend(fontsize="small", ncols=2)


def main(argv: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__)
    options.add_argument("results", type=Path, nargs="+", help="what benchmarks wrote, as JSON")
    options.add_argument("--svg", action="store_true", help="as SVG, which is text")
    args = options.parse_args(argv)
    for path in args.results:
        picture = path.with_suffix(".svg" if args.svg else ".png")
        try:
            draw(json.loads(path.read_text()), picture)
        except (OSError, ValueError, PlotError) as error:
            print(f"{path}: {error}", file=sys.stderr)
            return 1
        print(f"written: {picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
