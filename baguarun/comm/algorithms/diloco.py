"""Every rank trains alone for many steps, then an outer optimizer takes one step along the average change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.optim.sgd import sgd

from baguarun.comm.algorithms.base import Algorithm, Operation, Wire
from baguarun.comm.algorithms.coded import CodedReduction, start_coded_average
from baguarun.comm.algorithms.pending import Pending
from baguarun.comm.algorithms.stepper import StepContext, Stepper, finish_at_exit, require_range
from baguarun.comm.legacy import share_what_differs
from baguarun.comm.rails import Hierarchical, require_hierarchical
from baguarun.comm.weights import FlatWeights
from baguarun.errors import UsageError

_WIRES = {"fp32": None, "bf16": torch.bfloat16, "int8": torch.float32, "int4": torch.float32}
"""What changes are converted to before they are sent, or coded."""
_CODED = {"int8": Wire.MINMAX8, "int4": Wire.MINMAX4}
"""Those that are coded, and how."""


@dataclass(frozen=True, kw_only=True)
class DiLoCo(Algorithm):
    """DiLoCo (Douillard et al., arXiv 2311.08105), streaming if asked (arXiv 2501.18512).

    Every `local_steps` steps the change of the weights, (outer - local), is averaged over the ranks and given
    as a gradient to SGD with Nesterov momentum, whose result becomes everybody's weights. The inner optimizer
    and its state stay each rank's own. Outer weights and momentum, in fp32 or more, are part of the
    algorithm's state: a checkpoint without them goes on as if training had just begun.

    When the World changes, they are taken from the rank that has taken most steps, and an outer step under
    way is dropped: its change is still in the local weights and counts in the fragment's next turn.
    """

    name: ClassVar[str] = "diloco"
    exchanges_weights: ClassVar[bool] = True

    local_steps: int = 100
    """Steps from one outer step to the next, of each fragment."""
    outer_lr: float = 0.7
    """The paper's."""
    outer_momentum: float = 0.9
    """The paper's; 0 is plain SGD, which with outer_lr=1 is an average of the weights."""
    wire: str = "fp32"
    """What changes travel as: fp32 (float64 as it is); bf16, which the backend sums in bf16; int8 or int4, on
    a grid of 255 or 15 steps for each 2048 numbers, coded twice and summed in fp32. The streaming paper sends
    4 bits, of floating point."""
    fragments: int = 1
    """Parts of the model that take turns, local_steps / fragments steps apart: lower peaks on the wire."""
    delay_steps: int = 0
    """Steps for which an outer step may be under way before it is applied; 0 waits for it at the boundary."""
    keep_local: float = 0.0
    """How much of the local weights stays when an outer step is applied: 0 none, as in DiLoCo. Anything
    above 0 leaves replicas different."""
    hierarchical: Hierarchical = "auto"
    """Average inside the node before anything leaves it. baguanet does so whatever is asked."""

    def __post_init__(self) -> None:
        require_hierarchical(self.name, self.hierarchical)
        require_range(self.name, "local_steps", self.local_steps, 1)
        require_range(self.name, "outer_lr", self.outer_lr, 0)
        require_range(self.name, "outer_momentum", self.outer_momentum, 0, 1)
        require_range(self.name, "fragments", self.fragments, 1)
        require_range(self.name, "delay_steps", self.delay_steps, 0, self.local_steps - 1)
        require_range(self.name, "keep_local", self.keep_local, 0, 1)
        if self.wire not in _WIRES:
            raise UsageError(f"diloco: wire={self.wire!r}; want one of {', '.join(_WIRES)}")
        if self.local_steps % self.fragments != 0:
            raise UsageError(
                f"diloco: fragments={self.fragments} does not divide local_steps={self.local_steps}; "
                "want one that does"
            )

    def hierarchy(self) -> Hierarchical:
        return self.hierarchical

    def operation(self, dtype: torch.dtype, device: torch.device) -> Operation | None:
        del dtype, device
        return None

    def prepare(self, weights: FlatWeights) -> None:
        weights.keep_spare(2, exact=True)

    def make_stepper(self, context: StepContext) -> Stepper:
        return OuterStepper(context, self)


class _Fragment:
    """A slice of each flat buffer with its outer weights and momentum."""

    def __init__(self, local: Sequence[torch.Tensor]) -> None:
        self.local = local
        self.outer: Sequence[torch.Tensor] = ()
        self.momentum: Sequence[torch.Tensor] = ()
        self.shared_steps = 0
        # The average change: a handle while it is under way, tensors after a resume.
        self.pending: Pending | CodedReduction | list[torch.Tensor] | None = None

    def begin(self) -> None:
        """Outer weights are those of now, without momentum."""
        for outer, momentum, local in zip(self.outer, self.momentum, self.local, strict=True):
            outer.copy_(local)
            momentum.zero_()

    def change(self, wire: torch.dtype | None) -> list[torch.Tensor]:
        changes = [outer - local for outer, local in zip(self.outer, self.local, strict=True)]
        return changes if wire is None else [change.to(wire) for change in changes]

    def average_change(self) -> list[torch.Tensor] | None:
        if self.pending is None or isinstance(self.pending, list):
            return self.pending
        return self.pending.wait()

    def apply(self, settings: DiLoCo) -> bool:
        """False: there was nothing under way, for the World has changed meanwhile."""
        averages = self.average_change()
        if averages is None:
            return False
        self.pending = None
        sgd(
            list(self.outer),
            [average.to(outer.dtype) for average, outer in zip(averages, self.outer, strict=True)],
            list(self.momentum),
            fused=True,
            weight_decay=0.0,
            momentum=settings.outer_momentum,
            lr=settings.outer_lr,
            dampening=0.0,
            nesterov=True,
            maximize=False,
        )
        for local, outer in zip(self.local, self.outer, strict=True):
            if settings.keep_local == 0:
                local.copy_(outer)
            else:
                local.lerp_(outer.to(local.dtype), 1 - settings.keep_local)
        return True


