"""What `run` refuses in a job that is resized in place."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import baguarun
from baguarun.elastic import State
from baguarun.errors import UsageError
from tests.elastic.training.fake_agent import FakeAgent


@baguarun.elastic.run
def train(state: State) -> None:
    while state.step < 2:
        state.optimizer.zero_grad()
        state.model(torch.ones(1, 2)).sum().backward()
        state.optimizer.step()
        state.step += 1
        state.commit()


@baguarun.elastic.run
def tune(state: State) -> None:
    state.step += 1


def make_model() -> tuple[baguarun.DistributedDataParallel, torch.optim.Optimizer]:
    net = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(net.parameters())
    return baguarun.DistributedDataParallel(net, optimizers=[optimizer]), optimizer


def refuse_a_second_run(folder: Path) -> None:
    baguarun.init_process_group()
    model, optimizer = make_model()
    state = State(model=model, optimizer=optimizer, step=0)
    train(state)
    with pytest.raises(UsageError) as refusal:
        tune(state)
    assert state.step == 2
    write(folder, refusal.value)


def refuse_what_state_does_not_hold(folder: Path) -> None:
    baguarun.init_process_group()
    model, optimizer = make_model()
    with pytest.raises(UsageError) as refusal:
        train(State(model=model, step=0))
    # It had not begun.
    train(State(model=model, optimizer=optimizer, step=0))
    write(folder, refusal.value)


def refuse_a_step_inside_backward(folder: Path) -> None:
    baguarun.init_process_group()
    model, optimizer = make_model()
    model.module.bias.register_post_accumulate_grad_hook(lambda _bias: optimizer.step())
    with pytest.raises(UsageError) as refusal:
        train(State(model=model, optimizer=optimizer, step=0))
    write(folder, refusal.value)


def refuse_algorithms_of_two_kinds(folder: Path) -> None:
    baguarun.init_process_group()
    model, optimizer = make_model()
    net = nn.Linear(2, 1)
    other = torch.optim.SGD(net.parameters(), lr=0.1)
    critic = baguarun.DistributedDataParallel(net, optimizers=[other], algorithm="local_sgd")
    with pytest.raises(UsageError) as refusal:
        train(State(model=model, critic=critic, optimizer=optimizer, other=other, step=0))
    train(State(model=model, optimizer=optimizer, step=0))
    write(folder, refusal.value)


def refuse_a_model_of_torch_ddp(folder: Path) -> None:
    baguarun.init_process_group()
    model, optimizer = make_model()
    with pytest.raises(UsageError) as refusal:
        train(State(model=nn.parallel.DistributedDataParallel(nn.Linear(2, 1)), step=0))
    train(State(model=model, optimizer=optimizer, step=0))
    write(folder, refusal.value)


def write(folder: Path, said: object) -> None:
    (folder / str(os.getpid())).write_text(str(said))
    # Who is gone first would be missed by the others.
    dist.barrier()


@pytest.mark.parametrize(
    ("job", "wanted"),
    [
        (refuse_a_second_run, "baguarun.elastic.run: 'tune' is called after another training function has"),
        (refuse_what_state_does_not_hold, "State: 'model' was wrapped with optimizers=[...] of which State"),
        (
            refuse_algorithms_of_two_kinds,
            "State: 'model' (gradient_allreduce) keeps its replicas equal, 'critic'",
        ),
        (refuse_a_model_of_torch_ddp, "State: 'model' is a torch.nn.parallel.DistributedDataParallel, whose"),
        (refuse_a_step_inside_backward, "Adam.step() inside backward: a step that a loss cut short"),
    ],
)
def test_what_could_not_be_gone_on_with_after_a_change_is_refused_on_every_worker(
    tmp_path: Path, job: Callable[[Path], None], wanted: str
) -> None:
    with FakeAgent(job, tmp_path) as agent:
        agent.start(2)
        agent.run_to_the_end()
        assert agent.losses == []
    said = [path.read_text() for path in tmp_path.iterdir()]
    assert len(said) == 2
    assert all(each.startswith(wanted) for each in said)
