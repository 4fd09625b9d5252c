"""What a command makes, made by one of several tests that need it at once, in processes of their own."""

from __future__ import annotations

import fcntl
import subprocess
from collections.abc import Sequence
from pathlib import Path


def made(target: Path, command: Sequence[str], folder: Path) -> Path:
    """`target`; where it is not there, as `command -o FILE`, run in `folder`, makes it."""
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            part = target.with_name(f"{target.name}.part")
            done = subprocess.run([*command, "-o", str(part)], capture_output=True, text=True, cwd=folder)
            assert done.returncode == 0, done.stderr
            part.rename(target)
    return target
