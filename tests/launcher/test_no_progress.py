"""A job resized in place that never gets further: the real command line, and workers that train."""

from __future__ import annotations

import re
from pathlib import Path

from baguarun.elastic.membership.streak import ENOUGH_BREAKS
from baguarun.errors import NO_PROGRESS_EXIT_CODE
from tests.support.command_line import run_job

SCRIPT = """
import sys
import torch
import torch.distributed as dist
import baguarun
from baguarun.elastic import State

baguarun.init_process_group()
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
model = baguarun.DistributedDataParallel(net, optimizers=[optimizer])
state = State(model=model, optimizer=optimizer, step=0)


def calls_that_differ():
    if dist.get_rank():
        dist.broadcast(torch.ones(3), src=0)
    else:
        dist.all_reduce(torch.ones(3))


@baguarun.elastic.run
def train(state):
    while state.step < 20:
        if state.step == int(sys.argv[1]):
            calls_that_differ()
        optimizer.zero_grad()
        state.model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        state.step += 1
        state.commit()


train(state)
"""


def test_a_script_whose_calls_differ_at_the_same_step_each_time_ends_the_job_and_is_told_of(
    tmp_path: Path,
) -> None:
    words = ["--elastic", "in-place", "--detect-timeout", "1", "--join-timeout", "1"]
    code, said = run_job(tmp_path, SCRIPT, *words, arguments=("7",))
    assert code == NO_PROGRESS_EXIT_CODE, said
    last = said.splitlines()[-1]
    assert re.search(rf"failed: no progress: communication broke {ENOUGH_BREAKS} times in \d+ s", last), said
    assert "on node here: " in last and "broadcast" in last, said
    # The first World, and one after each break but the last; nobody was started again.
    formed = re.findall(r"^baguarun: generation (\d+): 1 node, 2 workers", said, re.MULTILINE)
    assert formed == [str(number) for number in range(2, ENOUGH_BREAKS + 1)], said
