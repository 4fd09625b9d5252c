"""Through the whole chain: a worker is killed, the job goes on, and nothing shows in the result."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

SCRIPT = """
import os, sys
import numpy as np, torch, torch.distributed as dist
from torch import nn
import baguarun
from tests.elastic.training.programs import make_loader, make_state, weights_of

folder, kill_in_step = sys.argv[1], int(sys.argv[2])
baguarun.init_process_group()
state = make_state(folder, every_steps=2, dropout=0.2, normalise=nn.LayerNorm)

@baguarun.elastic.run
def train(state, loader):
    for micro_batches in state.steps(loader):
        state.optimizer.zero_grad()
        for inputs, wanted, names in micro_batches:
            nn.functional.mse_loss(state.model(inputs), wanted).backward()
        if state.committed_steps == kill_in_step and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            if dist.get_rank() == 1:
                os.kill(os.getpid(), 9)
        state.optimizer.step()
        state.commit()

train(state, make_loader(3))
if dist.get_rank() == 0:
    np.savez(folder + "/result", *weights_of(state))
    print("steps", state.committed_steps)
dist.barrier()
dist.destroy_process_group()
"""


def result(folder: Path, kill_in_step: int) -> tuple[str, bytes]:
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "baguarun", "run", "--nproc-per-node", "2", "--max-restarts", "1"]
        + [str(script), str(folder), str(kill_in_step)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=170,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout
    assert "steps 11" in done.stdout
    return done.stdout, (folder / "result.npz").read_bytes()


@pytest.mark.slow
def test_a_killed_worker_costs_no_bit_of_the_result(tmp_path: Path) -> None:
    undisturbed, wanted = result(tmp_path / "undisturbed", -1)
    disturbed, found = result(tmp_path / "disturbed", 7)
    assert "killed by SIGKILL" in disturbed and "SIGKILL" not in undisturbed
    assert found == wanted
