"""Finds the step boundaries of one model and tells the algorithm's stepper."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from baguarun.comm import timeline
from baguarun.comm.algorithms.stepper import Stepper
from baguarun.errors import CommunicationError, UsageError


class StepBoundary:
    """A step ends when all of `optimizers` have stepped since the last end.

    It ends too when a forward, or `end_left_out`, comes after a backward that some optimizer has not
    followed: GradScaler leaves steps out on the rank whose gradients overflowed, and all ranks must count
    alike. Hence a backward whose forward was outside of no_sync counts as a step, with or without an
    optimizer's. A forward inside of backward is no such: activation checkpoints go through it again.
    """

    def __init__(self, stepper: Stepper, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.holds_errors = False
        """Whether an exchange that breaks behind an optimizer's step is left to `require_ended`: the step has
        been taken, and what the script does for it is to be done, too."""
        self._stepper = stepper
        self._held: Exception | None = None
        self._hooks: list[RemovableHandle] = []
        self._waiting_for = {id(optimizer) for optimizer in optimizers}
        self._stepped: set[int] = set()
        self._stepping = False
        self._prepared = False
        self._trained = False
        self._begun = False
        self._start_is_due = False
        for optimizer in optimizers:
            self._watch(optimizer)

    def before_forward(self, *, trains: bool) -> None:
        """Before every forward, evaluation too: end a step that was left out."""
        self.require_ended()
        if self._stepping and torch.is_grad_enabled():
            if self._is_inside_step():
                raise UsageError(
                    "forward ran inside of optimizer.step(closure); algorithms that exchange weights need "
                    "forward and backward before step()"
                )
            # It has raised, and torch tells nobody.
            self._stepping = False
        if self._trained and not self._stepping and not _is_inside_backward():
            self._end()
        self._begun = self._begun or trains

    def start(self, *, at_once: bool) -> None:
        """Before every forward with gradients: what the algorithm begins with it, or before the optimizer."""
        self._start_is_due = not at_once
        if at_once:
            with timeline.span("start of the step", "weights"):
                self._stepper.before_forward()

    def has_trained(self) -> bool:
        """Whether a backward has come, of a forward outside of no_sync, that no step has followed yet."""
        return self._trained

    def is_in_step(self) -> bool:
        """Whether a step has begun that is not to be ended yet."""
        accumulates = self._begun and not self._trained
        return accumulates or bool(self._stepped) or self._is_inside_step()

    def end_left_out(self) -> None:
        """Where a step is over for the script: end one that was left out, as others wait for its exchange."""
        if self._trained:
            self._end_or_hold()

    def forget(self) -> None:
        """Nothing of a step has been done: the script has loaded other weights.

        But if a step has begun on this rank others may have ended it and wait for its part in the exchange;
        the weights stay. One that has begun on some ranks only is not told from that.
        """
        if self._begun:
            buffers = self._stepper.context.weights.buffers
            loaded = [buffer.clone() for buffer in buffers]
            self._end()
            torch._foreach_copy_(buffers, loaded)
        self._stepped.clear()
        self._stepping = self._prepared = self._trained = self._begun = self._start_is_due = False

    def close(self) -> None:
        """No step ends here any more, whatever still holds this object; an error that is held is dropped."""
        self._held = None
        for hook in self._hooks:
            hook.remove()

    def require_ended(self) -> None:
        """Raise, once, what broke the exchange at the end of the last step if that was held."""
        held, self._held = self._held, None
        if held is not None:
            raise held

    def after_forward(self, outputs: Iterable[torch.Tensor]) -> None:
        """After a forward outside of no_sync: see whether a backward follows.

        Not by a parameter that forward has returned, which would keep what is noted here for ever.
        """

        def on_gradient(_gradient: torch.Tensor) -> None:
            self._trained = True

        for output in outputs:
            if output.grad_fn is not None:
                output.register_hook(on_gradient)  # type: ignore[no-untyped-call]

    def note_backward(self) -> None:
        """In place of a forward and its backward, on a rank that has nothing to add."""
        self._trained = True

    def _watch(self, optimizer: torch.optim.Optimizer) -> None:
        # The optimizer may outlive the wrapped model and be used with another one.
        this = weakref.ref(self)

        def before(*_call: object) -> None:
            if (boundary := this()) is not None:
                boundary._before_step()

        def after(*_call: object) -> None:
            if (boundary := this()) is not None:
                boundary._after_step(id(optimizer))

        handles = (optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after))
        self._hooks += handles
        for handle in handles:
            remove: Callable[[], None] = handle.remove
            weakref.finalize(self, remove)

    def _is_inside_step(self) -> bool:
        frame = sys._getframe()
        while (caller := frame.f_back) is not None:
            frame = caller
            if frame.f_code.co_name == "step" and id(frame.f_locals.get("self")) in self._waiting_for:
                return True
        return False

    def _before_step(self) -> None:
        self._stepping = True
        if not self._prepared:
            self._prepared = True
            self._prepare()

    def _after_step(self, optimizer: int) -> None:
        self._stepping = False
        self._stepped.add(optimizer)
        if self._stepped == self._waiting_for:
            self._end_or_hold()

    def _end_or_hold(self) -> None:
        try:
            self._end()
        except (CommunicationError, dist.DistError) as error:
            if not self.holds_errors:
                raise
            # Without frames, which hold this object; what it came of is in its text.
            self._held = error.with_traceback(None)
            error.__cause__ = error.__context__ = None

    def _end(self) -> None:
        if not self._prepared:
            self._prepare()
        self._stepped.clear()
        self._prepared = self._trained = self._begun = self._start_is_due = False
        with torch.no_grad(), timeline.span("end of the step", "weights"):
            self._stepper.after_step()

    def _prepare(self) -> None:
        self._stepper.context.weights.check()
        if self._start_is_due and self._trained:
            self.start(at_once=True)
        with timeline.span("before the optimizer", "weights"):
            self._stepper.before_step()


def _is_inside_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
