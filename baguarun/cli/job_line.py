"""What the commands about a running job have in common: their line, and how they print times and tables."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import NoReturn

from baguarun.errors import UsageError
from baguarun.launcher.command_line import Given

_STORE_OPTIONS = {
    "store": ("URL", "etcd where the job meets, as for baguarun run (BAGUARUN_STORE)"),
    "rdzv-endpoint": ("HOST[:PORT]", "node that serves the job's private etcd (port 29400)"),
    "rdzv-backend": ("c10d|etcd", "what --rdzv-endpoint names (c10d)"),
    "rdzv-conf": ("K=V,...", "certificates of an etcd, as for torchrun"),
}


class JobLine(argparse.ArgumentParser):
    """A parser whose errors are ours; knows the options that say where the job's store is."""

    def __init__(self, command: str, description: str, *, epilog: str = "", job: bool = True) -> None:
        super().__init__(
            prog=f"baguarun {command}",
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if job:
            self.add_argument("job", metavar="JOB", help="its --job-id (`baguarun jobs` lists them)")
        where = self.add_argument_group(
            "Where its nodes meet (found by itself on a node with a private etcd)"
        )
        for name, (metavar, text) in _STORE_OPTIONS.items():
            where.add_argument(f"--{name}", f"--{name.replace('-', '_')}", metavar=metavar, help=text)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog.removeprefix('baguarun ')}: {message}; see {self.prog} --help")


def store_options(words: argparse.Namespace) -> Mapping[str, Given]:
    """What the line says of the store, as `baguarun run` would hold it."""
    values = {name: getattr(words, name.replace("-", "_")) for name in _STORE_OPTIONS}
    return {name: Given(text, f"--{name}") for name, text in values.items() if text is not None}


def ago(now_s: float, then_s: float) -> str:
    """`12 s ago`, `5 min ago`, `3 h ago`, `9 d ago`; clocks that differ do not make it negative."""
    age_s = max(0.0, now_s - then_s)
    for unit, length_s in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if age_s >= 2 * length_s:
            return f"{int(age_s / length_s)} {unit} ago"
    return f"{int(age_s)} s ago"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
