"""All-reduces on Gloo by its messages.

Gloo runs two collectives of a group at once, and each waits for others while it sends nothing. Of messages as
many are under way as are wanted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count

import torch
import torch.distributed as dist

# Weights of 34 MB in 8 pieces between two nodes: without a limit of the wire and with 5 ms 172 to 184 ms with
# 4 of them, 180 to 191 with 2, 174 to 218 with 8; at 1 Gbit/s no difference.
_AT_ONCE = 4


def all_reduce_each(group: dist.ProcessGroup, tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Replace each tensor (1-D, on the CPU) by its sum over the group, the same bits on all ranks.

    Yields each in the same order when its sum is there. Each goes around a ring (Patarasuk and Yuan,
    doi:10.1016/j.jpdc.2008.09.002) from when it comes out of `tensors`, several of them side by side. Raises
    RuntimeError, as Gloo does. Threads: one at a time per group.
    """
    num_steps = _num_steps(group)
    source = iter(tensors)
    rings: list[_Ring] = []
    for turn in count():
        if (tensor := next(source, None)) is not None:
            rings.append(_Ring(group, tensor, turn))
        # Each goes its next step when so many others have begun the one before.
        for step in range(num_steps):
            place = turn - _AT_ONCE * (step + 1)
            if 0 <= place < len(rings):
                rings[place].take(step)
        if (place := turn - _AT_ONCE * num_steps) >= len(rings):
            return
        if place >= 0:
            yield rings[place].finish()


def _num_steps(group: dist.ProcessGroup) -> int:
    return 2 * (group.size() - 1)


class _Ring:
    """One tensor on its way around: blocks are summed up in the first half of the steps, then handed on."""

    def __init__(self, group: dist.ProcessGroup, tensor: torch.Tensor, tag: int) -> None:
        self._group = group
        self._tensor = tensor
        self._tag = tag
        self._blocks = tensor.tensor_split(group.size())
        self._num_steps = _num_steps(group)
        # Room for the messages of two steps: who sends is told of it before, and need not ask.
        self._incoming: dict[int, torch.Tensor] = {}
        self._receives: dict[int, dist.Work] = {}
        self._sends: list[dist.Work] = []
        self._make_room(0)
        self._make_room(1)
        self._send(0)

    def take(self, step: int) -> None:
        """Wait for what comes in that step, and send the next one."""
        if step in self._receives:
            self._receives.pop(step).wait()
        if step < self._num_steps // 2:
            self._block(step + 1).add_(self._incoming.pop(step))
        self._make_room(step + 2)
        self._send(step + 1)

    def finish(self) -> torch.Tensor:
        """After the last step: the sum is there, and what was sent may be changed."""
        for work in self._sends:
            work.wait()
        return self._tensor

    def _block(self, step: int) -> torch.Tensor:
        """What is sent in that step; what came in the one before."""
        return self._blocks[(self._group.rank() - step) % len(self._blocks)]

    def _make_room(self, step: int) -> None:
        if step >= self._num_steps:
            return
        # A sum comes here after what it replaces has been added to it elsewhere: that has been sent by then.
        room = self._block(step + 1)
        if step < self._num_steps // 2:
            room = self._incoming[step] = torch.empty_like(room)
        if room.numel() > 0:
            source = (self._group.rank() - 1) % self._group.size()
            self._receives[step] = self._group.recv([room], source, self._tag)

    def _send(self, step: int) -> None:
        if step < self._num_steps and self._block(step).numel() > 0:
            target = (self._group.rank() + 1) % self._group.size()
            self._sends.append(self._group.send([self._block(step)], target, self._tag))
