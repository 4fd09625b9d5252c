"""Ranks on a ring send their neighbours what has changed in their weights, with 8 or 4 bits per number."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from baguarun.comm.algorithms.base import Algorithm, Operation, Wire
from baguarun.comm.algorithms.stepper import (
    PendingExchange,
    StepContext,
    Stepper,
    finish_at_exit,
    require_range,
)
from baguarun.comm.extension import load_extension
from baguarun.comm.rails import Hierarchical, require_hierarchical
from baguarun.comm.weights import FlatWeights
from baguarun.contract import WorkerEnv
from baguarun.errors import UsageError

_WIRES = {8: Wire.MINMAX8, 4: Wire.MINMAX4}


@dataclass(frozen=True, kw_only=True)
class LowPrecisionDecentralized(Algorithm):
    """Difference compression D-PSGD (Tang et al., arXiv 1803.06317) on a ring (Bagua, arXiv 2107.01499).

    After the optimizer's step, which makes x of the weights w that the neighbours know, each rank sends
    q = Q((x - w) + ((L - w) + (R - w)) / 3) to both neighbours and goes on from x = w + deQ(q). L and R are
    its copies of their w, kept up to date by what they send, so they equal it bit for bit. Two ranks are each
    other's only neighbour: q = Q((x - w) + (L - w) / 2), one message (Bagua sends it twice and mixes by
    thirds, which makes two ranks swing around their average). Replicas differ.

    When the World changes, the exchange under way is dropped, every rank keeps its own weights, w begins as
    these, and the new neighbours send each other theirs in full.

    On the CPU. Copies and w are fp32, of float64 weights float64; what travels is coded from fp32 always.
    """

    name: ClassVar[str] = "low_precision_decentralized"
    exchanges_weights: ClassVar[bool] = True

    bits: int = 8
    """Per number: 8, or 4. With 4 the error may grow on rings of many ranks, which mix slowly."""
    communication_interval: int = 1
    """Exchange after every so manyth step."""
    check_interval: int = 100
    """Compare checksums of w and its copies with the neighbours in every so manyth exchange; 0: never. Copies
    that differ are sent again, and a warning says so: the harm that they do is small and has an end then,
    while an error would throw the whole training away."""
    resync_interval: int = 0
    """Send w in full in every so manyth exchange, whatever the checksums say; 0: never."""
    hierarchical: Hierarchical = "auto"
    """"auto" and False: the ring is of all ranks. True, a ring of nodes, is not there yet."""

    def __post_init__(self) -> None:
        require_hierarchical(self.name, self.hierarchical)
        if self.bits not in _WIRES:
            raise UsageError(f"{self.name}: bits={self.bits!r}; want one of {', '.join(map(str, _WIRES))}")
        require_range(self.name, "communication_interval", self.communication_interval, 1)
        require_range(self.name, "check_interval", self.check_interval, 0)
        require_range(self.name, "resync_interval", self.resync_interval, 0)

    def operation(self, dtype: torch.dtype, device: torch.device) -> Operation | None:
        del dtype, device
        return None

    def check(self, env: WorkerEnv) -> None:
        if self.hierarchical is True and env.num_nodes > 1 and env.local_world_size > 1:
            raise UsageError(
                f"{self.name}: hierarchical=True with {env.num_nodes} nodes of {env.local_world_size} "
                "workers is not there yet; want False (a ring of all ranks) or one worker per node"
            )

    def exchanges_with_few(self) -> bool:
        return True

    def prepare(self, weights: FlatWeights) -> None:
        weights.keep_spare(3, exact=True)

    def make_stepper(self, context: StepContext) -> Stepper:
        return RingStepper(context, self)


class RingStepper(Stepper):
    """The exchanges of one model. Keeps w and a copy of each neighbour's."""

    def __init__(self, context: StepContext, settings: LowPrecisionDecentralized) -> None:
        super().__init__(context)
        self._settings = settings
        weights = context.weights.buffers
        if weights[0].device.type != "cpu":
            raise UsageError(
                f"{settings.name}: the model is on {weights[0].device}; want it on the CPU, for the exchange "
                "of coded differences is not there on accelerators yet"
            )
        ahead = (context.rank + 1) % context.world_size
        behind = (context.rank - 1) % context.world_size
        self._neighbours = [behind] if behind == ahead else [behind, ahead]
        self._own, *self._copies = (
            context.weights.empty_copy(exact=True) for _ in range(1 + len(self._neighbours))
        )
        for copies in (self._own, *self._copies):
            for tensor, buffer in zip(copies, weights, strict=True):
                tensor.copy_(buffer)
        # Whether the copies are known to be what they are copies of.
        self._linked = False
        self._resumed = False
        # Steps ended when the last exchange began.
        self._sent_steps = 0
        self._extension = load_extension()
        self._exchange = self._extension.DifferenceExchange(
            context.group,
            getattr(self._extension.Wire, _WIRES[settings.bits].value),
            list(zip(weights, self._own, map(list, zip(*self._copies, strict=True)), strict=True)),
        )
        finish_at_exit(self, RingStepper.finish)

    def before_forward(self) -> None:
        if self._linked:
            return
        self._linked = True
        if not self._resumed:
            for own, weights in zip(self._own, self.context.weights.buffers, strict=True):
                own.copy_(weights)
            for copies in self._copies:
                torch._foreach_copy_(copies, self._own)
        self._send_again(self._differing_links())

    def after_step(self) -> None:
        self.steps += 1
        if self.steps % self._settings.communication_interval != 0:
            return
        self.finish()
        self._keep_linked(self.steps // self._settings.communication_interval)
        self.rounds += 1
        self.bytes_sent += self._exchange.bytes_per_round()
        self._exchange.start()
        self._sent_steps = self.steps

    def finish(self) -> None:
        """Wait for the exchange under way."""
        self._exchange.wait()
        self.shared_steps = self._sent_steps

    def state_dict(self) -> dict[str, Any]:
        self.finish()
        return {
            **super().state_dict(),
            "own": [tensor.clone() for tensor in self._own],
            "copies": [[tensor.clone() for tensor in copies] for copies in self._copies],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        shapes, found = ([tensor.shape for tensor in kept] for kept in (self._own, state["own"]))
        if shapes != found:
            raise UsageError(
                f"{self._settings.name}: the state has weights of {found}, this model has {shapes}; want the "
                "state of the same model"
            )
        self.finish()
        super().load_state_dict(state)
        torch._foreach_copy_(self._own, state["own"])
        saved = state["copies"]
        for index, copies in enumerate(self._copies):
            # From a World of two or to one there are not as many; whatever differs is sent again.
            torch._foreach_copy_(copies, saved[index] if index < len(saved) else state["own"])
        self._linked, self._resumed = False, True
        self._sent_steps = 0

    def _keep_linked(self, exchange: int) -> None:
        every, check_every = self._settings.resync_interval, self._settings.check_interval
        if every > 0 and exchange % every == 0:
            self._send_again(list(range(len(self._neighbours))))
        elif check_every > 0 and exchange % check_every == 0:
            drifted = self._differing_links()
            if drifted:
                warnings.warn(
                    f"{self._settings.name}: in step {self.steps} this rank ({self.context.rank}) and rank "
                    f"{', '.join(str(self._neighbours[index]) for index in drifted)} found that a copy of "
                    "weights had drifted; both sent them again. Damaged memory does that, and so does code "
                    "that lets only some ranks flush denormal numbers to zero",
                    stacklevel=2,
                )
            self._send_again(drifted)

    def _differing_links(self) -> list[int]:
        """Positions of the neighbours with whom one of the two copies is wrong: both ends find the same."""
        mine = self._extension.checksum(self._own)
        theirs = [self._extension.checksum(copies) for copies in self._copies]
        sent = [torch.tensor([mine, other]) for other in theirs]
        received = [torch.empty_like(tensor) for tensor in sent]
        self._swap(list(range(len(sent))), [[tensor] for tensor in sent], [[tensor] for tensor in received])
        return [
            index
            for index, (other, found) in enumerate(zip(theirs, received, strict=True))
            if found.tolist() != [other, mine]
        ]

    def _send_again(self, links: list[int]) -> None:
        self.bytes_sent += len(links) * sum(tensor.nbytes for tensor in self._own)
        self._swap(links, [self._own] * len(links), [self._copies[index] for index in links])

    def _swap(
        self, links: list[int], sent: list[list[torch.Tensor]], received: list[list[torch.Tensor]]
    ) -> None:
        """Give each neighbour of `links` its tensors and take the same from it."""
        pending = []
        for link, mine, theirs in zip(links, sent, received, strict=True):
            peer = self._neighbours[link]
            pending.append(PendingExchange(mine, theirs, self.context.group, to_rank=peer, from_rank=peer))
        for each in pending:
            each.wait()
