"""What algorithms do around optimizer steps: those that exchange weights rather than gradients."""

from __future__ import annotations

import atexit
import contextlib
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from baguarun.comm.algorithms.pending import (
    Pending,
    PendingAverages,
    PendingExchange,
    PendingReduction,
)
from baguarun.comm.backend import NAME as BAGUANET
from baguarun.comm.backend import backend_on_cpu
from baguarun.comm.lanes import Lanes
from baguarun.comm.legacy import source_of
from baguarun.comm.rail_exchanger import RailExchanger
from baguarun.comm.rail_groups import RailGroups
from baguarun.comm.weights import FlatWeights
from baguarun.errors import ArgumentError, CommunicationError


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """What a stepper works on."""

    weights: FlatWeights
    """All trainable parameters, equal on all ranks at the start."""
    lanes: Lanes
    """Of the engine's group: at least two ranks."""
    rails: RailGroups | None = None
    """Where exchanges go by rail, what that needs."""
    takes_over: bool = False
    """Whether `take_over` is called before anything else."""

    @property
    def group(self) -> dist.ProcessGroup:
        """The engine's."""
        return self.lanes[0]

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def world_size(self) -> int:
        return dist.get_world_size(self.group)


class Stepper:
    """Called around the steps of one model, in the same order on all ranks.

    A step begins with its first forward and ends when the optimizers have stepped, or have left the step out
    on this rank (GradScaler). Methods may raise `CommunicationError`.

    Threads: the one that trains.
    """

    def __init__(self, context: StepContext) -> None:
        self.context = context
        # Now: torch.compile traces what a forward starts, and cannot look into groups.
        is_ours = dist.get_backend(context.group) == BAGUANET
        self._baguanet = backend_on_cpu(context.group) if is_ours else None
        self.rails = None if context.rails is None else RailExchanger(context.rails)
        """Exchanges by rail; None: all go among all ranks."""
        self.steps = 0
        """Steps ended since the start of training, resumed ones included."""
        self.shared_steps = 0
        """So many of `steps` are in what this rank was given of others, by exchanges that have ended well; of
        NCCL's the host knows only that they were begun."""
        self.rounds = 0
        """Exchanges of weights that were started."""
        self.bytes_sent = 0
        """Bytes of weights that this rank's share of them comes to."""

    def sends_gradients(self) -> bool:
        """Whether the gradients of this step are combined over the ranks."""
        return False

    def shares_buffers(self) -> bool:
        """Whether rank 0's module buffers overwrite the others' before the next synchronised forward."""
        return True

    def before_forward(self) -> None:
        """Before each forward with gradients; where that is to be quiet, before `before_step`."""
        return

    def before_step(self) -> None:
        """Once per step, when gradients are there and weights are still those of forward."""
        return

    def after_step(self) -> None:
        """The step boundary. Counts the step; what overrides it does so too."""
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        """What must be kept with a checkpoint, taken at a step boundary."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; the weights are restored by the caller, before."""
        self.drop()
        self.steps = int(state["steps"])
        self.shared_steps = 0

    def drop(self) -> None:
        """Wait for what all ranks have under way, and forget it: the weights that it belongs to are gone."""
        return

    def finish(self) -> None:
        """At a step boundary, on all ranks: wait for what is under way, and apply it where that is due."""
        return

    def begin_anew(self) -> None:
        """As at the start of training, from the weights of now. At a step boundary, on all ranks."""
        self.drop()
        self.steps = self.shared_steps = 0

    def hand_over(self) -> dict[str, Any]:
        """What the stepper of the next World begins with. The group is gone: waits for nobody."""
        return {"steps": self.steps}

    def take_over(self, left: dict[str, Any] | None) -> None:
        """Go on from what `hand_over` gave; None for a rank that is new. Collective, after the World changed.

        All ranks count their steps alike from here on, as the one with most of them does.
        """
        self._agree_on_steps(left)

    def _agree_on_steps(self, left: dict[str, Any] | None) -> int:
        """Rank of one with most steps, whose count becomes everybody's. Collective."""
        here = self.context
        own = 0 if left is None else int(left["steps"])
        source, self.steps = source_of(own, here.group)
        return source

    def average(
        self, tensors: Sequence[torch.Tensor], sources: Sequence[torch.Tensor] | None = None
    ) -> Pending:
        """Start to replace `tensors` by averages over the ranks: of themselves, or of `sources`, of the same
        sizes and types, which are not to change until these have come."""
        world_size = self.context.world_size
        self.rounds += 1
        # The all-reduce of baguanet goes by rail of itself, and one node is everybody.
        if self.rails is not None and self.rails.num_nodes > 1 and self._baguanet is None:
            self.bytes_sent += self.rails.bytes_per_average(tensors)
            return self.rails.average(tensors, sources)
        self.bytes_sent += 2 * sum(tensor.nbytes for tensor in tensors) * (world_size - 1) // world_size
        origins = tensors if sources is None else sources
        if self._baguanet is not None and all(tensor.is_contiguous() for tensor in (*tensors, *origins)):
            return PendingAverages(tensors, origins, self._baguanet)
        return PendingReduction(tensors, self.context.lanes, sources=sources)

    def exchange(
        self,
        sent: Sequence[torch.Tensor],
        received: Sequence[torch.Tensor],
        *,
        to_rank: int,
        from_rank: int,
    ) -> PendingExchange:
        """Start to send `sent` to one rank and to fill `received`, of equal sizes and types, from another.

        Ranks count within the context's group. Each tensor needs its counterpart on the other side.
        """
        self.rounds += 1
        self.bytes_sent += sum(tensor.nbytes for tensor in sent)
        return PendingExchange(sent, received, self.context.group, to_rank=to_rank, from_rank=from_rank)


