from __future__ import annotations

import collections
import contextlib
import io
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import baguarun
from baguarun.elastic import Checkpoints, State
from baguarun.elastic.training.checkpoints import CheckpointError
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


@pytest.mark.parametrize("every_steps", [1000, 2])
def test_what_a_script_has_done_behind_a_commit_is_kept_where_training_is_left(tmp_path, every_steps):
    """Also where the commit has a checkpoint of its own, which was begun before."""
    state = make_state(tmp_path, every_steps=every_steps)
    for _ in range(2):
        state.commit()
    state.value = torch.ones(3)
    assert "step 2" in state._keep()
    assert names(tmp_path) == ["step-000000000002"]
    resumed = make_state(tmp_path)
    assert resumed.load() and torch.equal(resumed.value, torch.ones(3))
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


def test_where_none_can_be_read_training_does_not_begin_anew(tmp_path, capfd):
    commit(make_state(tmp_path, every_steps=1), 2)
    torch.save({"steps": collections.deque()}, tmp_path / "step-000000000001" / "shared.pt")
    (tmp_path / "step-000000000002" / "shared.pt").unlink()
    state = make_state(tmp_path)
    with pytest.raises(CheckpointError) as refusal:
        baguarun.elastic.run(lambda state: None)(state)
    said = str(refusal.value)
    assert said.startswith(f"none of the checkpoints in {tmp_path} can be read (")
    assert f"{tmp_path}/step-000000000001: it holds a collections.deque, which is not" in said
    assert f"{tmp_path}/step-000000000002: [Errno 2] No such file" in said
    assert said.endswith("or, to begin anew, another folder or this one without them")
    assert state.committed_steps == 0
    assert capfd.readouterr().err.count("passed over") == 2


def test_what_was_just_written_stays_beside_later_ones_that_nobody_can_read(tmp_path):
    commit(make_state(tmp_path, every_steps=1, keep=4), 4)
    for step in (3, 4):
        (tmp_path / f"step-{step:012}" / "shared.pt").unlink()
    state = make_state(tmp_path, keep=1)
    assert state.load()
    assert state.committed_steps == 2
    state.save()
    assert names(tmp_path) == [f"step-{step:012}" for step in (2, 3, 4)]
    commit(state, 1)
    state.save()
    assert names(tmp_path) == [f"step-{step:012}" for step in (3, 4)]
    again = make_state(tmp_path)
    assert again.load()
    assert again.committed_steps == 3


def test_a_write_that_ends_in_any_error_is_told(tmp_path, monkeypatch):
    def fail(value, file):
        raise ValueError("no such value")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(CheckpointError, match=r"step 0, .*: no such value"):
        make_state(tmp_path).save()


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
    monkeypatch.setenv("BAGUARUN_GENERATION", "2")
    of_older = make_state(tmp_path, every_steps=1)
    monkeypatch.setenv("BAGUARUN_GENERATION", "3")
    commit(make_state(tmp_path, every_steps=1), 1)
    assert json.loads((tmp_path / "step-000000000001/checkpoint.json").read_text())["generation"] == 3
    monkeypatch.setenv("BAGUARUN_GENERATION", "2")
    commit(of_older, 2)
    assert names(tmp_path) == ["step-000000000001"]
    assert "is of a later World" in capfd.readouterr().err


@pytest.mark.parametrize("generation", ["0", "1"])
def test_a_job_that_is_submitted_again_counts_its_worlds_anew_and_publishes(
    tmp_path, monkeypatch, capfd, generation
):
    monkeypatch.setenv("BAGUARUN_GENERATION", "3")
    commit(make_state(tmp_path, every_steps=1), 2)
    monkeypatch.setenv("BAGUARUN_GENERATION", generation)
    state = make_state(tmp_path, every_steps=1)
    assert state.load()
    commit(state, 1)
    assert names(tmp_path) == [f"step-{step:012}" for step in (1, 2, 3)]
    assert "no checkpoint" not in capfd.readouterr().err
    # A later World of that job has written in place of one of the first job's.
    monkeypatch.setenv("BAGUARUN_GENERATION", "2")
    later = make_state(tmp_path, every_steps=1)
    commit(later, 2)
    monkeypatch.setenv("BAGUARUN_GENERATION", generation)
    commit(state, 1)
    assert names(tmp_path) == [f"step-{step:012}" for step in (1, 2, 3)]
    assert "step-000000000001 is of a later World" in capfd.readouterr().err


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


def commit_without_a_folder(folder) -> tuple[int, str, str]:
    """In a World after the one that could write: this rank's steps, what it says, and what `save` raises."""
    state = make_state(folder, every_steps=1)
    commit(state, 1)
    state._folder.leave_world()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
        folder.touch()
    dist.barrier()
    with contextlib.redirect_stderr(io.StringIO()) as told:
        commit(state, 2)
    with pytest.raises(CheckpointError) as refusal:
        state.save()
    dist.barrier()
    if dist.get_rank() == 0:
        folder.unlink()
    dist.barrier()
    commit(state, 1)
    return state.committed_steps, told.getvalue(), str(refusal.value)


def test_a_folder_that_a_new_world_cannot_write_is_told_by_one_rank_and_training_goes_on(tmp_path):
    folder = tmp_path / "kept"
    reason = f"the checkpoints' folder cannot be written: {folder}: [Errno 17] File exists: '{folder}'"
    told = f"baguarun: no checkpoint: {reason}\n" * 2
    assert run_ranks(commit_without_a_folder, 2, folder) == [(4, told, reason), (4, "", reason)]
    # It goes on there as soon as it can.
    assert names(folder) == ["step-000000000004"]


def save_where_one_rank_cannot_look(folder) -> str:
    state = make_state(folder)

    def refuse(path, **_settings):
        raise PermissionError(13, "Permission denied", str(path))

    if dist.get_rank() == 1:
        Path.exists = refuse
    else:
        # Nor take back what it has put there to be seen.
        Path.unlink = refuse
    with contextlib.redirect_stderr(io.StringIO()) as told:
        state.save()
    return told.getvalue()


def test_a_rank_that_cannot_look_into_the_folder_does_not_see_it(tmp_path):
    told, _ = run_ranks(save_where_one_rank_cannot_look, 2, tmp_path)
    assert told.startswith("baguarun: 1 of 2 workers do not see rank 0's folder")
    assert sorted(path.name for path in tmp_path.glob("step-*/*")) == [
        "checkpoint.json",
        "rank-00000.pt",
        "shared.pt",
    ]


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


def go_on_from_nothing(folder) -> str:
    # One rank cannot read it, and all end.
    if dist.get_rank() == 1:
        os.truncate(folder / "step-000000000000" / "rank-00001.pt", 10)
    dist.barrier()
    with pytest.raises(CheckpointError) as refusal:
        make_state(folder).load()
    return str(refusal.value)


def test_what_one_rank_cannot_read_ends_all(tmp_path):
    run_ranks(save_and_draw, 2, tmp_path)
    said = run_ranks(go_on_from_nothing, 2, tmp_path)
    assert said[0] == said[1]
    assert "step-000000000000: " in said[0]


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
