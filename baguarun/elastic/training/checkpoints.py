"""Checkpoints in a folder: written beside training, published by a rename, read back by any number of ranks.

FOLDER/step-000000000500/   shared.pt             what all ranks have in common, by rank 0
                            rank-00003.pt         what is rank 3's own
                            checkpoint.json       who wrote it; a checkpoint without it does not exist
FOLDER/writing-.../         one that is being written, or was when the job died
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import shutil
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from baguarun.comm.extension import load_extension
from baguarun.comm.groups import read_worker_env
from baguarun.elastic.training.snapshot import Snapshot
from baguarun.errors import BaguarunError, UsageError

_PREFIX = "step-"
_OTHERS_PATIENCE_S = 120.0
"""How long rank 0 waits for the files of ranks that share the folder."""


class CheckpointError(BaguarunError):
    """A checkpoint could not be written or read; the message names the file and the reason."""


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Where, how often and how many. All workers should see the same folder: a World of other nodes finds
    it then, and each worker's own state (error feedback, random numbers) is kept too."""

    folder: str | Path
    """Made if it is not there."""
    every_steps: int = 0
    """Write at every so manyth commit; 0: only at `State.save()`."""
    keep: int = 3
    """How many to keep; older ones are deleted."""

    def __post_init__(self) -> None:
        if self.every_steps < 0:
            raise UsageError(f"Checkpoints: every_steps={self.every_steps}; want 0 or more")
        if self.keep < 1:
            raise UsageError(f"Checkpoints: keep={self.keep}; want 1 or more")


@dataclass(frozen=True, kw_only=True)
class _Writers:
    """Who writes one checkpoint: the ranks of one World that see the folder."""

    rank: int
    world_size: int
    generation: int
    sharing: frozenset[int]
    life: str
    """Tells our unfinished checkpoints from those of another World or life of the job. Equal on all ranks."""
    is_over: threading.Event
    """The World has ended: who has not written its part never will."""


