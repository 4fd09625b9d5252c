"""What ranks that train together must have alike."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import baguarun
from baguarun.comm.groups import read_worker_env
from baguarun.elastic import ElasticSampler, State
from baguarun.elastic.training import comparison
from baguarun.errors import UsageError
from tests.comm.ranks import run_ranks
from tests.elastic.training.fake_agent import FakeAgent
from tests.elastic.training.resized import hold_until_news


def captured_of(rank: int) -> dict[str, Any]:
    """What is the same everywhere, though random numbers differ by rank."""
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    values = {
        "epoch": 0,
        "best": float("nan"),
        "seen": {"b": [1, 2], "a": torch.ones(2, dtype=torch.bfloat16)},
    }
    torch.manual_seed(rank)
    wrapped = baguarun.DistributedDataParallel(nn.Linear(3, 3))
    objects = {
        "schedule": torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3]),
        "scaler": torch.amp.GradScaler("cpu", init_scale=2.0),
    }
    return {"model": wrapped, "average": model, "optimizer": optimizer, **objects, **values}


def set_value(captured: dict[str, Any], rank: int) -> None:
    captured["epoch"] = rank


def set_tensor(captured: dict[str, Any], rank: int) -> None:
    captured["seen"]["a"][1] += rank


def set_learning_rate(captured: dict[str, Any], rank: int) -> None:
    captured["optimizer"].param_groups[0]["lr"] *= 1 + rank


def set_weight(captured: dict[str, Any], rank: int) -> None:
    with torch.no_grad():
        captured["average"].weight[0, 0] += rank


def set_scale(captured: dict[str, Any], rank: int) -> None:
    captured["scaler"].load_state_dict({**captured["scaler"].state_dict(), "scale": 2.0 + rank})


def set_schedule(captured: dict[str, Any], rank: int) -> None:
    captured["schedule"].last_epoch += rank


def take_a_step(captured: dict[str, Any], rank: int) -> None:
    weight = captured["optimizer"].param_groups[0]["params"][0]
    captured["optimizer"].state[weight]["momentum_buffer"] = torch.full((2, 2), float(rank))


def set_kind(captured: dict[str, Any], rank: int) -> None:
    captured["seen"] = [1, 2] if rank == 1 else {1: 2}


def leave_out(captured: dict[str, Any], rank: int) -> None:
    if rank == 1:
        del captured["best"]


def what_is_said(change: Callable[[dict[str, Any], int], None]) -> str:
    captured = captured_of(dist.get_rank())
    comparison.require_equal(captured)
    change(captured, dist.get_rank())
    with pytest.raises(UsageError) as refusal:
        comparison.require_equal(captured)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (set_value, "State's 'epoch': rank 0 has 0, rank 1 has 1; want the same on all"),
        (set_tensor, "State's 'seen'['a']: rank 0 has '[2] bfloat16 (no gradient) "),
        (set_kind, "State's 'seen': rank 0 has a dict of [1], rank 1 has [1, 2]; want the same on all"),
        (set_scale, "State's 'scaler'['scale']: rank 0 has 2.0, rank 1 has 3.0; want the same on all"),
        (set_schedule, "State's 'schedule'['last_epoch']: rank 0 has 0, rank 1 has 1; want the same on all"),
        (take_a_step, "the state of State's 'optimizer': rank 0 has "),
        (set_learning_rate, "the settings of State's 'optimizer', group 0"),
        (set_weight, "the weights of State's 'average'"),
        (leave_out, "what State holds"),
    ],
)
def test_what_differs_at_the_start_is_named_on_every_rank(
    change: Callable[[dict[str, Any], int], None], named: str
) -> None:
    said = run_ranks(what_is_said, 3, change)
    assert len(set(said)) == 1
    assert said[0].startswith(f"ranks differ in {named}")


def test_sets_and_objects_are_the_same_wherever_they_lie() -> None:
    run_ranks(compare_sets, 2)


def compare_sets() -> None:
    class Safe:
        pass

    names = ["b", "a", "c"] if dist.get_rank() == 0 else ["c", "b", "a"]
    with torch.serialization.safe_globals([Safe]):
        comparison.require_equal({"names": {*names}})


def make_state() -> State:
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = baguarun.DistributedDataParallel(net, optimizers=[optimizer])
    return State(model=model, optimizer=optimizer, epoch=0)


def make_loader(length: int = 24, batch_size: int = 2, **settings: Any) -> DataLoader[Any]:
    data = torch.arange(float(length)).unsqueeze(1)
    return DataLoader(data, batch_sampler=ElasticSampler(data, batch_size, **settings))


def take_steps(state: State, loader: DataLoader[Any], at: Callable[[], None] = lambda: None) -> list[float]:
    """Of one epoch; the samples that this rank was given."""
    given = []
    for micro_batches in state.steps(loader):
        at()
        state.optimizer.zero_grad()
        for batch in micro_batches:
            state.model(batch).mean().backward()
            given += batch.flatten().tolist()
        state.optimizer.step()
        state.commit()
    return given


def begin_with(settings_of: list[dict[str, Any]]) -> str:
    state = make_state()
    alike = make_loader()
    loader = make_loader(**settings_of[dist.get_rank()])

    @baguarun.elastic.run
    def train(state: State) -> list[float]:
        return take_steps(state, alike) + take_steps(state, loader)

    with pytest.raises(UsageError) as refusal:
        train(state)
    # Before the first of them is dealt.
    assert state.committed_steps == 4
    return str(refusal.value)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"length": 23}, "length of State.steps' loader 1: rank 0 has 24, rank 2 has 23"),
        ({"batch_size": 3}, "batch_size of State.steps' loader 1: rank 0 has 2, rank 2 has 3"),
        ({"shuffle": False}, "shuffle of State.steps' loader 1: rank 0 has True, rank 2 has False"),
        ({"seed": 5}, "seed of State.steps' loader 1: rank 0 has 0, rank 2 has 5"),
        ({"drop_last": True}, "drop_last of State.steps' loader 1: rank 0 has False, rank 2 has True"),
        (
            {"policy": "scale_lr"},
            "policy of State.steps' loader 1: rank 0 has 'constant', rank 2 has 'scale_lr'",
        ),
    ],
)
def test_loaders_that_would_not_deal_the_same_are_refused_on_every_rank(
    settings: dict[str, Any], found: str
) -> None:
    said = run_ranks(begin_with, 3, [{}, {}, settings])
    assert said == [f"ranks differ in {found}; want the same on all"] * 3


def begin_elsewhere() -> str:
    loader = make_loader()
    loader.batch_sampler.cursor = 2 * dist.get_rank()
    with pytest.raises(UsageError) as refusal:
        take_steps(make_state(), loader)
    return str(refusal.value)


def test_loaders_that_stand_elsewhere_are_refused() -> None:
    said = run_ranks(begin_elsewhere, 2)
    wanted = (
        "ranks differ in cursor of State.steps' loader 0: rank 0 has 0, rank 1 has 2; want the same on all"
    )
    assert said == [wanted] * 2


def write(folder: Path, said: object) -> None:
    (folder / str(os.getpid())).write_text(str(said))


def train_with_seeds_of_their_own(folder: Path) -> None:
    baguarun.init_process_group()
    loader = make_loader(seed=dist.get_rank())
    with pytest.raises(UsageError) as refusal:
        baguarun.elastic.run(take_steps)(make_state(), loader)
    write(folder, refusal.value)
    # Who is gone first would be missed by the others.
    dist.barrier()


def test_in_place_loaders_that_differ_are_refused_on_every_worker_at_the_start(tmp_path: Path) -> None:
    with FakeAgent(train_with_seeds_of_their_own, tmp_path) as agent:
        agent.start(2)
        agent.run_to_the_end()
        assert agent.losses == []
    said = [path.read_text() for path in tmp_path.iterdir()]
    assert len(said) == 2
    assert all(
        each.startswith("ranks differ in seed of State.steps' loader 0: rank 0 has 0, rank 1")
        for each in said
    )


def join_with_another_policy(folder: Path) -> None:
    baguarun.init_process_group()
    state = make_state()
    is_newcomer = read_worker_env().generation == 0
    loader = make_loader(policy="fixed_per_worker" if is_newcomer else "constant")

    def hold() -> None:
        if state.committed_steps == 2 and read_worker_env().generation == 1:
            (folder / f"holds-{os.getpid()}").touch()
            hold_until_news()

    try:
        baguarun.elastic.run(take_steps)(state, loader, hold)
    except UsageError as refusal:
        write(folder, refusal)
        raise
    write(folder, state.committed_steps)


def test_a_newcomer_whose_loader_differs_goes_and_the_others_go_on(tmp_path: Path) -> None:
    with FakeAgent(join_with_another_policy, tmp_path) as agent:
        agent.start(2)
        agent.run_until(lambda: len(list(tmp_path.glob("holds-*"))) == 2)
        newcomer = agent.start_newcomer(2)
        agent.run_until(lambda: newcomer.ready is not None)
        agent.change([0, 1, 2], polite=True)
        agent.run_to_the_end()
        assert agent.losses == [2]
    said = sorted(path.read_text() for path in tmp_path.iterdir() if not path.name.startswith("holds"))
    assert said[:2] == ["6", "6"]
    assert said[2].startswith(
        "ElasticSampler: the state was kept with policy='constant', here it is 'fixed_per_worker'"
    )


def join_with_another_model(folder: Path, difference: str) -> None:
    baguarun.init_process_group()
    differs = read_worker_env().generation == 0
    net: nn.Module = nn.Linear(1, 1)
    if differs and difference == "layer":
        net = nn.Sequential(net, nn.Linear(1, 1))
    if differs and difference == "frozen":
        net.bias.requires_grad_(False)
    settings: dict[str, Any] = {}
    if differs and difference == "algorithm":
        settings["algorithm"] = "bytegrad"
    if differs and difference == "setting":
        settings["find_unused_parameters"] = True
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = baguarun.DistributedDataParallel(net, optimizers=[optimizer], **settings)
    state = State(model=model, optimizer=optimizer)

    def hold() -> None:
        if state.committed_steps == 2 and read_worker_env().generation == 1:
            (folder / f"holds-{os.getpid()}").touch()
            hold_until_news()

    try:
        baguarun.elastic.run(take_steps)(state, make_loader(), hold)
    except UsageError as refusal:
        write(folder, refusal)
        raise
    write(folder, state.committed_steps)


@pytest.mark.parametrize(
    ("difference", "members", "found"),
    [
        ("layer", [0, 1, 2], "parameters of State's 'optimizer': rank 0 has [[[1, 1], [1]]], rank 2 has "),
        ("layer", [2, 0, 1], "parameters of State's 'optimizer': rank 0 has [[[1, 1], [1], [1, 1], [1]]], "),
        ("algorithm", [0, 1, 2], "algorithm of State's 'model': rank 0 has GradientAllReduce("),
        ("setting", [0, 1, 2], "find_unused_parameters of State's 'model': rank 0 has False, rank 2 has "),
        ("frozen", [0, 1, 2], "parameter or buffer 1 is "),
    ],
    ids=str,
)
def test_a_newcomer_whose_model_differs_goes_and_the_others_go_on(
    tmp_path: Path, difference: str, members: list[int], found: str
) -> None:
    with FakeAgent(join_with_another_model, tmp_path, difference) as agent:
        agent.start(2)
        agent.run_until(lambda: len(list(tmp_path.glob("holds-*"))) == 2)
        newcomer = agent.start_newcomer(2)
        agent.run_until(lambda: newcomer.ready is not None)
        agent.change(members, polite=True)
        agent.run_to_the_end()
        assert agent.losses == [2]
    said = sorted(path.read_text() for path in tmp_path.iterdir() if not path.name.startswith("holds"))
    assert said[:2] == ["6", "6"]
    assert said[2].startswith("this worker does not fit in: ")
    assert found in said[2]
