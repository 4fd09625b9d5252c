"""Weights on their way: what has been started, and is waited for when it is needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any, Protocol

import torch
import torch.distributed as dist

from baguarun.comm import timeline
from baguarun.comm.arrival import require_arrived
from baguarun.comm.extension import load_extension
from baguarun.comm.lanes import Lanes, most_parts
from baguarun.comm.weights import pieces_of
from baguarun.errors import CommunicationError


class Pending(Protocol):
    """Tensors on the way to what others make of them; do not touch them until `wait`."""

    def is_done(self) -> bool:
        """Whether `wait` returns at once. Does not block."""

    def wait(self) -> list[torch.Tensor]:
        """The results. Raises `CommunicationError`."""

    def arrivals(self) -> Iterator[torch.Tensor]:
        """The results in pieces, in their order, each when it is there; on an accelerator, whose host sees
        none come, when all are. Raises `CommunicationError`."""


class PendingReduction:
    """Tensors on the way to the ranks' averages, or to their least values; do not touch until `wait`."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        lanes: Lanes,
        *,
        sources: Sequence[torch.Tensor] | None = None,
        least: bool = False,
    ) -> None:
        """With `sources`, of the same sizes and types, averages of those go into `tensors`."""
        self._tensors = list(tensors)
        self._divisor = 1 if least else dist.get_world_size(lanes[0])
        self._num_arrived = 0
        self._flight = timeline.flight(
            "agreement" if least else "average of weights",
            "wire",
            sum(tensor.nbytes for tensor in self._tensors),
        )
        kind = dist.ReduceOp.MIN if least else dist.ReduceOp.SUM
        self._parts = pieces_of(self._tensors, most_parts(lanes))
        origins = self._parts if sources is None else pieces_of(sources, most_parts(lanes))

        def start(part: torch.Tensor, origin: torch.Tensor, lane: dist.ProcessGroup) -> dist.Work:
            if part is not origin:
                # Here, so that the first part is on its way while the next ones are copied.
                part.copy_(origin)
            work: dist.Work = dist.all_reduce(part, kind, group=lane, async_op=True)
            return work

        self._works: list[dist.Work] = call(lambda: list(map(start, self._parts, origins, cycle(lanes))))

    def is_done(self) -> bool:
        """Whether `wait` returns at once. Does not block."""
        done = all(call(work.is_completed) for work in self._works)
        if done:
            self._flight.end()
        return done

    def wait(self) -> list[torch.Tensor]:
        """The results: on CPU they are there, on an accelerator its current stream waits for them."""
        for _ in self.arrivals():
            pass
        return self._tensors

    def arrivals(self) -> Iterator[torch.Tensor]:
        """The results in parts, as `Pending.arrivals`."""
        at_once = 1 if self._tensors[0].is_cpu else len(self._parts)
        for place, part in enumerate(self._parts):
            if place == self._num_arrived:
                self._take(slice(place, place + at_once))
            yield part

    def _take(self, those: slice) -> None:
        with timeline.span("wait for weights", "wait"):
            for work in self._works[those]:
                call(work.wait)
            require_arrived(self._tensors[0].device)
        if self._divisor > 1:
            torch._foreach_div_(self._parts[those], self._divisor)
        self._num_arrived += len(self._parts[those])
        if self._num_arrived == len(self._parts):
            self._flight.end()


