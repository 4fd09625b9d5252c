"""`State`: what training goes on from, wherever and on however many workers it goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from baguarun.comm import timeline
from baguarun.comm.ddp import DistributedDataParallel
from baguarun.elastic.training import comparison, values
from baguarun.elastic.training.checkpoints import CheckpointFolder, Checkpoints
from baguarun.elastic.training.dealing import Deal
from baguarun.elastic.training.default_group import has_others
from baguarun.elastic.training.learning_rates import scale_learning_rates
from baguarun.elastic.training.places import index_of
from baguarun.elastic.training.random_state import seeded_for_epoch
from baguarun.elastic.training.sampler import ElasticSampler, Place
from baguarun.elastic.training.snapshot import Snapshot
from baguarun.elastic.training.steps import MicroBatches
from baguarun.errors import UsageError


class CommitWatcher(Protocol):
    """Who is told of commits: what resizes the job in place."""

    def before_commit(self) -> None:
        """A commit comes next. May raise, and the step does not count."""

    def after_commit(self) -> None:
        """The commit is done on this rank."""

    def at_boundary(self, write_if_due: Callable[[], None], *, may_wait: bool) -> None:
        """The commit is over but for a checkpoint. May raise to end training in this World; `may_wait`: or
        leave that to `check`, which is called before the next step begins."""

    def check(self) -> None:
        """Raise again what ended training in this World, if the script has caught it."""


class State:
    """Holds everything that training consists of: `State(model=..., optimizer=..., epoch=0)`.

    What is given by name is there as an attribute: objects with state_dict and load_state_dict (models,
    optimizers, schedulers, GradScaler), and plain values (numbers, strings, tensors, lists and dicts), which
    may be assigned anew. Wrap the model first. Raises `UsageError` for what cannot be kept, be it here, where
    it is assigned or where it is first written; of numpy's numbers Python's are kept.

    `commit` ends a step: only what is committed counts. With `checkpoints`, the state is written every so
    often, and `baguarun.elastic.run` goes on from the newest.

    Threads: the one that trains.
    """

    def __init__(self, *, checkpoints: Checkpoints | None = None, **captured: Any) -> None:
        for name in captured:
            if hasattr(type(self), name) or name.startswith("_"):
                raise UsageError(f"State: '{name}' is a name of State itself; want another one")
        self._captured = {name: values.accepted(name, value) for name, value in captured.items()}
        self._folder = None if checkpoints is None else CheckpointFolder(checkpoints)
        self._steps = 0
        self._samplers: list[ElasticSampler] = []
        # Places in the data of loaders that have not been seen yet.
        self._places: list[dict[str, Any]] = []
        # Of the samplers, at the last commit.
        self._committed: list[Place] = []
        self._claimed: set[int] = set()
        # Those of them that are known to be alike on all ranks that began together.
        self._compared: set[int] = set()
        self._began_together = True
        self._lost_samples = 0
        self._missed_samples = 0
        self._first_world_size: int | None = None
        self._open: tuple[ElasticSampler, Deal, MicroBatches] | None = None
        self._watcher: CommitWatcher | None = None
        scale_learning_rates(
            [value for value in captured.values() if isinstance(value, torch.optim.Optimizer)],
            lambda: self._samplers[0].lr_factor if self._samplers else 1.0,
        )

    def __getattr__(self, name: str) -> Any:
        captured = self.__dict__.get("_captured", {})
        if name not in captured:
            raise AttributeError(f"State holds no '{name}'; it holds {', '.join(sorted(captured))}")
        return captured[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name not in self._captured:
            if not name.startswith("_"):
                raise AttributeError(
                    f"State holds no '{name}'; name it when the state is made: State({name}=...)"
                )
            super().__setattr__(name, value)
            return
        self._captured[name] = values.accepted(name, value)

    @property
    def committed_steps(self) -> int:
        """Steps since training began, over all lives of the job."""
        return self._steps

    @property
    def lost_samples(self) -> int:
        """Samples whose effect was lost with a worker, as far as is known: it had trained on them and not
        shared yet what came of it. Only where an algorithm lets replicas differ; they are dealt again, but
        for `missed_samples`."""
        return self._lost_samples

    @property
    def missed_samples(self) -> int:
        """Those of them, about, that were of an epoch which the others had ended: nobody trains on them in
        that epoch any more."""
        return self._missed_samples

    def steps(self, loader: DataLoader[Any]) -> Iterator[MicroBatches]:
        """The steps from here to the end of the epoch, each as this rank's micro-batches.

        `loader` has `batch_sampler=ElasticSampler(...)`. Call `commit` at the end of each step. When the loop
        ends the next call is for the next epoch. Collective where workers begin together: raises `UsageError`
        on all of them if their data, settings or places differ.
        """
        self._check()
        sampler = self._sampler_of(loader)
        self._require_alike(sampler)
        models = [value for value in self._captured.values() if isinstance(value, DistributedDataParallel)]
        sampler.leaves_none_out = len(models) > 1
        with seeded_for_epoch(self._samplers.index(sampler), sampler.epoch):
            batches = iter(loader)
        for deal in sampler.deals():
            step = MicroBatches(batches, deal, sampler, models)
            self._open = (sampler, deal, step)
            yield step
            self._check()
            if self._open is not None:
                raise UsageError("State.steps: the step before was not committed; want state.commit() in it")
        sampler.begin_epoch()

    def commit(self) -> None:
        """The step is done on this rank: its samples are behind us. Collective where a checkpoint is due."""
        self._check()
        with timeline.span("commit", "elastic"):
            self._commit()

    def _commit(self) -> None:
        is_in_steps = self._open is not None
        if self._open is not None:
            _, _, step = self._open
            if not step.is_done and len(step) > 0:
                raise UsageError(
                    "State.commit: not all micro-batches of the step were used; want a loop over all of them"
                )
        if self._watcher is not None:
            self._watcher.before_commit()
        if self._open is not None:
            sampler, deal, _ = self._open
            sampler.cursor = deal.end
            self._open = None
        self._steps += 1
        self._committed = [sampler.place for sampler in self._samplers]
        if self._watcher is not None:
            self._watcher.after_commit()
        if self._watcher is None:
            self._write_if_due()
        else:
            # What the script has left to do in this round of its loop is done first: `steps` asks again.
            self._watcher.at_boundary(self._write_if_due, may_wait=is_in_steps)

    def save(self) -> None:
        """Write a checkpoint now, and wait until it is there. Collective; raises what went wrong."""
        self._require_folder().write(self._snapshot(), wait=True)

    def load(self) -> bool:
        """Go on from the newest checkpoint; False if there is none. Collective. Raises `CheckpointError` if
        there are some and none can be read."""
        snapshot = self._require_folder().read()
        if snapshot is None:
            return False
        self._adopt(snapshot)
        return True

    def resume(self) -> None:
        """`load`, where there are checkpoints. Called by `baguarun.elastic.run`."""
        if self._folder is not None:
            self.load()

    def close(self) -> None:
        """Wait for checkpoints that are being written."""
        if self._folder is not None:
            self._folder.close()

    def _write_if_due(self) -> None:
        if self._folder is not None:
            self._folder.report()
            if self._folder.is_due(self._steps):
                self._folder.write(self._snapshot(), wait=False)

    def _keep(self) -> str:
        """Have a checkpoint of the last commit, and wait until it is there; says so, if there is a folder.
        Collective; raises `CheckpointError`."""
        if self._folder is None:
            return ""
        # Also where one of this commit is under way: the script has gone on behind it.
        self._folder.write(self._snapshot(), wait=True)
        return f"the state at step {self._steps} is kept in {self._folder.root}"

    def _require_folder(self) -> CheckpointFolder:
        if self._folder is None:
            raise UsageError("State: no checkpoints; want State(..., checkpoints=Checkpoints('folder'))")
        return self._folder

    def _snapshot(self) -> Snapshot:
        return Snapshot.take(self._captured, self._steps, self._all_places())

    def _all_places(self, *, committed: bool = False) -> list[dict[str, Any]]:
        """Of all samplers, seen or not: now, or at the last commit."""
        own = self._committed if committed else [sampler.place for sampler in self._samplers]
        places = [sampler.state_dict(place) for sampler, place in zip(self._samplers, own, strict=True)]
        return places + self._places[len(places) :]

    def _adopt(self, snapshot: Snapshot) -> None:
        snapshot.put_back(self._captured)
        self._go_to(snapshot.steps, snapshot.places)

    def _go_to(self, steps: int, places: list[dict[str, Any]], *, together: bool = True) -> None:
        """Stand there in training and in the data, in the present World, which all ranks begin, or (not
        `together`) some of which have gone on from another one."""
        self._steps = steps
        self._places = places
        self._open = None
        self._claimed.clear()
        self._compared.clear()
        self._began_together = together
        for sampler, place in zip(self._samplers, places, strict=False):
            sampler.load_state_dict(place)
        for sampler in self._samplers:
            sampler.enter_world()
        self._committed = [sampler.place for sampler in self._samplers]

    def _count_open_step(self) -> None:
        """The step under way is applied here, as far as it goes: count it."""
        if self._open is not None:
            sampler, deal, _ = self._open
            sampler.cursor = deal.end
            self._open = None
        self._steps += 1
        self._committed = [sampler.place for sampler in self._samplers]

    def _check(self) -> None:
        if self._watcher is not None:
            self._watcher.check()

    def _sampler_of(self, loader: DataLoader[Any]) -> ElasticSampler:
        sampler = loader.batch_sampler
        if not isinstance(sampler, ElasticSampler):
            raise UsageError(
                "State.steps: the loader deals its batches itself; want "
                "DataLoader(data, batch_sampler=baguarun.elastic.ElasticSampler(data, batch_size))"
            )
        if sampler in self._samplers:
            self._claimed.add(self._samplers.index(sampler))
            return sampler
        sampler.enter_world()
        index = index_of(sampler, self._places, self._claimed)
        if index < len(self._places):
            sampler.load_state_dict(self._places[index])
        else:
            sampler.begin_with(self._first_world_size or sampler.first_world_size)
        # Places before that one are of loaders that the script is done with, or uses later.
        others = [ElasticSampler.standing_at(place) for place in self._places[len(self._samplers) : index]]
        self._samplers += others
        self._committed += [other.place for other in others]
        # In place of one that the training function made anew when it was called again.
        self._samplers[index : index + 1] = [sampler]
        self._claimed.add(index)
        self._committed[index : index + 1] = [sampler.place]
        if has_others():
            self._require_wrapped()
        return sampler

    def _require_alike(self, sampler: ElasticSampler) -> None:
        """Once among ranks that begin together, who all come by here. A newcomer's sampler is compared when
        it takes over its place, and what is wrong with it is no reason for others to end or to wait."""
        index = self._samplers.index(sampler)
        if has_others() and self._began_together and index not in self._compared:
            comparison.require_same_samples(f"State.steps' loader {index}", sampler)
            self._compared.add(index)

    def _require_wrapped(self) -> None:
        if not any(isinstance(value, DistributedDataParallel) for value in self._captured.values()):
            raise UsageError(
                "State.steps: several workers, and no baguarun.DistributedDataParallel in the state; want "
                "State(model=baguarun.DistributedDataParallel(model, ...))"
            )
