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
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    sources = "".join(file.read_text() for file in (ROOT / "tests" / "net").glob("test_*.py"))
    assert len(named) > 40
    assert named - set(re.findall(r"def (test_\w+)\(", sources)) == set()
