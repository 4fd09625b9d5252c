"""docs/bagua.md keeps up: what it says to work is there, and what is there is on the page."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import baguarun.torch_api as bagua
from baguarun.torch_api import communication

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "bagua.md").read_text()
WORKS = PAGE.split("## Works")[1].split("## Differs")[0]
ROWS = dict(re.findall(r"^\| `(bagua[\w.]*)` \| (.*) \|$", WORKS, flags=re.MULTILINE))


def names_in(row: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", ROWS[row]))


@pytest.mark.parametrize("row", ROWS)
def test_every_name_that_works_is_there(row: str) -> None:
    module = importlib.import_module(row.replace("bagua", "baguarun.torch_api", 1))
    assert names_in(row) and not {name for name in names_in(row) if not hasattr(module, name)}


def test_every_public_name_is_on_the_page() -> None:
    listed = set().union(*(names_in(row) for row in ROWS)) | {row.split(".")[-1] for row in ROWS}
    assert set(bagua.__all__) <= listed
    # Types of arguments and errors are ours.
    assert set(communication.__all__) - {"ArgumentError", "Communicator"} <= names_in("bagua.communication")
