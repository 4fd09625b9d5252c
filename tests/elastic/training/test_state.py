from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import baguarun
from baguarun.elastic import Checkpoints, ElasticSampler, State
from baguarun.errors import CommunicationError, UsageError
from tests.elastic.training.programs import (
    SAMPLES,
    Interrupted,
    make_data,
    make_loader,
    make_state,
    train,
    weights_of,
)


@pytest.fixture(autouse=True)
def world_of_one():
    baguarun.init_process_group()
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop_in_step", [1, 7, 16, 20])
def test_interrupted_training_ends_with_the_same_bits_as_undisturbed(tmp_path, stop_in_step, workers):
    undisturbed = make_state(None)
    train(undisturbed, make_loader(), 2)
    with pytest.raises(Interrupted):
        train(make_state(tmp_path), make_loader(), 2, stop_in_step)
    resumed = make_state(tmp_path)
    train(resumed, make_loader(workers=workers), 2)
    assert resumed.seen == undisturbed.seen
    assert resumed.committed_steps == undisturbed.committed_steps == 32
    assert sorted(resumed.seen) == [(epoch, name) for epoch in range(2) for name in range(SAMPLES)]
    assert all(map(np.array_equal, weights_of(resumed), weights_of(undisturbed)))


def test_a_job_that_has_ended_trains_no_more(tmp_path):
    first = make_state(tmp_path)
    train(first, make_loader(), 1)
    first.save()
    again = make_state(tmp_path)
    train(again, make_loader(), 1)
    assert again.committed_steps == first.committed_steps == 16


class Refusing:
    """Who is told of commits, and does not let them be."""

    def before_commit(self):
        raise CommunicationError("broken")

    def check(self):
        pass


def test_a_step_that_is_not_let_be_committed_is_still_open_and_not_counted():
    state, loader = make_state(None), make_loader()
    steps = state.steps(loader)
    for _ in next(steps):
        pass
    state._watcher = Refusing()
    with pytest.raises(CommunicationError, match="broken"):
        state.commit()
    [sampler] = state._samplers
    assert (state.committed_steps, sampler.cursor) == (0, 0)
    with pytest.raises(UsageError, match="the step before was not committed"):
        next(steps)


def test_values_are_attributes_and_may_be_assigned():
    state = State(epoch=0, best={"loss": 1.5})
    state.epoch += 1
    assert state.epoch == 1
    assert state.best == {"loss": 1.5}
    with pytest.raises(AttributeError, match="holds no 'epochs'; it holds best, epoch"):
        print(state.epochs)
    with pytest.raises(AttributeError, match=r"State\(epochs=...\)"):
        state.epochs = 3