class OuterStepper(Stepper):
    """The outer steps of one model. Keeps two copies of the weights."""

    def __init__(self, context: StepContext, settings: DiLoCo) -> None:
        super().__init__(context)
        self._settings = settings
        self._fragments = [_Fragment(local) for local in self._split(context.weights.buffers)]
        # A script may load weights after it has wrapped the model: the first forward has those to begin with.
        self._is_fresh = not context.takes_over
        if self._is_fresh:
            self._make_room()
        finish_at_exit(self, OuterStepper.finish)

    def shares_buffers(self) -> bool:
        return self.steps % self._settings.local_steps == 0

    def before_forward(self) -> None:
        self._begin_if_fresh()

    def before_step(self) -> None:
        # Of a step without a forward through the wrapper.
        self._begin_if_fresh()

    def _begin_if_fresh(self) -> None:
        if self._is_fresh:
            for fragment in self._fragments:
                fragment.begin()
            self._is_fresh = False

    def after_step(self) -> None:
        self.steps += 1
        every, delay = self._settings.local_steps, self._settings.delay_steps
        for index, fragment in enumerate(self._fragments):
            # The last fragment's turn comes at multiples of local_steps.
            turn = self.steps - (index + 1) * (every // len(self._fragments))
            if turn >= 0 and turn % every == 0:
                fragment.pending = self._start(fragment)
            if turn >= delay and (turn - delay) % every == 0 and fragment.apply(self._settings):
                fragment.shared_steps = self.steps - delay
        self.shared_steps = min(fragment.shared_steps for fragment in self._fragments)

    def finish(self) -> None:
        """Wait for what is under way; it is applied in its turn."""
        for fragment in self._fragments:
            fragment.average_change()

    def _start(self, fragment: _Fragment) -> Pending | CodedReduction:
        change = fragment.change(_WIRES[self._settings.wire])
        coded = _CODED.get(self._settings.wire)
        if coded is not None and change:
            return start_coded_average(self, change, coded)
        return self.average(change)

    def _make_room(self) -> None:
        """For outer weights and momentum."""
        outer, momentum = (self._split(self.context.weights.empty_copy(exact=True)) for _ in range(2))
        for fragment, *tensors in zip(self._fragments, outer, momentum, strict=True):
            fragment.outer, fragment.momentum = tensors

    def _split(self, buffers: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """By fragment."""
        pieces = [buffer.tensor_split(self._settings.fragments) for buffer in buffers]
        return [[piece for piece in each if piece.numel() > 0] for each in zip(*pieces, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        self._begin_if_fresh()
        fragments = []
        for fragment in self._fragments:
            pending = fragment.average_change()
            fragments.append(
                {
                    "outer": [tensor.clone() for tensor in fragment.outer],
                    "momentum": [tensor.clone() for tensor in fragment.momentum],
                    "pending": None if pending is None else [tensor.clone() for tensor in pending],
                }
            )
        return {**super().state_dict(), "fragments": fragments}

    def drop(self) -> None:
        for fragment in self._fragments:
            fragment.average_change()
            fragment.pending, fragment.shared_steps = None, 0

    def begin_anew(self) -> None:
        super().begin_anew()
        self._is_fresh = True

    def hand_over(self) -> dict[str, Any]:
        self._begin_if_fresh()
        kept = [(fragment.outer, fragment.momentum) for fragment in self._fragments]
        return {**super().hand_over(), "fragments": kept}

    def take_over(self, left: dict[str, Any] | None) -> None:
        """Go on with the outer weights that were left; after steps in a World of one, with the weights of
        now: an outer step takes the way from the old ones for that of one period, and throws far."""
        source = self._agree_on_steps(left)
        is_source = source == self.context.rank
        if left is None or "trained_alone" in left:
            left = None
            self._make_room()
            if is_source:
                for fragment in self._fragments:
                    fragment.begin()
        else:
            for fragment, (outer, momentum) in zip(self._fragments, left["fragments"], strict=True):
                fragment.outer, fragment.momentum = outer, momentum
        tensors = [tensor for each in self._fragments for tensor in (*each.outer, *each.momentum)]
        # Survivors have the same but for an outer step that only some of them have come to.
        share_what_differs(tensors, source, self.context.group, is_known=left is not None or is_source)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved = state["fragments"]
        shapes = [[tensor.shape for tensor in fragment.outer] for fragment in self._fragments]
        found = [[tensor.shape for tensor in fragment["outer"]] for fragment in saved]
        if shapes != found:
            raise UsageError(
                f"diloco: the state has fragments of {found}, this model has {shapes}; want the state of the "
                "same model with the same number of fragments"
            )
        super().load_state_dict(state)
        self._is_fresh = False
        for fragment, kept in zip(self._fragments, saved, strict=True):
            for own, other in zip(
                [*fragment.outer, *fragment.momentum], kept["outer"] + kept["momentum"], strict=True
            ):
                own.copy_(other)
            pending = kept["pending"]
            fragment.pending = (
                None
                if pending is None
                else [tensor.to(own.device) for tensor, own in zip(pending, fragment.outer, strict=True)]
            )