_Stepper = TypeVar("_Stepper", bound=Stepper)


def finish_at_exit(stepper: _Stepper, finish: Callable[[_Stepper], None]) -> None:
    """Have the process stay until `finish(stepper)` has returned: slower ranks still need this one's part.

    Not after an error, which ends the others' exchanges too. Once the groups are destroyed only Gloo's are
    waited for: those go on as long as the model has the group.
    """
    this = weakref.ref(stepper)
    outlives_groups = dist.get_backend(stepper.context.group) == dist.Backend.GLOO

    def finish_it() -> None:
        stepper = this()
        if stepper is None or hasattr(sys, "last_value"):
            return
        if dist.is_initialized():
            finish(stepper)
        elif outlives_groups:
            # A rank that is gone by now is nobody's error any more.
            with contextlib.suppress(CommunicationError):
                finish(stepper)
        _let_gloo_go_idle()

    atexit.register(finish_it)
    weakref.finalize(stepper, atexit.unregister, finish_it)


_GLOO_THREAD = "pt_gloo_runloop"
_IDLE_WAIT_S = 1.0


def _let_gloo_go_idle() -> None:
    """Wait, at most `_IDLE_WAIT_S`, until none of Gloo's threads has something to run.

    They let go of their tensors a moment after `wait` has returned (torch 2.13), and the last to let go of
    one that Python knows needs the interpreter: where that has ended meanwhile, the process aborts.
    """
    give_up_at = time.monotonic() + _IDLE_WAIT_S
    looks_idle = 0
    while looks_idle < 3 and time.monotonic() < give_up_at:
        # The interpreter is theirs meanwhile.
        time.sleep(0.001)
        looks_idle = 0 if _any_thread_runs(_GLOO_THREAD) else looks_idle + 1


def _any_thread_runs(name: str) -> bool:
    for task in Path("/proc/self/task").iterdir():
        try:
            # "<id> (<name>) <state> ...": proc(5).
            before, _, after = (task / "stat").read_text().rpartition(") ")
        except OSError:
            continue
        if before.endswith(f"({name}") and after[0] == "R":
            return True
    return False


def require_range(algorithm: str, field: str, value: float, low: float, high: float | None = None) -> None:
    """Raise `ArgumentError` unless low <= value, and value <= high where there is one."""
    if low <= value and (high is None or value <= high):
        return
    above = "" if high is None else f" <= {high}"
    raise ArgumentError(f"{algorithm}: {field}={value}; want {low} <= {field}{above}")