@pytest.mark.parametrize(
    ("captured", "words"),
    [
        ({"lock": threading.Lock()}, "'lock' is a lock, which cannot be kept"),
        ({"items": [1, object()]}, r"'items'\[1\] is a object, which cannot be kept"),
        ({"commit": 1}, "'commit' is a name of State itself"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(captured, words):
    with pytest.raises(UsageError, match=words):
        State(**captured)
    state = State(epoch=0)
    with pytest.raises(UsageError, match="'epoch' is a object"):
        state.epoch = object()


def test_a_step_that_was_not_committed_is_noticed():
    state = make_state(None)
    steps = state.steps(make_loader())
    for _ in next(steps):
        pass
    with pytest.raises(UsageError, match=r"want state.commit\(\)"):
        next(steps)


def test_a_commit_with_micro_batches_left_is_refused():
    state = make_state(None)
    next(state.steps(make_loader()))
    with pytest.raises(UsageError, match="not all micro-batches"):
        state.commit()


def test_a_loader_that_deals_batches_itself_is_refused():
    state = make_state(None)
    with pytest.raises(UsageError, match=r"batch_sampler=baguarun\.elastic\.ElasticSampler"):
        next(state.steps(DataLoader(make_data(), batch_size=4)))


def test_two_loaders_keep_their_places_apart(tmp_path):
    def make() -> tuple[State, list[DataLoader]]:
        state = State(checkpoints=Checkpoints(folder=tmp_path), count=0)
        return state, [
            DataLoader(range(20), batch_sampler=ElasticSampler(range(20), 3, seed=n)) for n in (1, 2)
        ]

    def some(state: State, loader: DataLoader, steps: int) -> list[int]:
        found = []
        for micro_batches, _ in zip(state.steps(loader), range(steps), strict=False):
            for batch in micro_batches:
                found += batch.tolist()
            state.commit()
        return found

    state, loaders = make()
    begun = [some(state, loaders[0], 2), some(state, loaders[1], 5)]
    state.save()
    state, loaders = make()
    assert state.load()
    rest = [some(state, loader, 100) for loader in loaders]
    assert [sorted(a + b) for a, b in zip(begun, rest, strict=True)] == [list(range(20))] * 2
    assert [len(a) for a in begun] == [6, 15]


class Draws(Dataset):
    """Of as many samples as are asked for, each a random number."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(())


def drawn_by_epoch(loaders: list[DataLoader], epochs: int) -> list[list[float]]:
    """What loaders' processes draw: of each epoch by loader, where the training loop draws nothing."""
    torch.manual_seed(3)
    state = make_state(None)
    found = []
    for _ in range(epochs):
        for loader in loaders:
            drawn = []
            for micro_batches in state.steps(loader):
                for batch in micro_batches:
                    drawn += batch.tolist()
                state.commit()
            found.append(drawn)
    return found


@pytest.mark.parametrize("persistent", [False, True])
def test_loaders_processes_draw_other_numbers_in_each_epoch_and_for_each_loader(persistent: bool) -> None:
    def make() -> list[DataLoader]:
        return [
            DataLoader(
                Draws(),
                batch_sampler=ElasticSampler(range(6), 2, shuffle=False),
                num_workers=2,
                persistent_workers=persistent,
            )
            for _ in range(2)
        ]

    found = drawn_by_epoch(make(), 2)
    assert len({number for drawn in found for number in drawn}) == 4 * 6
    assert drawn_by_epoch(make(), 2) == found


def test_an_epoch_that_is_gone_on_with_gives_loaders_processes_the_seed_that_it_began_with(tmp_path) -> None:
    """And what the training loop draws is the same, as if it had not begun once more."""

    def make(folder: Path | None) -> tuple[State, DataLoader]:
        torch.manual_seed(3)
        sampler = ElasticSampler(range(8), 2, shuffle=False)
        return make_state(folder), DataLoader(Seeds(), batch_sampler=sampler, num_workers=1)

    def train_for(state: State, loader: DataLoader, steps: int) -> list[tuple[list[int], float]]:
        found = []
        while len(found) < steps:
            for micro_batches in state.steps(loader):
                [batch] = micro_batches
                found.append((batch.tolist(), float(torch.rand(()))))
                state.commit()
                if len(found) == steps:
                    break
        return found

    undisturbed = train_for(*make(None), 8)
    assert len({seed for seeds, _ in undisturbed for seed in seeds}) == 2
    state, loader = make(tmp_path)
    begun = train_for(state, loader, 6)
    state.close()
    state, loader = make(tmp_path)
    assert state.load()
    assert begun + train_for(state, loader, 2) == undisturbed


class Seeds(Dataset):
    """Of as many samples as are asked for, each the seed of the process that loads it."""

    def __getitem__(self, index: int) -> int:
        return torch.initial_seed()


Loaders = dict[str, DataLoader]


def make_phases(folder: Path, **settings_of: dict[str, Any]) -> tuple[State, Loaders]:
    def make(length: int = 20, **settings: Any) -> DataLoader:
        return DataLoader(range(length), batch_sampler=ElasticSampler(range(length), 3, **settings))

    state = State(checkpoints=Checkpoints(folder=folder), phase=0)
    return state, {name: make(**settings) for name, settings in settings_of.items()}


def take_samples(state: State, loader: DataLoader, steps: int = 100) -> list[int]:
    found: list[int] = []
    for micro_batches, _ in zip(state.steps(loader), range(steps), strict=False):
        for batch in micro_batches:
            found += batch.tolist()
        state.commit()
    return found


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param({}, {"length": 25}, id="other data"),
        pytest.param({}, {"seed": 1}, id="another seed"),
        pytest.param({"name": "warm-up"}, {"name": "training"}, id="other names"),
        pytest.param({}, {"name": "training"}, id="one name"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_a_script_goes_on_in_its_second_phase_where_it_was_with_that_loader(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any]
) -> None:
    state, loaders = make_phases(tmp_path, first=first, second=second)
    take_samples(state, loaders["first"])
    begun = take_samples(state, loaders["second"], 2)
    state.save()
    for _ in range(2):
        state, loaders = make_phases(tmp_path, first=first, second=second, third={"length": 7})
        assert state.load()
        begun += take_samples(state, loaders["second"], 2)
        state.save()
    rest = take_samples(state, loaders["second"])
    assert sorted(begun + rest) == list(range(second.get("length", 20)))
    assert loaders["second"].batch_sampler.epoch == 1
    assert len(take_samples(state, loaders["third"])) == 7
    # The place of the first one is kept as well.
    assert len(take_samples(state, loaders["first"])) == 20
    assert loaders["first"].batch_sampler.epoch == 2


def test_a_loader_with_a_name_begins_though_a_place_of_another_one_is_kept(tmp_path: Path) -> None:
    settings = {"first": {"name": "warm-up"}, "second": {"name": "training"}}
    state, loaders = make_phases(tmp_path, **settings)
    take_samples(state, loaders["first"], 4)
    state.save()
    state, loaders = make_phases(tmp_path, **settings)
    assert state.load()
    assert len(take_samples(state, loaders["second"])) == 20
    state.save()
    state, loaders = make_phases(tmp_path, **settings)
    assert state.load()
    assert [len(take_samples(state, loader)) for loader in loaders.values()] == [8, 20]


def test_loaders_that_nothing_tells_apart_go_on_in_their_order_and_it_is_said(tmp_path: Path) -> None:
    state, loaders = make_phases(tmp_path, first={}, second={})
    take_samples(state, loaders["first"], 4)
    take_samples(state, loaders["second"], 2)
    state.save()
    state, loaders = make_phases(tmp_path, first={}, second={"name": "given later"})
    assert state.load()
    with pytest.warns(
        UserWarning, match=r"2 loaders of the same data .* want ElasticSampler\(..., name=...\)"
    ):
        assert len(take_samples(state, loaders["first"])) == 8
    assert len(take_samples(state, loaders["second"])) == 14


@pytest.mark.parametrize("second", [{"length": 16}, {"name": "training"}])
def test_a_loader_whose_settings_have_changed_is_refused(tmp_path: Path, second: dict[str, Any]) -> None:
    """Though one that was used before it is the same."""
    state, loaders = make_phases(tmp_path, first={"seed": 1}, second=second)
    for loader in loaders.values():
        take_samples(state, loader, 2)
    state.save()
    state, loaders = make_phases(tmp_path, first={"seed": 1}, second={})
    assert state.load()
    take_samples(state, loaders["first"])
    [(name, value)] = second.items()
    with pytest.raises(UsageError, match=f"was kept with {name}={value!r}, here it is "):
        take_samples(state, loaders["second"])


def test_a_loader_of_other_settings_that_is_come_back_to_begins_anew_with_a_warning(tmp_path: Path) -> None:
    state, loaders = make_phases(tmp_path, first={"seed": 1}, second={})
    for loader in loaders.values():
        take_samples(state, loader, 2)
    state.save()
    state, loaders = make_phases(tmp_path, first={"seed": 1, "length": 16}, second={})
    assert state.load()
    take_samples(state, loaders["second"])
    with pytest.warns(UserWarning, match="1 loaders that were used before stand amid an epoch"):
        take_samples(state, loaders["first"])


def test_only_a_state_can_be_run():
    with pytest.raises(UsageError, match="want a State"):
        baguarun.elastic.run(print)("state")


def test_a_training_function_inside_another_is_refused():
    state = State(epoch=0)

    @baguarun.elastic.run
    def outer(state):
        baguarun.elastic.run(lambda state: None)(state)

    with pytest.raises(UsageError, match="is called while another training function runs"):
        outer(state)
    baguarun.elastic.run(lambda state: None)(state)
