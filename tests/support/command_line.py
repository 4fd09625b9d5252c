"""The real command line in processes of its own, without what in our environment would set an option."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from baguarun.launcher.options import OPTIONS

BAGUARUN = (sys.executable, "-m", "baguarun")
_ROOT = Path(__file__).parents[2]


def environment(folder: Path | None = None, **more: str) -> dict[str, str]:
    """Ours, without what would set an option, and with `folder` for temporary files."""
    variables = {variable for option in OPTIONS for variable in option.variables}
    found = {name: value for name, value in os.environ.items() if name not in variables}
    found |= {"PYTHONPATH": str(_ROOT)}
    return found | ({} if folder is None else {"TMPDIR": str(folder)}) | more


def start_agent(out: Path, environ: Mapping[str, str], *words: str) -> subprocess.Popen[str]:
    """`baguarun run` with these words; all that it says goes to the file `out`."""
    with open(out, "w") as file:
        return subprocess.Popen(
            [*BAGUARUN, "run", *words],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
        )


def run_job(folder: Path, script: str, *words: str, arguments: tuple[str, ...] = ()) -> tuple[int, str]:
    """Exit code and output of a job whose only node is this machine, called "here"; two minutes at most.

    `script` is the text of what two workers run.
    """
    path = folder / "train.py"
    path.write_text(script)
    done = subprocess.run(
        [*BAGUARUN, "run", "--nproc-per-node", "2", "--node-name", "here", *words, str(path), *arguments],
        env=environment(folder, OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout
