"""What the README shows is true: its options exist, its links lead somewhere, its ten lines run."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from baguarun.launcher.options import OPTIONS

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
PAGES = ["README.md", "CONTRIBUTING.md", *DOCS]


def read(page: str) -> str:
    return (ROOT / page).read_text()


def ten_lines() -> str:
    blocks = re.findall(r"(?:^    .*\n|^\n)+", read("README.md"), flags=re.MULTILINE)
    return textwrap.dedent(next(block for block in blocks if "import torch, baguarun" in block))


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_file_of_this_repository(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", read(page)):
        assert (ROOT / page).parent.joinpath(target).exists(), target


def test_every_option_in_a_baguarun_command_is_accepted() -> None:
    known = {f"--{name}" for option in OPTIONS if not option.refusal for name in (option.name, option.alias)}
    for line in re.findall(r"^    (baguarun run .*)$", read("README.md"), flags=re.MULTILINE):
        for flag in re.findall(r"(--[a-z-]+)", line):
            assert flag in known, line


def test_the_ten_lines_run_as_they_stand(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ten_lines())
    assert len(script.read_text().split("\n")) <= 14
    environ = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=170, env=environ
    )
    assert done.returncode == 0, done.stderr
