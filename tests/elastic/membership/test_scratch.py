from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from baguarun.elastic.membership.scratch import ScratchFolder, living_folders
from baguarun.errors import SetupError

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def test_a_folder_lives_until_it_is_removed() -> None:
    mine = ScratchFolder("mark-")
    (mine.path / "file").touch()
    mine.remove()
    mine.remove()
    assert not mine.path.exists()


def test_what_a_killed_process_left_is_removed_by_the_next_and_what_is_in_use_is_not() -> None:
    script = (
        "import os, signal\n"
        "from baguarun.elastic.membership.scratch import ScratchFolder\n"
        "print(ScratchFolder('mark-').path, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    left, used = Path(done.stdout.strip()), ScratchFolder("other-")
    assert left.is_dir()
    mine = ScratchFolder("mark-")
    assert not left.exists()
    ScratchFolder("other-").remove()
    assert used.path.is_dir() and mine.path.is_dir()


def test_folders_of_living_owners_are_found_and_looking_at_them_changes_nothing(tmp_path: Path) -> None:
    mine = ScratchFolder("mark-")
    (tmp_path / "mark-without-an-owner").mkdir()
    left = tmp_path / "mark-left"
    left.mkdir()
    (left / "owner.lock").touch()
    assert living_folders("mark-") == [mine.path] == living_folders("mark-")
    mine.remove()
    assert living_folders("mark-") == []


@pytest.mark.root
def test_a_folder_that_somebody_else_made_is_not_believed() -> None:
    planted = ScratchFolder("mark-")
    os.chown(planted.path, 65534, 65534)
    assert living_folders("mark-") == []
    planted.remove()


def test_no_place_for_temporary_files_is_told_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with pytest.raises(SetupError, match="set TMPDIR to a folder that can be written"):
        ScratchFolder("mark-")


def test_programs_that_are_started_do_not_keep_the_folder_locked() -> None:
    mine = ScratchFolder("mark-")
    child = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        inherited = {os.readlink(f"/proc/{child.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{child.pid}/fd")}
        assert not any("owner.lock" in target for target in inherited)
    finally:
        child.kill()
        child.wait()
        mine.remove()
