"""docs/transport.md keeps up: it lists every setting of the transport, and the tests that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "transport.md").read_text()


def test_every_setting_of_the_transport_is_listed_and_no_other() -> None:
    read = set(re.findall(r'"((?:BAGUA_NET|NCCL|GLOO)_\w+)"', (ROOT / "cpp_ext/net/env.cc").read_text()))
    rows = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"[A-Z]+_[A-Z_]+", row)} == read


def test_every_test_that_is_named_exists() -> None:
    named = set(re.findall(r"`((?:test_|[a-z]+_[a-z]+_[a-z]+_)\w+)`", PAGE))
    files = [
        file for part in ("net", "comm", "torch_suite") for file in (ROOT / "tests" / part).glob("test_*.py")
    ]
    sources = "".join(file.read_text() for file in files)
    assert len(named) > 100
    assert named - set(re.findall(r"def (\w+)\(", sources)) - {file.stem for file in files} == set()


def test_every_behaviour_that_torch_asks_for_is_listed() -> None:
    files = (ROOT / "tests" / "torch_suite").glob("test_*.py")
    asked = {
        name for file in files for name in re.findall(r"@SUITE.behaviour\ndef (\w+)\(", file.read_text())
    }
    assert len(asked) > 70
    assert asked - set(re.findall(r"`(\w+)`", PAGE)) == set()
