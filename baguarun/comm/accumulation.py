"""Which forwards make one step: those inside of no_sync(), and the parts of one that is unevenly shared."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from baguarun.comm.weighting import MicroBatch


class Accumulation:
    """What the script says of the forward to come."""

    def __init__(self) -> None:
        self.communicates = True
        """Whether the backward of this forward communicates."""
        self._micro_batch: MicroBatch | None = None
        self._has_warned = False

    @contextmanager
    def no_sync(self, seen: Callable[[], tuple[int, bool]]) -> Iterator[None]:
        """Forwards inside it accumulate gradients locally, until a backward whose forward was outside.

        One of the two that `seen` returns grows with each such backward: inside of it there should be none.
        """
        before, self.communicates = self.communicates, False
        steps, trained = seen()
        try:
            yield
        finally:
            self.communicates = before
        steps_now, trained_now = seen()
        if before and (steps_now > steps or trained_now > trained):
            self._warn(
                "a backward ran inside of it whose forward was outside: its gradients are those of a step"
            )

    @contextmanager
    def part(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Forwards inside it are of one part of a step; only the last part's backward communicates."""
        before = self._micro_batch, self.communicates
        self._micro_batch, self.communicates = micro_batch, micro_batch.is_last
        try:
            yield
        finally:
            self._micro_batch, self.communicates = before

    def begins_round(self) -> bool:
        """Whether this forward is the first of those that end in a communicating backward.

        With micro-batches that is the step's first one, on every rank, however many more a rank has.
        """
        return self.communicates if self._micro_batch is None else self._micro_batch.is_first

    def weight(self, *, of_step: bool) -> float:
        """What the gradients of this forward count, as `MicroBatch.weight`."""
        if self._micro_batch is None or not torch.is_grad_enabled():
            return 1.0
        return self._micro_batch.weight(of_step=of_step)

    def watch_local(self, outputs: Iterable[torch.Tensor]) -> None:
        """After a forward: warn if it was inside of no_sync and its backward is not."""
        is_of_step = self.communicates or self._micro_batch is not None or not torch.is_grad_enabled()
        if is_of_step or self._has_warned:
            return
        # Outputs may live longer than the model.
        this = weakref.ref(self)

        def on_gradient(_gradient: torch.Tensor) -> None:
            if (accumulation := this()) is not None and accumulation.communicates:
                accumulation._warn(
                    "a backward ran outside of it whose forward was inside: its gradients stay local"
                )

        for output in outputs:
            if output.grad_fn is not None:
                output.register_hook(on_gradient)  # type: ignore[no-untyped-call]

    def _warn(self, what: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"no_sync() is asked about in forward, as in torch, and {what}; want both inside of it, or "
                "both outside",
                stacklevel=4,
            )
