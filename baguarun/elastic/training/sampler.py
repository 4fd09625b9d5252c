"""Which samples come next: an order per epoch, and a place in it that any World can go on from."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from baguarun.elastic.training.dealing import Deal, deals
from baguarun.elastic.training.dealt import Account, Settlement, Spans, complement, merge, size, translate
from baguarun.errors import UsageError

Place = tuple[int, int, Spans, int]
"""Where a sampler stands: `epoch`, `cursor`, what is left of the epoch, workers at the beginning."""

_OPTIONAL_SETTINGS = ("shuffle", "seed", "drop_last", "policy", "name")

FIRST_SAMPLES = "first_samples"
"""In a place to go on from, where the step that comes next is applied already: with so many samples, which
the present World would maybe not deal."""


class BatchPolicy(enum.Enum):
    """What becomes of the samples per step when the number of workers changes."""

    CONSTANT = "constant"
    """They stay `batch_size` times the number of workers that training began with."""
    SCALE_LR = "scale_lr"
    """`batch_size` per worker; learning rates follow in proportion (Goyal et al., arXiv 1706.02677)."""
    FIXED_PER_WORKER = "fixed_per_worker"
    """`batch_size` per worker; learning rates stay."""


class ElasticSampler(Sampler[list[int]]):
    """Deals each epoch's samples to the ranks, every one exactly once whatever becomes of the World.

    Give it to the loader: `DataLoader(data, batch_sampler=ElasticSampler(data, 32))`, and the loader to
    `State.steps`, which moves the place in the epoch at every commit. It yields this rank's micro-batches
    from there to the end of the epoch.

    Threads: the one that trains.
    """

    def __init__(
        self,
        data: Sized,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        policy: str = BatchPolicy.CONSTANT.value,
        name: str = "",
    ) -> None:
        """`batch_size`: samples of one worker in one step when training begins, and the most in one
        micro-batch ever. `drop_last` leaves out an epoch's last step if it is short. Equal on all ranks.

        `name` tells loaders of the same data and settings apart, for a script that goes on and does not use
        them in the order in which they were first used.
        """
        if batch_size < 1:
            raise UsageError(f"ElasticSampler: batch_size={batch_size}; want at least 1")
        policies = [known.value for known in BatchPolicy]
        if policy not in policies:
            raise UsageError(f"ElasticSampler: policy={policy!r}; want one of {', '.join(policies)}")
        self._length = len(data)
        # Also of numpy's numbers, which could not be read back.
        self._batch_size = int(batch_size)
        self._shuffle = bool(shuffle)
        self._seed = int(seed)
        self._drop_last = bool(drop_last)
        self._policy = BatchPolicy(policy)
        self.name = str(name)
        """Which of a script's loaders this is; empty if only its settings tell."""
        self._rank, self._world_size = _own_place()
        # None until training begins: a script may make it before its process group.
        self._first_world_size: int | None = None
        self._order: list[int] = []
        self._order_epoch = -1
        self.epoch = 0
        """Number of the epoch, which seeds its order."""
        self.cursor = 0
        """Samples of the epoch that are behind us."""
        # Places of the epoch's order that were left when ranks out of step lost one; none: all from there on.
        self._left: Spans = []
        # Where dealing in this World and epoch began.
        self._first_cursor = 0
        # Samples of the step there, if it is gone through once more and was one of another World.
        self._first_samples: int | None = None
        self._deals_nothing = False
        self.leaves_none_out = False
        """Whether a rank without a sample in a step is given another one's, to go through it like all."""

    @property
    def global_batch(self) -> int:
        """Samples of all ranks in a full step."""
        constant = self._policy is BatchPolicy.CONSTANT
        return self._batch_size * (self.first_world_size if constant else self._world_size)

    @property
    def lr_factor(self) -> float:
        """What learning rates are to be multiplied by in this World."""
        return self._world_size / self.first_world_size if self._policy is BatchPolicy.SCALE_LR else 1.0

    @property
    def first_world_size(self) -> int:
        """Workers that training began on, or would begin on now."""
        return self._first_world_size or self._world_size

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def length(self) -> int:
        """Samples in an epoch."""
        return self._length

    def deals(self) -> Iterator[Deal]:
        """The steps from here to the end of the epoch."""
        return self._deals_from(self.cursor)

    def _deals_from(self, first: int) -> Iterator[Deal]:
        if self._first_samples is not None and first == self._first_cursor:
            end = first + self._first_samples
            yield Deal(first=first, end=end, world_size=self._world_size, batch_size=self._batch_size)
            first = end
        yield from deals(
            first,
            self._length,
            global_batch=self.global_batch,
            world_size=self._world_size,
            batch_size=self._batch_size,
            drop_last=self._drop_last,
        )

    def __iter__(self) -> Iterator[list[int]]:
        if self._deals_nothing:
            return
        order = self._sequence()
        for deal in self.deals():
            for micro_batch in self.micro_batches(deal):
                yield order[micro_batch.start : micro_batch.stop]

    def micro_batches(self, deal: Deal) -> list[range]:
        """What this rank is given in that step, as places in what is dealt."""
        own = deal.micro_batches(self._rank)
        return [range(deal.first, deal.first + 1)] if self.leaves_none_out and not own else own

    def __len__(self) -> int:
        """This rank's micro-batches from here to the end of the epoch."""
        return sum(len(self.micro_batches(deal)) for deal in self.deals())

    @contextmanager
    def dealing_nothing(self) -> Iterator[None]:
        """Who iterates meanwhile finds no sample, whatever the place."""
        self._deals_nothing = True
        try:
            yield
        finally:
            self._deals_nothing = False

    def begin_epoch(self) -> None:
        """Go to the start of the next epoch."""
        self.epoch += 1
        self.cursor = self._first_cursor = 0
        self._left, self._first_samples = [], None

    def enter_world(self) -> None:
        """Take over this process's present rank and world size."""
        self._rank, self._world_size = _own_place()
        self._first_cursor = self.cursor

    def account(self, *, shared_to: tuple[int, int], is_whole: bool) -> Account:
        """What this rank knows to be trained on. All before the epoch and place `shared_to`, as `cursor`
        counts, was shared by all ranks; with `is_whole`, all before the cursor was."""
        if is_whole:
            shared_to = self.epoch, self.cursor
        elif shared_to[0] == self.epoch or self._first_cursor > 0:
            # Before that all ranks were alike, or what was not is carried over (`dealt.carry_over`).
            place = shared_to[1] if shared_to[0] == self.epoch else 0
            shared_to = self.epoch, max(place, self._first_cursor)
        own = []
        for deal in self._deals_from(self._first_cursor):
            if deal.end > self.cursor:
                break
            share = deal.share(self._rank)
            own.append((share.start, share.stop))
        return Account(
            epoch=self.epoch,
            own=self._in_order(own),
            shared=self._in_order([(0, shared_to[1])]) if shared_to[0] == self.epoch else [],
            dealt=self._in_order([(0, self.cursor)]),
            shared_to=shared_to,
        )

    def go_on_from(self, settlement: Settlement) -> None:
        """Deal what is left of that epoch."""
        self.epoch = settlement.epoch
        self._left = complement(settlement.done, self._length)
        self.cursor = self._first_cursor = size(settlement.done)

    @classmethod
    def standing_at(cls, state: dict[str, Any]) -> ElasticSampler:
        """Of the data and settings of `state_dict`, and in its place: for a loader that is not there yet."""
        settings = {name: state[name] for name in _OPTIONAL_SETTINGS if name in state}
        sampler = cls(range(state["length"]), state["batch_size"], **settings)
        sampler.load_state_dict(state)
        return sampler

    def begin_with(self, world_size: int) -> None:
        """Training began on so many workers, whatever their number is now."""
        self._first_world_size = world_size

    @property
    def place(self) -> Place:
        """All of `state_dict` that changes. Taken at every commit."""
        return self.epoch, self.cursor, self._left, self.first_world_size

    @property
    def _settings(self) -> dict[str, Any]:
        """What decides, with the place, which rank is dealt which sample when. Equal on all ranks."""
        return {
            "length": self._length,
            "batch_size": self._batch_size,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "drop_last": self._drop_last,
            "policy": self._policy.value,
            "name": self.name,
        }

    def state_dict(self, place: Place | None = None) -> dict[str, Any]:
        """The present place, or `place`, equal on all ranks."""
        epoch, cursor, left, first_world_size = place or self.place
        return {
            "epoch": epoch,
            "cursor": cursor,
            "left": [list(span) for span in left],
            "first_world_size": first_world_size,
            **self._settings,
        }

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Whether that is a place in the same order of the same data, of this name or of none."""
        return next(self._differences(state), None) is None

    def _differences(self, state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Names of settings, and what they are here."""
        for name, here in self._settings.items():
            # Early checkpoints have not all of them, and a loader may be given a name later.
            kept = state.get(name, here)
            if kept != here and not (name == "name" and kept == ""):
                yield name, here

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there, in a World of any size. Raises `UsageError` if the order would be another."""
        for name, here in self._differences(state):
            raise UsageError(
                f"ElasticSampler: the state was kept with {name}={state[name]!r}, here it is {here!r}; "
                "want the same data and settings, else samples would be left out or repeated"
            )
        self.epoch, self.cursor = int(state["epoch"]), int(state["cursor"])
        self._left = [(first, end) for first, end in state.get("left", [])]
        self._first_cursor = self.cursor
        self._first_samples = state.get(FIRST_SAMPLES)
        self._first_world_size = int(state["first_world_size"])

    def _segments(self) -> Spans:
        """The sequence that is dealt, in spans of the epoch's order."""
        if not self._left:
            return [(0, self._length)]
        return complement(self._left, self._length) + self._left

    def _in_order(self, spans: Spans) -> Spans:
        segments = self._segments()
        return merge(part for span in spans for part in translate(span, segments))

    def _sequence(self) -> list[int]:
        order = self._order_of_epoch()
        if not self._left:
            return order
        return [sample for first, end in self._segments() for sample in order[first:end]]

    def _order_of_epoch(self) -> list[int]:
        if self._order_epoch != self.epoch:
            if self._shuffle:
                generator = torch.Generator().manual_seed(self._seed + self.epoch)
                self._order = torch.randperm(self._length, generator=generator).tolist()
            else:
                self._order = list(range(self._length))
            self._order_epoch = self.epoch
        return self._order


def _own_place() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
