"""A worker that hangs in a job that is resized in place: the real command line, and workers that train."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.command_line import run_job

SCRIPT = """
import os, sys, time
import torch
import baguarun
from baguarun.elastic import State

baguarun.init_process_group()
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
model = baguarun.DistributedDataParallel(net, optimizers=[optimizer])
state = State(model=model, optimizer=optimizer, step=0)
is_newcomer = os.environ["BAGUARUN_GENERATION"] == "0"


def stuck_for_ever():
    while True:
        time.sleep(3600)


@baguarun.elastic.run
def train(state):
    # All train on until a replacement has come.
    while state.step < 20 or torch.distributed.get_world_size() < 2:
        if state.step == 10 and os.environ["LOCAL_RANK"] == "1" and not is_newcomer:
            stuck_for_ever()
        optimizer.zero_grad()
        state.model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        state.step += 1
        state.commit()
        time.sleep(0.01)


train(state)
print("trained to the end", "as a newcomer" if is_newcomer else "from the beginning", flush=True)
"""


def test_who_hangs_is_shown_with_its_stacks_removed_and_replaced(tmp_path: Path) -> None:
    words = ["--elastic", "in-place", "--hang-timeout", "4", "--on-hang", "remove", "--shutdown-timeout", "5"]
    code, said = run_job(tmp_path, SCRIPT, *words)
    assert code == 0, said
    hangs = re.findall(r"baguarun: rank (\d) on node here .*waits for no other worker; it is removed", said)
    assert hangs == ["1"], said
    assert "stuck_for_ever" in said, said
    assert "local rank 1" in said and "killed by SIGKILL" in said, said
    assert "trained to the end from the beginning" in said, said
    assert "trained to the end as a newcomer" in said, said
