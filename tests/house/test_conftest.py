"""In CI a test that cannot run fails; elsewhere it is skipped with its reason."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SKIPPING = """
import pytest

def test_lacks_a_tool():
    pytest.skip("no such tool here")

def test_lacks_an_instruction_set():
    pytest.skip("this processor has no AVX-512")
"""


def run_pytest(folder: Path, ci: str) -> str:
    (folder / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (folder / "test_sample.py").write_text(SKIPPING)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--rootdir", str(folder), str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
        env={**os.environ, "CI": ci},
    )
    return done.stdout


def test_in_ci_a_skip_is_a_failure_unless_the_processor_is_the_reason(tmp_path: Path) -> None:
    output = run_pytest(tmp_path, ci="true")
    assert "1 failed, 1 skipped" in output
    assert "skipped, which CI does not allow: no such tool here" in output


@pytest.mark.parametrize("ci", ["", "false"])
def test_elsewhere_a_skip_stays_a_skip(tmp_path: Path, ci: str) -> None:
    assert "2 skipped" in run_pytest(tmp_path, ci=ci)
