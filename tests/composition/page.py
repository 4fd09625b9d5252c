"""docs/composition.md, written from the tables of the matrix."""

from __future__ import annotations

import string
from pathlib import Path

from tests.composition.matrix import FEATURES, NOTES, REFUSED, Feature
from tests.composition.rows import ROUNDING, ROWS, Row

PATH = Path(__file__).resolve().parents[2] / "docs" / "composition.md"

_LETTERS = string.ascii_uppercase

_HEAD = """\
# What composes with what

Written by `python -m tests.composition --write`, which first runs every cell on three ranks; do not edit.
`yes`: trains like the reference. `no`: refused when the model is wrapped. Numbers lead to the notes.
"""

_ABOUT_TOLERANCES = """
Tolerances are shares of how far weights moved, after every step. Where replicas have to be equal, they are
compared bit for bit. Rows with `hierarchical=True` run on ranks that take themselves for two nodes, of two
ranks and of one. With a sign per number each parameter has a bucket of its own and `variance_floor` is 1, so
that a step does not depend on what else is in the model.
"""


def render() -> str:
    """The page."""
    notes, cells = _numbered()
    parts = [_HEAD, _table(cells), "## Algorithms\n", _algorithms(), "## How each is tested\n", _features()]
    parts += ["## Notes\n", "".join(f"{number}. {text}\n" for text, number in notes.items())]
    return "\n".join(parts)


def _numbered() -> tuple[dict[str, int], dict[tuple[str, str], str]]:
    """Notes with their numbers in order of appearance, and the text of each cell."""
    numbers: dict[str, int] = {}
    cells = {}
    for feature in FEATURES:
        for row in ROWS:
            refusal = REFUSED.get((row.title, feature.title))
            texts = [note.text for note in NOTES if note.feature == feature.title and note.concerns(row)]
            if refusal is not None:
                texts = [f"Refused with “{refusal.message}”: {refusal.reason}"]
            marks = [str(numbers.setdefault(text, len(numbers) + 1)) for text in texts]
            word = "yes" if refusal is None else "no"
            cells[row.title, feature.title] = f"{word} {','.join(marks)}".rstrip()
    return numbers, cells


def _table(cells: dict[tuple[str, str], str]) -> str:
    lines = [["", *_LETTERS[: len(ROWS)]], ["---"] * (len(ROWS) + 1)]
    lines += [[feature.title, *(cells[row.title, feature.title] for row in ROWS)] for feature in FEATURES]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _algorithms() -> str:
    lines = ["| | algorithm | reference | tolerance |\n", "|---|---|---|---|\n"]
    for letter, row in zip(_LETTERS, ROWS, strict=False):
        lines.append(f"| {letter} | `{row.title}` | {_reference(row)} | {_tolerance(row)} |\n")
    return "".join(lines) + _ABOUT_TOLERANCES


def _reference(row: Row) -> str:
    return (
        "the algorithm itself, without the feature" if row.reference is None else "written out in plain torch"
    )


def _tolerance(row: Row) -> str:
    usual = "rounding" if row.tolerance == ROUNDING else f"{row.tolerance:.0%}"
    return "; ".join([usual, *(f"{title}: {more:.0%}" for title, more in row.tolerances.items())])


def _features() -> str:
    return "".join(f"- {feature.title}: against {_against(feature)}.\n" for feature in FEATURES)


def _against(feature: Feature) -> str:
    return feature.against + (f" (tolerance {feature.tolerance:.0%})" if feature.tolerance else "")
