"""How much an ordinary script has to change to be resized in place, counted, and what it is worth, run."""

from __future__ import annotations

import difflib
import subprocess
import sys
from pathlib import Path

from tests.support.command_line import environment, run_job

ORDINARY = """
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import baguarun

baguarun.init_process_group()
torch.manual_seed(0)
inputs = torch.randn(96, 8)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model = baguarun.DistributedDataParallel(model, optimizers=[optimizer])
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))

for epoch in range(10):
    loader.sampler.set_epoch(epoch)
    for points, wanted in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(points), wanted).backward()
        optimizer.step()

error = torch.nn.functional.mse_loss(model.module(inputs), inputs.sum(1, keepdim=True))
print(f"rank {dist.get_rank()} has an error of {error:.6f}", flush=True)
dist.barrier()
"""

ELASTIC = """
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
import baguarun

baguarun.init_process_group()
torch.manual_seed(0)
inputs = torch.randn(96, 8)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model = baguarun.DistributedDataParallel(model, optimizers=[optimizer])
loader = DataLoader(data, batch_sampler=baguarun.elastic.ElasticSampler(data, batch_size=8))
state = baguarun.elastic.State(model=model, optimizer=optimizer, epoch=0)

@baguarun.elastic.run
def train(state):
    for state.epoch in range(state.epoch, 10):
        for parts in state.steps(loader):
            optimizer.zero_grad()
            for points, wanted in parts:
                torch.nn.functional.mse_loss(model(points), wanted).backward()
            optimizer.step()
            state.commit()

train(state)
error = torch.nn.functional.mse_loss(model.module(inputs), inputs.sum(1, keepdim=True))
print(f"rank {dist.get_rank()} has an error of {error:.6f}", flush=True)
dist.barrier()
"""


def lines(script: str) -> list[str]:
    """Without indentation, which an editor changes, and without empty ones."""
    return [line.strip() for line in script.splitlines() if line.strip()]


def test_under_ten_lines_of_an_ordinary_script_change() -> None:
    changes = list(difflib.ndiff(lines(ORDINARY), lines(ELASTIC)))
    # The import of what is no longer used could have stayed.
    written = [change for change in changes if change.startswith("+ ") and " import " not in change]
    assert 0 < len(written) < 10, written


def errors(output: str) -> list[float]:
    told = [line for line in output.splitlines() if "has an error of" in line]
    return [float(line.split()[-1]) for line in sorted(told)]


def test_the_same_script_runs_alone_and_resized_in_place(tmp_path: Path) -> None:
    for script in (ORDINARY, ELASTIC):
        alone = subprocess.run(
            [sys.executable, "-c", script],
            env=environment(tmp_path),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert alone.returncode == 0, alone.stderr
        (error,) = errors(alone.stdout)
        assert error < 0.01
    code, said = run_job(tmp_path, ELASTIC, "--elastic", "in-place")
    assert code == 0, said
    one, other = errors(said)
    assert one == other < 0.01