class CheckpointFolder:
    """Writes and reads one job's checkpoints. Threads: the one that trains; writes on a thread of its own."""

    def __init__(self, settings: Checkpoints) -> None:
        self._settings = settings
        self._root = Path(settings.folder)
        self._writer: threading.Thread | None = None
        self._failure: str | None = None
        self._writers: _Writers | None = None
        self._begun = 0
        """Number of the last one in this World, equal on all ranks."""
        # Of Worlds before ours, or of an earlier life of the job, which counted its generations for itself.
        self._found_here = self._records()
        self.may_publish: Callable[[], bool] = lambda: True
        """Whether the job cannot be going on elsewhere. Called on the writer's thread."""

    @property
    def root(self) -> Path:
        return self._root

    def is_due(self, steps: int) -> bool:
        """Whether a checkpoint belongs to the commit of that number."""
        every = self._settings.every_steps
        return every > 0 and steps % every == 0

    def write(self, snapshot: Snapshot, *, wait: bool) -> None:
        """Write `snapshot`; with `wait`, until it is published, raising what went wrong. Collective."""
        self._join()
        self.report()
        if self._writers is None:
            try:
                self._writers = self._find_writers()
            except CheckpointError as error:
                # On all ranks, and looked for again when the next one is due.
                if wait:
                    raise
                if _rank() == 0:
                    self._failure = str(error)
                return
            self._begun = 0
        # Two of one commit must not meet: others may begin the second one while rank 0 publishes the first.
        self._begun += 1
        name = f"writing-{snapshot.steps:012}-{self._writers.life}-{self._begun:06}"
        self._writer = threading.Thread(
            target=self._write,
            args=(snapshot, self._writers, self._root / name),
            name="baguarun-checkpoint",
            daemon=True,
        )
        self._writer.start()
        if not wait:
            return
        self._join()
        failures = [found for found in _gather(self._failure) if found is not None]
        self._failure = None
        if failures:
            raise CheckpointError(failures[0])

    def leave_world(self) -> None:
        """The World has ended. What it was writing is finished only if all parts of it are there."""
        if self._writers is not None:
            self._writers.is_over.set()
            self._writers = None

    def report(self) -> None:
        """Say once what went wrong with a write beside training, which goes on all the same."""
        if self._failure is not None:
            print(f"baguarun: no checkpoint: {self._failure}", file=sys.stderr, flush=True)
            self._failure = None

    def close(self) -> None:
        self._join()
        self.report()

    def read(self) -> Snapshot | None:
        """The newest checkpoint that all ranks can have; None if there is none. Collective.

        Raises `CheckpointError` on all ranks if there are some and none can be read: to begin anew beside
        them is for the user to decide.
        """
        here = {path.name: path for path in self._published()}
        everywhere = _gather(sorted(here))
        troubles = []
        for name in sorted({name for names in everywhere for name in names}, reverse=True):
            reader = next(rank for rank, names in enumerate(everywhere) if name in names)
            try:
                return self._read(name, here.get(name), reader)
            except CheckpointError as trouble:
                troubles.append(str(trouble))
                if _rank() == 0:
                    print(f"baguarun: checkpoint passed over: {trouble}", file=sys.stderr, flush=True)
        if not troubles:
            return None
        raise CheckpointError(
            f"none of the checkpoints in {self._root} can be read ({'; '.join(troubles)}). Want one there "
            "that can or, to begin anew, another folder or this one without them"
        )

    def _read(self, name: str, path: Path | None, reader: int) -> Snapshot:
        """The checkpoint of that name, what is shared being sent by rank `reader`.

        Raises `CheckpointError` on all ranks if it is damaged.
        """
        rank, shared, own, trouble = _rank(), None, None, None
        try:
            if rank == reader and path is not None:
                shared = _load(path / "shared.pt")
            own = self._own_part(path, rank)
        except Exception as error:  # noqa: BLE001 - whatever a damaged file makes torch raise
            trouble = f"{path}: {_reason(error)}"
        troubles = [found for found in _gather(trouble) if found is not None]
        if troubles:
            raise CheckpointError(troubles[0])
        shared = _send_from(reader, shared)
        assert shared is not None
        lacking = ""
        if any(part is None for part in _gather(None if own is None else True)):
            own = None
            lacking = (
                " without what was each worker's own (error feedback, random numbers): the number of workers "
                "has changed, or not all of them see the folder"
            )
        if rank == 0:
            print(f"baguarun: going on from {name}{lacking}", file=sys.stderr, flush=True)
        return Snapshot(own=own, **shared)

    def _own_part(self, path: Path | None, rank: int) -> Any:
        if path is None:
            return None
        facts = json.loads((path / "checkpoint.json").read_text())
        file = path / f"rank-{rank:05}.pt"
        return _load(file) if facts["world_size"] == _world_size() and file.exists() else None

    def _write(self, snapshot: Snapshot, writers: _Writers, writing: Path) -> None:
        """On the writer's thread."""
        rank = writers.rank
        if rank not in writers.sharing:
            return
        try:
            writing.mkdir(parents=True, exist_ok=True)
            if rank == 0:
                shared = {"steps": snapshot.steps, "places": snapshot.places, "shared": snapshot.shared}
                _save(shared, writing / "shared.pt")
            _save(snapshot.own, writing / f"rank-{rank:05}.pt")
            if rank == 0:
                self._publish(writing, snapshot.steps, writers)
        except Exception as error:  # noqa: BLE001 - nobody else would say what ended this thread
            self._failure = f"step {snapshot.steps}, {writing}: {error}"
            with contextlib.suppress(OSError):
                (writing / f"rank-{rank:05}.failed").touch()
            if rank == 0:
                shutil.rmtree(writing, ignore_errors=True)

    def _publish(self, writing: Path, steps: int, writers: _Writers) -> None:
        give_up_at_s = time.monotonic() + _OTHERS_PATIENCE_S
        awaited = [writing / f"rank-{rank:05}.pt" for rank in sorted(writers.sharing)]
        while missing := [file.name for file in awaited if not file.exists()]:
            if failed := [file.stem for file in writing.glob("*.failed")]:
                raise CheckpointError(f"{', '.join(sorted(failed))} could not write")
            if writers.is_over.is_set() or load_extension().interruption() is not None:
                raise CheckpointError(f"the World changed before {', '.join(missing)} came")
            if time.monotonic() > give_up_at_s:
                raise CheckpointError(f"{', '.join(missing)} did not come in {_OTHERS_PATIENCE_S:g} s")
            time.sleep(0.02)
        if not self.may_publish():
            raise CheckpointError(
                "this node's lease in the store has ended, and the job may be going on elsewhere"
            )
        for name, record in self._records().items():
            if record["generation"] > writers.generation and record != self._found_here.get(name):
                raise CheckpointError(f"{name} is of a later World; this worker is of one that ended")
        facts = {
            "steps": steps,
            "world_size": writers.world_size,
            "generation": writers.generation,
            "written_by": writers.life,
        }
        (writing / "checkpoint.json").write_text(json.dumps(facts) + "\n")
        target = self._root / f"{_PREFIX}{steps:012}"
        if target.exists():
            # Of an earlier life that had come as far, or of the same commit before the script was done behind
            # it: this one is whole, too.
            os.rename(target, replaced := writing.with_name(f"{writing.name}-replaced"))
            os.rename(writing, target)
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            os.rename(writing, target)
        _sync_folder(self._root)
        # Later steps that training has gone back behind, as nobody could read them, count for nothing.
        until_now = [path for path in self._published() if path.name <= target.name]
        for old in until_now[: -self._settings.keep]:
            shutil.rmtree(old, ignore_errors=True)
        for stale in self._root.glob("writing-*"):
            # Not those of later steps: another rank may have begun the next one.
            if stale.name < writing.name:
                shutil.rmtree(stale, ignore_errors=True)

    def _published(self) -> list[Path]:
        """Oldest first."""
        return sorted(path for path in self._root.glob(f"{_PREFIX}*") if (path / "checkpoint.json").exists())

    def _records(self) -> dict[str, dict[str, Any]]:
        """Who wrote each published checkpoint, by its name; without those that are damaged."""
        found = {}
        for path in self._published():
            with contextlib.suppress(OSError, ValueError):
                found[path.name] = json.loads((path / "checkpoint.json").read_text())
        return found

    def _find_writers(self) -> _Writers:
        """Ranks that see what rank 0 writes. Collective; raises `CheckpointError` on all if it cannot."""
        life = _gather(uuid.uuid4().hex[:8])[0]
        token = self._root / f"probe-{life}"
        trouble = None
        if _rank() == 0:
            try:
                self._root.mkdir(parents=True, exist_ok=True)
                token.touch()
            except OSError as error:
                trouble = f"{self._root}: {error}"
        if (found := _gather(trouble)[0]) is not None:
            raise CheckpointError(f"the checkpoints' folder cannot be written: {found}")
        sharing = {rank for rank, sees in enumerate(_gather(_rank() == 0 or _exists(token))) if sees}
        _gather(None)
        if _rank() == 0:
            # An empty file that stays is no harm, and a rank that raises alone would be waited for.
            with contextlib.suppress(OSError):
                token.unlink()
            if len(sharing) < _world_size():
                print(
                    f"baguarun: {_world_size() - len(sharing)} of {_world_size()} workers do not see rank "
                    f"0's folder {self._root}: their own state (error feedback, random numbers) is not kept",
                    file=sys.stderr,
                    flush=True,
                )
        return _Writers(
            rank=_rank(),
            world_size=_world_size(),
            generation=read_worker_env().generation,
            sharing=frozenset(sharing),
            life=life,
            is_over=threading.Event(),
        )

    def _join(self) -> None:
        if self._writer is not None:
            self._writer.join()
            self._writer = None


def _save(value: Any, path: Path) -> None:
    """Write-then-rename: whoever sees the name sees the whole file."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(partial, path)


def _exists(path: Path) -> bool:
    """Whether this rank can see that file."""
    try:
        return path.exists()
    except OSError:
        return False


def _load(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _reason(error: Exception) -> str:
    """Why a file could not be read; torch's advice on one that holds a foreign class is left out."""
    foreign = re.search(r"\bGLOBAL (\S+)", str(error))
    if isinstance(error, pickle.UnpicklingError) and foreign is not None:
        return f"it holds a {foreign[1]}, which is not safe to read"
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _gather(value: Any) -> list[Any]:
    """`value` of all ranks."""
    if _world_size() == 1:
        return [value]
    found: list[Any] = [None] * _world_size()
    dist.all_gather_object(found, value)
    return found


def _send_from(rank: int, value: Any) -> Any:
    """`value` of that rank, on all."""
    if _world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=rank)
    return box[0]