class PendingAverages:
    """Tensors on the CPU on the way to the ranks' averages over baguanet; do not touch until `wait`."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], baguanet: Any
    ) -> None:
        """Averages of `sources`, of the same sizes and types or the same, go into `tensors`. `baguanet`: a
        group's backend."""
        self._tensors = list(tensors)
        self._flight = timeline.flight(
            "average of weights", "wire", sum(tensor.nbytes for tensor in self._tensors)
        )
        start = load_extension().Average
        self._averages = call(
            lambda: [start(baguanet, *pair) for pair in zip(sources, self._tensors, strict=True)]
        )

    def is_done(self) -> bool:
        """Whether `wait` returns at once. Does not block."""
        done = all(average.is_done() for average in self._averages)
        if done:
            self._flight.end()
        return done

    def wait(self) -> list[torch.Tensor]:
        """The results. Raises `CommunicationError`."""
        for average, tensor in zip(self._averages, self._tensors, strict=True):
            self._wait(average, tensor.numel())
        self._flight.end()
        return self._tensors

    def arrivals(self) -> Iterator[torch.Tensor]:
        """As `Pending.arrivals`; what the sources have in a result's place may be changed then, too."""
        for average, tensor in zip(self._averages, self._tensors, strict=True):
            num_arrived = 0
            for piece in pieces_of([tensor]):
                num_arrived += piece.numel()
                self._wait(average, num_arrived)
                yield piece
        self._flight.end()

    def _wait(self, average: Any, count: int) -> None:
        with timeline.span("wait for weights", "wait"):
            call(lambda: average.wait(count))


class PendingExchange:
    """A tensor per buffer on its way to one rank, and one per buffer from another."""

    def __init__(
        self,
        sent: Sequence[torch.Tensor],
        received: Sequence[torch.Tensor],
        group: dist.ProcessGroup,
        *,
        to_rank: int,
        from_rank: int,
    ) -> None:
        self._received = list(received)
        sent_bytes = sum(tensor.nbytes for tensor in sent)
        self._flight = timeline.flight("exchange of weights", "wire", sent_bytes)
        self._works = start_messages(group, [(to_rank, sent)], [(from_rank, self._received)])

    def is_done(self) -> bool:
        """Whether `wait` is known to return at once; on Gloo, which does not say, never. Does not block."""
        return all(call(work.is_completed) for work in self._works)

    def wait(self) -> list[torch.Tensor]:
        """What was received; what was sent may be changed again."""
        return list(self.arrivals())

    def arrivals(self) -> Iterator[torch.Tensor]:
        """What was received, as `Pending.arrivals`. What was sent in its place may be changed again then."""
        incoming, outgoing = self._works[: len(self._received)], self._works[len(self._received) :]
        # Backends that take them together give one piece of work for all.
        if len(outgoing) < len(incoming):
            self._wait(self._works)
            yield from self._received
        else:
            for received, *works in zip(self._received, incoming, outgoing, strict=True):
                self._wait(works)
                yield received
        self._flight.end()

    def _wait(self, works: Sequence[dist.Work]) -> None:
        with timeline.span("wait for weights", "wait"):
            for work in works:
                call(work.wait)
            if works:
                require_arrived(self._received[0].device)


def start_messages(
    group: dist.ProcessGroup,
    sent: Sequence[tuple[int, Sequence[torch.Tensor]]],
    received: Sequence[tuple[int, Sequence[torch.Tensor]]],
) -> list[dist.Work]:
    """Start to send tensors to ranks of the group, and to fill others from ranks of it; each in its order.

    All of a round belong into one call: NCCL runs what it is given together side by side, but one call after
    the other, and on a ring of ranks these would wait for each other for ever. Backends that take them
    together give one piece of work for all.
    """
    # Receives first: word of their room is not to wait behind what is sent. Tags tell tensors apart, so
    # that one whose room is known does not wait for word of one before it.
    operations = [
        dist.P2POp(kind, tensor, group=group, group_peer=peer, tag=place)
        for kind, messages in ((dist.irecv, received), (dist.isend, sent))
        for peer, tensors in messages
        for place, tensor in enumerate(tensors)
    ]
    works: list[dist.Work] = call(lambda: dist.batch_isend_irecv(operations)) if operations else []
    return works


def call(operation: Any) -> Any:
    """What `operation()` returns; its RuntimeError becomes a `CommunicationError`."""
    try:
        return operation()
    except RuntimeError as error:
        raise CommunicationError(f"exchange of the model's weights failed: {error}") from error
