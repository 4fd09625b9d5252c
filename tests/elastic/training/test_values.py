"""What can be kept: only what can be read back, and numpy's numbers as Python's."""

from __future__ import annotations

import enum
import os
from collections import Counter, OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import baguarun
from baguarun.comm.groups import read_worker_env
from baguarun.elastic import Checkpoints, State
from baguarun.elastic.training import replicated, streaming, values
from baguarun.errors import UsageError
from tests.comm.ranks import run_ranks
from tests.elastic.training.fake_agent import FakeAgent
from tests.elastic.training.resized import hold_until_news


class Phase(enum.IntEnum):
    WARM_UP = 1


class Name(str):
    pass


Score = namedtuple("Score", "loss step")

FOREIGN = [
    (Phase.WARM_UP, "is a Phase, which cannot be kept; want its .value"),
    (Score(0.5, 3), r"is a Score, which cannot be kept; want a plain tuple, or a dict as of \._asdict\(\)"),
    (defaultdict(int, a=1), r"is a defaultdict, which cannot be kept; want a plain dict, as of dict"),
    (np.ones(2), r"is a ndarray, which cannot be kept; want a tensor, as of torch\.as_tensor"),
    (Name("a"), r"is a Name, which cannot be kept; want a plain str, as of str"),
]


class Keeper:
    """Has a state of anything."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def state_dict(self) -> dict[str, Any]:
        return {"held": [self.held]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        [self.held] = state["held"]


class Box:
    """What only who trusts the file may read."""

    def __init__(self, content: int) -> None:
        self.content = content


@pytest.mark.parametrize(("value", "words"), FOREIGN)
def test_what_could_not_be_read_back_is_refused_where_it_is_given(value: Any, words: str) -> None:
    with pytest.raises(UsageError, match=f"State: 'best' {words}"):
        State(best=value)
    state = State(best=0)
    with pytest.raises(UsageError, match=rf"State: 'best'\['all'\]\[1\] {words}"):
        state.best = {"all": [1, value]}
    assert state.best == 0


@pytest.mark.parametrize(("value", "words"), FOREIGN)
def test_an_object_whose_state_could_not_be_read_back_is_refused_at_the_first_save(
    tmp_path: Path, value: Any, words: str
) -> None:
    state = State(keeper=Keeper(value), checkpoints=Checkpoints(folder=tmp_path, every_steps=2))
    state.commit()
    with pytest.raises(UsageError, match=rf"State: 'keeper'\.state_dict\(\)\['held'\]\[0\] {words}"):
        state.commit()
    with pytest.raises(UsageError, match=words):
        state.save()


@pytest.mark.parametrize(("value", "words"), FOREIGN)
def test_an_object_whose_state_could_not_be_sent_is_refused(value: Any, words: str) -> None:
    with pytest.raises(UsageError, match=rf"State: 'keeper'\.state_dict\(\)\['held'\]\[0\] {words}"):
        replicated.collect({"keeper": Keeper(value)})


def test_what_a_list_was_given_since_is_refused_at_the_next_save(tmp_path: Path) -> None:
    state = State(seen=[], checkpoints=Checkpoints(folder=tmp_path))
    state.seen.append(1)
    state.save()
    state.seen.append({Phase.WARM_UP: 1})
    with pytest.raises(UsageError, match=r"State: 'seen'\[1\]\[<Phase.WARM_UP: 1>\]'s key is a Phase"):
        state.save()


@pytest.mark.parametrize(
    "number", [np.float64(1.5), np.float32(1.5), np.int64(3), np.bool_(True), np.str_("a")]
)
def test_of_numpys_numbers_pythons_are_held_and_come_back(tmp_path: Path, number: Any) -> None:
    state = State(best=0, seen=[], checkpoints=Checkpoints(folder=tmp_path))
    state.best = number
    assert type(state.best) is type(number.item())
    state.seen.append({"at": number})
    state.save()
    again = State(best=0, seen=[], checkpoints=Checkpoints(folder=tmp_path))
    assert again.load()
    assert again.best == number
    assert again.seen == [{"at": number}]
    streaming.require_sendable("seen", replicated.collect({"seen": state.seen}))


def test_a_number_that_is_none_of_pythons_is_refused() -> None:
    with pytest.raises(UsageError, match="'best' is a longdouble, which cannot be kept; want a tensor"):
        State(best=np.longdouble(1.5))


def make_scheduled(folder: Path) -> State:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    return State(
        model=model, optimizer=optimizer, scheduler=scheduler, checkpoints=Checkpoints(folder=folder)
    )


def test_a_scheduler_that_was_given_numpys_mean_comes_back(tmp_path: Path) -> None:
    state = make_scheduled(tmp_path)
    for loss in (3.0, 2.0, 4.0):
        state.scheduler.step(np.mean([loss, loss]))
    for group in state.optimizer.param_groups:
        group["momentum"] = np.float64(0.5)
    # As where a subclass compares what it is given.
    state.scheduler.best = np.float64(state.scheduler.best)
    state.save()
    again = make_scheduled(tmp_path)
    assert again.load()
    assert (again.scheduler.best, again.scheduler.num_bad_epochs) == (2.0, 0)
    assert again.optimizer.param_groups[0]["momentum"] == 0.5
    assert again.optimizer.param_groups[0]["lr"] == state.optimizer.param_groups[0]["lr"] < 0.1
    for name, sent in replicated.collect(state._captured).items():
        streaming.require_sendable(name, sent)
    replicated.adopt_without_weights(again._captured, replicated.collect_without_weights(state._captured))
    assert type(again.optimizer.param_groups[0]["momentum"]) is float


def test_dicts_and_tuples_of_a_kind_that_can_be_read_stay_of_it(tmp_path: Path) -> None:
    kept = {
        "order": OrderedDict(b=torch.ones(2), a=2),
        "counts": Counter("aab"),
        "shape": torch.Size([2, 3]),
        "names": {"a", "b"},
        "dtype": torch.bfloat16,
        "bytes": bytearray(b"ab"),
    }
    state = State(kept=kept, checkpoints=Checkpoints(folder=tmp_path))
    state.save()
    again = State(kept=0, checkpoints=Checkpoints(folder=tmp_path))
    assert again.load()
    assert list(map(type, again.kept.values())) == list(map(type, kept.values()))
    torch.testing.assert_close(again.kept.pop("order"), kept["order"], rtol=0, atol=0)
    assert again.kept == {name: value for name, value in kept.items() if name != "order"}


def test_a_multi_step_schedule_comes_back_as_it_was(tmp_path: Path) -> None:
    def make() -> State:
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 1, 3])
        return State(scheduler=scheduler, checkpoints=Checkpoints(folder=tmp_path))

    make().save()
    again = make()
    assert again.load()
    assert sorted(again.scheduler.milestones.elements()) == [1, 1, 3]


def test_a_class_that_the_script_has_named_safe_is_kept(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'box' is a Box"):
        State(box=Box(3))
    with torch.serialization.safe_globals([Box]):
        State(box=Box(3), checkpoints=Checkpoints(folder=tmp_path)).save()
        again = State(box=0, checkpoints=Checkpoints(folder=tmp_path))
        assert again.load()
        assert again.box.content == 3


def test_a_value_that_the_script_goes_on_to_change_stays_the_scripts() -> None:
    seen = [np.float64(1.0)]
    state = State(seen=seen)
    assert state.seen is seen
    assert values.capture("seen", state.seen) == [1.0]


def send_kinds() -> None:
    sent = {"order": OrderedDict(b=torch.ones(2), a=2), "counts": Counter("aab")}
    if torch.distributed.get_rank() == 1:
        streaming.send(sent, [0], torch.device("cpu"))
        return
    received = streaming.receive(1, torch.device("cpu"))
    assert list(map(type, received.values())) == [OrderedDict, Counter]
    assert received["counts"] == sent["counts"]
    torch.testing.assert_close(received["order"], sent["order"], rtol=0, atol=0)


def test_kinds_of_dicts_are_sent() -> None:
    run_ranks(send_kinds, 2)


def train_with_numpys_means(folder: Path) -> None:
    baguarun.init_process_group()
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = baguarun.DistributedDataParallel(net, optimizers=[optimizer])
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    state = State(model=model, optimizer=optimizer, scheduler=scheduler, step=0, best=9.0, seen=[])

    @baguarun.elastic.run
    def train(state: State) -> None:
        while state.step < 4:
            if state.step == 2 and read_worker_env().generation == 1:
                (folder / f"holds-{os.getpid()}").touch()
                hold_until_news()
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            loss = np.mean([2.0, 4.0]) - state.step
            scheduler.best = min(scheduler.best, loss)
            state.best = np.minimum(state.best, loss)
            state.seen.append(loss)
            state.step += 1
            state.commit()

    train(state)
    kept = [float(state.best), float(scheduler.best), *map(float, state.seen)]
    (folder / f"ends-{os.getpid()}").write_text(str(kept))


def test_in_place_a_newcomer_is_sent_what_numpy_has_computed(tmp_path: Path) -> None:
    with FakeAgent(train_with_numpys_means, tmp_path) as agent:
        agent.start(2)
        agent.run_until(lambda: len(list(tmp_path.glob("holds-*"))) == 2)
        newcomer = agent.start_newcomer(2)
        agent.run_until(lambda: newcomer.ready is not None)
        agent.change([0, 1, 2], polite=True)
        agent.run_to_the_end()
        assert agent.losses == []
    assert [path.read_text() for path in tmp_path.glob("ends-*")] == ["[0.0, 0.0, 3.0, 2.0, 1.0, 0.0]"] * 3


def test_plain_tensors_come_back_to_where_those_are_that_are_there_now() -> None:
    """On a device that every machine has, as far as it goes: the meta device holds no numbers."""
    live = {
        "sum": torch.zeros((), device="meta"),
        "all": [torch.ones(2), torch.ones(3, device="meta")],
        "n": 1,
    }
    kept = values.capture("live", {**live, "sum": torch.zeros(()), "all": [torch.ones(2)] * 3})
    found = values.restore(live, kept)
    assert found["sum"].device.type == found["all"][1].device.type == "meta"
    assert found["all"][0].device.type == "cpu"
    # Of what is not there now nobody knows.
    assert found["all"][2].device.type == "cpu"


@pytest.mark.gpu
def test_counts_of_an_optimizers_steps_stay_where_torch_makes_them() -> None:
    for settings in ({}, {"fused": True}, {"capturable": True}):
        weight = nn.Parameter(torch.ones(2, device="cuda"))
        optimizer = torch.optim.Adam([weight], **settings)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        made = optimizer.state[weight]["step"].device
        # As it comes over NCCL.
        state = optimizer.state_dict()
        state["state"][0]["step"] = state["state"][0]["step"].cuda()
        values.restore(optimizer, state)
        assert optimizer.state[weight]["step"].device == made
        assert optimizer.state[weight]["exp_avg"].device.type == "cuda"
