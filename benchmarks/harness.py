"""What benchmarks share: options, taking turns, the table with its targets, JSON, facts of the machine."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.plot import draw, missing

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "docs" / "results"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One claim: what was measured, the figure reached and the figure wanted."""

    what: str
    peer: str
    """The peer's figures, as text."""
    ours: str
    """Our figures, as text."""
    value: float
    """The number that is held against `target`."""
    target: float | None
    """None: reported, not judged."""
    at_least: bool = False
    """Larger is better: want value >= target."""
    unit: str = ""
    required: bool = False
    """Missing the target fails the run without `--check`, too: the other figures cannot be relied on."""

    @property
    def reached(self) -> bool:
        if self.target is None:
            return True
        return self.value >= self.target if self.at_least else self.value <= self.target


@dataclass(kw_only=True)
class Report:
    """The outcome of one benchmark."""

    name: str
    title: str
    quick: bool
    rows: list[Row] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)
    """All measured values, for those who want to look closer."""
    facts: dict[str, Any] = field(default_factory=lambda: machine_facts())

    def table(self) -> str:
        """The rows as an aligned text table."""
        head = ("what", "peer", "ours", "value", "target", "reached")
        lines = [head, *(_cells(row) for row in self.rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
        text = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines
        ]
        rule = "-" * len(text[0])
        return "\n".join([self.title, rule, text[0], rule, *text[1:], rule])

    def to_json(self) -> str:
        rows = [{**asdict(row), "reached": row.reached} for row in self.rows]
        content = {
            "benchmark": self.name,
            "title": self.title,
            "quick": self.quick,
            "machine": self.facts,
            "rows": rows,
            "raw": self.raw,
        }
        return json.dumps(content, indent=1) + "\n"


def _cells(row: Row) -> tuple[str, ...]:
    if row.target is None:
        target, reached = "-", "-"
    else:
        target = f"{'>=' if row.at_least else '<='} {row.target:g}{row.unit}"
        reached = "yes" if row.reached else "NO"
    return (row.what, row.peer, row.ours, f"{row.value:.3g}{row.unit}", target, reached)


def parser(name: str, description: str) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    options = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    options.add_argument("--quick", action="store_true", help="a smoke run: few repeats, figures mean little")
    options.add_argument("--check", action="store_true", help="exit with 1 when a target is missed")
    options.add_argument(
        "--json",
        type=Path,
        default=None,
        help=f"where to write (default docs/results/{name}.json; quick: nowhere)",
    )
    options.add_argument("--plot", type=_picture, help="a picture, too: a .png (needs matplotlib)")
    return options


def _picture(text: str) -> Path:
    """Refused before the benchmark runs, and not after it."""
    if reason := missing():
        raise argparse.ArgumentTypeError(reason)
    return Path(text)


def save(report: Report, options: argparse.Namespace) -> Path | None:
    """Write the JSON of what is known so far, and return where it is; None where none is wanted."""
    path: Path | None = options.json or (None if options.quick else RESULTS / f"{report.name}.json")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(report.to_json())
    return path


def finish(report: Report, options: argparse.Namespace) -> int:
    """Print the table, write the JSON and return the exit code: 1 where a target is missed that is required,
    or any with `--check`."""
    print(report.table())
    path = save(report, options)
    if path is not None:
        print(f"written: {path}")
    if options.plot is not None:
        draw(json.loads(report.to_json()), options.plot)
        print(f"written: {options.plot}")
    missed = [row.what for row in report.rows if not row.reached and (options.check or row.required)]
    if missed:
        print(f"missed: {'; '.join(missed)}", file=sys.stderr)
        return 1
    return 0


def interleave(cases: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Run every case `repeats` times, turn and turn about, each round in another order.

    What the machine does meanwhile then hits all cases alike; values of one round are a pair.
    """
    values: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(repeats):
        for name in rotated(list(cases), number):
            values[name].append(cases[name]())
    return values


def rotated(names: list[str], number: int) -> list[str]:
    """Round `number`'s order: each name comes first as often as any other."""
    shift = number % len(names)
    return names[shift:] + names[:shift]


def machine_facts() -> dict[str, Any]:
    """What a reader needs to judge the figures."""
    return {
        "cpu": _cpu_model(),
        "cpus_usable": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "tcp_congestion_control": Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip(),
        "load_average_before": [round(value, 2) for value in os.getloadavg()],
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
