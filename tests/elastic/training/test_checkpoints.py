from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
import torch.distributed as dist

import baguarun
from baguarun.elastic import Checkpoints, State
from baguarun.errors import UsageError
from tests.comm.ranks import run_ranks


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def commit(state: State, steps: int) -> None:
    for _ in range(steps):
        state.value = state.value + 1
        state.commit()
    state.close()


def make_state(folder, **settings) -> State:
    return State(value=torch.zeros(3), checkpoints=Checkpoints(folder=folder, **settings))


def test_the_newest_are_kept_and_the_last_one_is_gone_on_from(tmp_path):
    commit(make_state(tmp_path, every_steps=2, keep=2), 7)
    assert names(tmp_path) == ["step-000000000004", "step-000000000006"]
    state = make_state(tmp_path)
    assert state.load()
    assert state.committed_steps == 6
    assert torch.equal(state.value, torch.full((3,), 6.0))


def test_a_commit_is_kept_once_though_it_is_asked_for_twice(tmp_path, monkeypatch):
    state = make_state(tmp_path, every_steps=2)
    taken = []
    snapshot = State._snapshot
    monkeypatch.setattr(State, "_snapshot", lambda self: taken.append(self._steps) or snapshot(self))
    for _ in range(2):
        state.commit()
    assert "step 2" in state._keep()
    state.commit()
    state._keep()
    assert taken == [2, 3]
    assert names(tmp_path) == ["step-000000000002", "step-000000000003"]
    assert State(value=torch.zeros(3))._keep() == ""


def test_without_a_checkpoint_there_is_nothing_to_load(tmp_path):
    state = make_state(tmp_path / "not-there")
    assert not state.load()
    assert state.committed_steps == 0


@pytest.mark.parametrize("damage", ["cut short", "lost", "no record"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path, capfd, damage):
    commit(make_state(tmp_path, every_steps=1), 2)
    newest = tmp_path / "step-000000000002"
    if damage == "cut short":
        os.truncate(newest / "shared.pt", 100)
    elif damage == "lost":
        (newest / "shared.pt").unlink()
    else:
        (newest / "checkpoint.json").unlink()
    state = make_state(tmp_path)
    assert state.load()
    assert state.committed_steps == 1
    # What has no record was never published: nothing is wrong with it.
    assert ("passed over" in capfd.readouterr().err) == (damage != "no record")


def test_what_an_earlier_life_left_unfinished_is_not_taken_and_goes(tmp_path):
    commit(make_state(tmp_path, every_steps=1), 1)
    unfinished = tmp_path / "writing-000000000002-0123abcd"
    shutil.copytree(tmp_path / "step-000000000001", unfinished)
    state = make_state(tmp_path, every_steps=1)
    assert state.load()
    assert state.committed_steps == 1
    commit(state, 2)
    assert names(tmp_path) == [f"step-{step:012}" for step in (1, 2, 3)]


def test_a_worker_of_an_older_world_publishes_nothing(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("BAGUARUN_GENERATION", "3")
    commit(make_state(tmp_path, every_steps=1), 1)
    assert json.loads((tmp_path / "step-000000000001/checkpoint.json").read_text())["generation"] == 3
    monkeypatch.setenv("BAGUARUN_GENERATION", "2")
    commit(make_state(tmp_path, every_steps=1), 2)
    assert names(tmp_path) == ["step-000000000001"]
    assert "is of a later World" in capfd.readouterr().err


def test_a_worker_whose_node_has_no_lease_publishes_nothing_and_deletes_nothing(tmp_path, capfd):
    state = make_state(tmp_path, every_steps=1, keep=1)
    commit(state, 1)
    state._folder.may_publish = lambda: False
    commit(state, 2)
    assert names(tmp_path) == ["step-000000000001"]
    assert capfd.readouterr().err.count("this node's lease in the store has ended") == 2
    state._folder.may_publish = lambda: True
    commit(state, 1)
    assert names(tmp_path) == ["step-000000000004"]


def test_a_folder_that_cannot_be_made_is_named_at_once(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(baguarun.errors.BaguarunError, match=r"cannot be written: .*file/ckpt"):
        make_state(tmp_path / "file" / "ckpt").save()


def test_a_write_that_fails_beside_training_is_told_and_training_goes_on(tmp_path, capfd):
    state = make_state(tmp_path, every_steps=1)
    commit(state, 1)
    shutil.rmtree(tmp_path)
    tmp_path.touch()
    commit(state, 2)
    assert state.committed_steps == 3
    assert capfd.readouterr().err.count("baguarun: no checkpoint: step") == 2
    with pytest.raises(baguarun.errors.BaguarunError, match="step 3"):
        state.save()


@pytest.mark.parametrize(
    ("settings", "words"), [({"every_steps": -1}, "every_steps=-1; want 0"), ({"keep": 0}, "keep=0; want 1")]
)
def test_settings_out_of_range_are_refused(settings, words):
    with pytest.raises(UsageError, match=words):
        Checkpoints(folder="f", **settings)


def test_saving_without_a_folder_says_what_to_write():
    with pytest.raises(UsageError, match=r"checkpoints=Checkpoints"):
        State(value=1).save()


def save_and_draw(folder) -> list[float]:
    torch.manual_seed(dist.get_rank())
    state = make_state(folder)
    state.save()
    return torch.rand(2).tolist()


def load_and_draw(folder) -> list[float]:
    assert make_state(folder).load()
    return torch.rand(2).tolist()


def test_each_rank_draws_the_random_numbers_that_were_its_own(tmp_path):
    kept = run_ranks(save_and_draw, 2, tmp_path)
    assert kept[0] != kept[1]
    assert run_ranks(load_and_draw, 2, tmp_path) == kept


def test_ranks_that_do_not_see_the_folder_are_sent_what_is_shared(tmp_path):
    """Two hosts with a disk each, as far as this test goes: each rank looks into a folder of its own."""
    assert run_ranks(train_with_own_disk, 2, tmp_path) == [None, None]
    assert names(tmp_path / "disk0") == ["step-000000000002"]
    assert not (tmp_path / "disk1").exists()
    # The nodes have changed places.
    assert run_ranks(load_with_others_disk, 2, tmp_path) == [2.0, 2.0]


def train_with_own_disk(folder) -> None:
    commit(make_state(folder / f"disk{dist.get_rank()}", every_steps=2), 2)


def load_with_others_disk(folder) -> float:
    state = make_state(folder / f"disk{1 - dist.get_rank()}")
    assert state.load()
    return state.value[0].item()
