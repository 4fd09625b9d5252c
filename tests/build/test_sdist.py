"""The source archive can be built from: it holds all that git has of the sources."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_source_archive_holds_everything_that_a_build_needs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
        + ["sdist", "--dist-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    [archive] = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        held = {name.partition("/")[2] for name in file.getnames()}
    listed = subprocess.run(
        ["git", "ls-files", "cpp_ext", "baguarun", "setup.py", "pyproject.toml", "scripts/nccl_plugin.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert len(listed) > 100
    assert set(listed) <= held
    assert not [name for name in held if name.endswith((".so", ".o", ".pyc"))]
