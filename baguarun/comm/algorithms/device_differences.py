"""Weights and their neighbours' on a ring, kept together by coded differences: on an accelerator's streams.

What `DifferenceExchange` of the extension does on the CPU, with the same bits, as torch's operations and
messages that are enqueued. Nothing of a round waits on the host. All messages of a round are waited for
before the next one's, not each when it is its turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from baguarun.comm.algorithms.pending import call, start_messages
from baguarun.comm.extension import load_extension
from baguarun.errors import CommunicationError

_PART = 1 << 24
"""Numbers that are worked on at once: so much more memory is needed for what lies between the operations."""
_WORDS = 1 << 22


@dataclass(frozen=True, kw_only=True)
class _Part:
    """So many numbers of a buffer: x, w, and what this rank holds of each neighbour's w."""

    weights: torch.Tensor
    own: torch.Tensor
    copies: list[torch.Tensor]
    received: list[torch.Tensor]
    """By neighbour: room for what it sends of this part."""


class DeviceDifferences:
    """Low-precision decentralized SGD (Tang et al., arXiv 1803.06317, algorithm 1) of one model.

    `replicas` are (x, w, copies), one-dimensional and of one length each, on one accelerator; w and its
    copies are fp32, for float64 weights float64. `neighbours` are ranks of the group, one for each copy.

    Methods enqueue on the current stream. All ranks call them equally often. An error is raised again by
    every later call. What NCCL breaks off the host learns of too late: a message of which half had come may
    be in the weights then; one of which nothing had is not.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        wire: Any,
        replicas: Sequence[tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]],
        neighbours: Sequence[int],
    ) -> None:
        self._group = group
        self._wire = wire
        self._neighbours = list(neighbours)
        self._codec = load_extension()
        self._parts = [self._part(*tensors) for replica in replicas for tensors in _cut(*replica)]
        device = replicas[0][0].device
        # On the device: by a number of the host's, torch multiplies with its inverse, which rounds twice.
        self._shares = torch.full((), len(self._neighbours) + 1.0, dtype=torch.float64, device=device)
        # Of the round under way; none: its copies are what they are copies of.
        self._works: list[dist.Work] = []
        self._sent: list[torch.Tensor] = []
        self._failure: CommunicationError | None = None

    def start(self) -> None:
        """Begin a round, after the one before."""
        with self._remembered():
            self._take_in()
            self._sent = [self._encode_change(part) for part in self._parts]
            self._works = start_messages(
                self._group,
                [(peer, self._sent) for peer in self._neighbours],
                [
                    (peer, [part.received[index] for part in self._parts])
                    for index, peer in enumerate(self._neighbours)
                ],
            )

    def join(self) -> None:
        """Have the current stream wait for the messages of the round under way."""
        with self._remembered():
            for work in self._works:
                call(work.wait)

    def wait(self) -> None:
        """Until all copies are what they are copies of; the host waits, too."""
        with self._remembered():
            self._take_in()
            device = self._shares.device
            if device.type != "cpu":
                call(torch.accelerator.current_stream(device).synchronize)

    def bytes_per_round(self) -> int:
        return sum(room.nbytes for part in self._parts for room in part.received)

    def _part(self, weights: torch.Tensor, own: torch.Tensor, copies: list[torch.Tensor]) -> _Part:
        size = self._codec.encoded_bytes(self._wire, own.numel())
        # All zeros are a coded change of nothing.
        room = [torch.zeros(size, dtype=torch.uint8, device=own.device) for _ in copies]
        return _Part(weights=weights, own=own, copies=copies, received=room)

    def _take_in(self) -> None:
        """What the neighbours have sent goes into the copies of their w."""
        for work in self._works:
            call(work.wait)
        if self._works:
            for part in self._parts:
                for copy, room in zip(part.copies, part.received, strict=True):
                    copy.add_(self._decode(room, copy))
                    room.zero_()
        self._works, self._sent = [], []

    @contextmanager
    def _remembered(self) -> Iterator[None]:
        if self._failure is not None:
            raise self._failure
        try:
            yield
        except CommunicationError as error:
            self._failure = error
            raise

    def _encode_change(self, part: _Part) -> torch.Tensor:
        """q = Q((x - w) + sum(c - w)/(k+1)); w becomes w + deQ(q), and x that."""
        others = part.copies[0] - part.own
        for copy in part.copies[1:]:
            others += copy - part.own
        others /= self._shares.to(others.dtype)
        change = part.weights.to(part.own.dtype) - part.own
        sent: torch.Tensor = self._codec.encode((change + others).float(), self._wire)
        part.own.add_(self._decode(sent, part.own))
        part.weights.copy_(part.own)
        return sent

    def _decode(self, chunk: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        numbers: torch.Tensor = self._codec.decode(chunk, self._wire, like.numel(), torch.float32)
        return numbers.to(like.dtype)


def checksum(tensors: Sequence[torch.Tensor]) -> int:
    """64 bits of the tensors' bytes, taken on their device; waits for it. To find copies that differ."""
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    for tensor in tensors:
        for words in torch.split(tensor.view(torch.int32), _WORDS):
            place = torch.arange(words.numel(), dtype=torch.int64, device=words.device)
            # Odd factors lose nothing; what two of them and a shift make of a word depends on its place.
            mixed = (words + place * 0x3C6EF372FE94F82B) * 0x1E3779B97F4A7C15
            mixed ^= mixed >> 29
            total = total * 0x2545F4914F6CDD1D + (mixed * 0x14C65DB2B0F3D7A9).sum()
    return int(total)


def _cut(
    weights: torch.Tensor, own: torch.Tensor, copies: list[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]]:
    parts = zip(*(torch.split(tensor, _PART) for tensor in (weights, own, *copies)), strict=True)
    return [(x, w, list(others)) for x, w, *others in parts]
