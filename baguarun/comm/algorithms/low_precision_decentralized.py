"""Ranks on a ring send their neighbours what has changed in their weights, with 8 or 4 bits per number."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from baguarun.comm.algorithms import device_differences
from baguarun.comm.algorithms.base import Algorithm, Operation, Wire
from baguarun.comm.algorithms.device_differences import DeviceDifferences
from baguarun.comm.algorithms.pending import call, start_messages
from baguarun.comm.algorithms.stepper import StepContext, Stepper, finish_at_exit, require_range
from baguarun.comm.arrival import require_arrived
from baguarun.comm.backend import NAME as BAGUANET
from baguarun.comm.extension import load_extension
from baguarun.comm.rail_exchanger import RailExchanger
from baguarun.comm.rails import Hierarchical, require_hierarchical
from baguarun.comm.weights import FlatWeights, exact_dtype
from baguarun.errors import CommunicationError, UsageError

_WIRES = {8: Wire.MINMAX8, 4: Wire.MINMAX4}
_WHOLE = (0, 1)
"""The shard of a rank that has no others to deal weights out to."""


@dataclass(frozen=True, kw_only=True)
class LowPrecisionDecentralized(Algorithm):
    """Difference compression D-PSGD (Tang et al., arXiv 1803.06317) on a ring (Bagua, arXiv 2107.01499).

    After the optimizer's step, which makes x of the weights w that the neighbours know, each rank sends
    q = Q((x - w) + ((L - w) + (R - w)) / 3) to both neighbours and goes on from x = w + deQ(q). L and R are
    its copies of their w, kept up to date by what they send, so they equal it bit for bit. Two ranks are each
    other's only neighbour: q = Q((x - w) + (L - w) / 2), one message (Bagua sends it twice and mixes by
    thirds, which makes two ranks swing around their average). Replicas differ.

    By rail the ring is of nodes: x is the average of a node's ranks, dealt out over them; w and its copies
    are of that, and all ranks of a node go on from the same weights. A single node has no neighbour: its
    ranks average their weights as they are.

    When the World changes, the exchange under way is dropped, every rank keeps its own weights, w begins as
    these, and the new neighbours send each other theirs in full.

    Copies and w are fp32, of float64 weights float64; what travels is coded from fp32 always. An exchange
    that breaks may have mixed some pieces of the weights, but not by rail. On CUDA it is enqueued; its
    failure is NCCL's to report, and may leave half of a message in the weights.
    """

    name: ClassVar[str] = "low_precision_decentralized"
    exchanges_weights: ClassVar[bool] = True

    bits: int = 8
    """Per number: 8, or 4. With 4 the error may grow on rings of many ranks, which mix slowly."""
    communication_interval: int = 1
    """Exchange after every so manyth step, the first one included."""
    check_interval: int = 100
    """Compare checksums of w and its copies with the neighbours in every so manyth exchange; 0: never. Copies
    that differ are sent again, and a warning says so: the harm that they do is small and has an end then,
    while an error would throw the whole training away."""
    resync_interval: int = 0
    """Send w in full in every so manyth exchange, whatever the checksums say; 0: never."""
    hierarchical: Hierarchical = "auto"
    """A ring of nodes, whose ranks have the same weights after an exchange, rather than of all ranks. "auto":
    where several nodes have several workers."""

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

    def hierarchy(self) -> Hierarchical:
        return self.hierarchical

    def exchanges_with_few(self) -> bool:
        return True

    def prepare(self, weights: FlatWeights) -> None:
        weights.keep_spare(3, exact=True)

    def make_stepper(self, context: StepContext) -> Stepper:
        return RingStepper(context, self)


class RingStepper(Stepper):
    """The exchanges of one model. Keeps w and a copy of each neighbour's; by rail, of its shard."""

    def __init__(self, context: StepContext, settings: LowPrecisionDecentralized) -> None:
        super().__init__(context)
        self._settings = settings
        weights = context.weights.buffers
        self._device = weights[0].device
        # By rail: where weights become the node's. Not in place: if the exchange breaks, they are to stay.
        self._averages = context.weights.empty_copy() if self.rails is not None else weights
        ring, self._shard = _place(context)
        # Positions on the ring, so ranks of the group that exchanges; none with fewer weights than shards.
        self._neighbours = _neighbours(ring, context.rank) if self._part(weights) else []
        self._ring = ring
        # Of one node nothing leaves it.
        self._group = (None if context.rails is None else context.rails.rail) or context.group
        self._own, *self._copies = (self._exact_copy() for _ in range(1 + len(self._neighbours)))
        # Whether the copies are known to be what they are copies of.
        self._linked = False
        self._resumed = False
        # Steps ended when the last exchange began.
        self._sent_steps = 0
        self._extension = load_extension()
        # None: without a neighbour.
        self._exchange: Any = self._make_exchange() if self._neighbours else None
        finish_at_exit(self, RingStepper.finish)

    def _make_exchange(self) -> Any:
        wire = getattr(self._extension.Wire, _WIRES[self._settings.bits].value)
        coded = self._part(self._averages)
        replicas = list(zip(coded, self._own, map(list, zip(*self._copies, strict=True)), strict=True))
        if self._device.type == "cpu":
            return self._extension.DifferenceExchange(self._group, wire, replicas)
        return DeviceDifferences(self._group, wire, replicas, self._neighbours)

    def before_forward(self) -> None:
        if self._linked or not self._neighbours:
            return
        self._linked = True
        if not self._resumed:
            for own, weights in zip(self._own, self._part(self.context.weights.buffers), strict=True):
                own.copy_(weights)
            for copies in self._copies:
                torch._foreach_copy_(copies, self._own)
        self._send_again(self._differing_links())

    def after_step(self) -> None:
        self.steps += 1
        if (self.steps - 1) % self._settings.communication_interval != 0:
            return
        if self.rails is None:
            self.rounds += 1
            self._exchange_changes()
        else:
            self._exchange_by_rail(self.rails)
        # All that began before has ended.
        self.shared_steps, self._sent_steps = self._sent_steps, self.steps

    def finish(self) -> None:
        """Wait for the exchange under way."""
        if self._exchange is not None:
            with self._named():
                self._exchange.wait()
            self.shared_steps = self._sent_steps

    def state_dict(self) -> dict[str, Any]:
        self.finish()
        return {
            **super().state_dict(),
            "shapes": self._shapes(self.context.weights.buffers),
            "shard": list(self._shard),
            "own": [tensor.clone() for tensor in self._own],
            "copies": [[tensor.clone() for tensor in copies] for copies in self._copies],
        }

    def drop(self) -> None:
        self.finish()
        self._linked, self._sent_steps = False, 0

    def begin_anew(self) -> None:
        super().begin_anew()
        self._resumed = False

    def load_state_dict(self, state: dict[str, Any]) -> None:
        shapes = self._shapes(self.context.weights.buffers)
        found = state.get("shapes", self._shapes(state["own"]))
        if shapes != found:
            raise UsageError(
                f"{self._settings.name}: the state has weights of {found}, this model has {shapes}; want the "
                "state of the same model"
            )
        super().load_state_dict(state)
        # Of other nodes it may be of another shard, of one node of none: then w begins as the weights.
        is_same = list(state.get("shard", _WHOLE)) == list(self._shard)
        self._resumed = is_same and self._shapes(state["own"]) == self._shapes(self._own)
        if not self._resumed or not self._neighbours:
            return
        torch._foreach_copy_(self._own, state["own"])
        saved = state["copies"]
        for index, copies in enumerate(self._copies):
            # From a World of two or to one there are not as many; whatever differs is sent again.
            torch._foreach_copy_(copies, saved[index] if index < len(saved) else state["own"])

    def _exchange_by_rail(self, rails: RailExchanger) -> None:
        """Until the weights are the node's; what its owners send is on its way."""
        weights = self.context.weights.buffers
        torch._foreach_copy_(self._averages, weights)
        if rails.num_nodes == 1:
            self.average(self._averages).wait()
            # Nothing is left on its way.
            self._sent_steps = self.steps
        else:
            self.rounds += 1
            self.bytes_sent += rails.bytes_per_exchange(self._averages, sends=False)
            # There, not here: if it breaks, those of the node who wait for the result are told (on the CPU).
            rails.average_in_nodes(self._averages, self._exchange_changes).wait()
        torch._foreach_copy_(weights, self._averages)

    def _exchange_changes(self) -> None:
        """Begin an exchange with the neighbours, after the one before."""
        # Counts from 1, by steps: ranks that have resumed or are new count alike.
        self._keep_linked(1 + (self.steps - 1) // self._settings.communication_interval)
        self.bytes_sent += self._exchange.bytes_per_round()
        with self._named():
            self._exchange.start()
            if self.rails is not None and isinstance(self._exchange, DeviceDifferences):
                # What NCCL does in two groups at a time on one device may wait for each other.
                self._exchange.join()

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Errors say which ranks are meant, for those of a rail count by themselves; baguanet's do."""
        try:
            yield
        except CommunicationError as error:
            if self.context.rails is None or dist.get_backend(self._group) == BAGUANET:
                raise
            rail = ", ".join(map(str, self._ring))
            raise CommunicationError(f"between nodes, where ranks {rail} count from 0: {error}") from error

    def _part(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """What this rank exchanges of `tensors`."""
        return tensors if self.rails is None else self.rails.part(tensors)

    def _exact_copy(self) -> list[torch.Tensor]:
        """Room for w, with the weights of now in it; nothing without a neighbour."""
        weights = self._part(self.context.weights.buffers) if self._neighbours else []
        if self.rails is None:
            kept = self.context.weights.empty_copy(exact=True)
        else:
            kept = [torch.empty_like(part, dtype=exact_dtype(part.dtype)) for part in weights]
        for tensor, part in zip(kept, weights, strict=True):
            tensor.copy_(part)
        return kept

    def _keep_linked(self, exchange: int) -> None:
        every, check_every = self._settings.resync_interval, self._settings.check_interval
        if every > 0 and exchange % every == 0:
            self.finish()
            self._send_again(list(range(len(self._neighbours))))
        elif check_every > 0 and exchange % check_every == 0:
            self.finish()
            drifted = self._differing_links()
            if drifted:
                ranks = ", ".join(str(self._ring[self._neighbours[index]]) for index in drifted)
                warnings.warn(
                    f"{self._settings.name}: in step {self.steps} this rank ({self.context.rank}) and rank "
                    f"{ranks} found that a copy of weights had drifted; both sent them again. Damaged memory "
                    "does that, and so does code that lets only some ranks flush denormal numbers to zero",
                    stacklevel=2,
                )
            self._send_again(drifted)

    @staticmethod
    def _shapes(tensors: list[torch.Tensor]) -> list[list[int]]:
        return [list(tensor.shape) for tensor in tensors]

    def _differing_links(self) -> list[int]:
        """Positions of the neighbours with whom one of the two copies is wrong: both ends find the same."""
        checksum = self._extension.checksum if self._device.type == "cpu" else device_differences.checksum
        mine = checksum(self._own)
        theirs = [checksum(copies) for copies in self._copies]
        sent = [torch.tensor([mine, other], device=self._device) for other in theirs]
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
        peers = [self._neighbours[link] for link in links]
        messages = zip(peers, sent, strict=True), zip(peers, received, strict=True)
        for work in start_messages(self._group, *map(list, messages)):
            call(work.wait)
        require_arrived(self._device)


def _place(context: StepContext) -> tuple[tuple[int, ...], tuple[int, int]]:
    """The ring that this rank is on, by rank, and its shard: which one of how many."""
    if context.rails is None:
        return tuple(range(context.world_size)), _WHOLE
    layout, rank = context.rails.layout, context.rank
    return layout.rail_of(rank), (layout.node_of(rank).index(rank), layout.num_rails)


def _neighbours(ring: Sequence[int], rank: int) -> list[int]:
    """Where on the ring those before and after `rank` are, if any; the same place counts once."""
    if len(ring) < 2:
        return []
    place = ring.index(rank)
    behind, ahead = (place - 1) % len(ring), (place + 1) % len(ring)
    return [behind] if behind == ahead else [behind, ahead]
