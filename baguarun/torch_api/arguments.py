"""What the primitives ask of their arguments: tensors, counts, ranks, operations."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from baguarun.errors import ArgumentError


class ReduceOp(enum.IntEnum):
    """How elements are combined, with Bagua's numbers (torch's `dist.ReduceOp` has others)."""

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BOR = 7
    BAND = 8
    BXOR = 9
    AVG = 10
    """The sum divided by the number of ranks; floating point only."""


def input_of(where: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The elements of `tensor` in one dimension, copied if they do not lie one after the other."""
    _require_dense(where, name, tensor)
    return tensor.detach().contiguous().view(-1)


def output_of(where: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The elements of `tensor` in one dimension, as a view to write to."""
    _require_dense(where, name, tensor)
    if not tensor.is_contiguous():
        raise ArgumentError(f"{where}: {name} is not contiguous, so it cannot be filled; want contiguous()")
    return tensor.detach().view(-1)


def memory_of(where: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The elements of `tensor` in one dimension as they lie in memory, as a view to read and write.

    Raises `ArgumentError` for a tensor with gaps in its memory, or with one place for several elements.
    """
    _require_dense(where, name, tensor)
    if not _fills_its_memory(tensor):
        raise ArgumentError(
            f"{where}: {name} has gaps or overlaps in memory, so it cannot be filled; want contiguous()"
        )
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def sent_of(where: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """What a receiver with the same layout fills by `memory_of`; with gaps, a copy in the indices' order."""
    _require_dense(where, name, tensor)
    return (memory_of if _fills_its_memory(tensor) else input_of)(where, name, tensor)


def require_same_kind(where: str, send: torch.Tensor, recv: torch.Tensor) -> None:
    """Raise `ArgumentError` unless both tensors have one dtype and one device."""
    if send.dtype != recv.dtype or send.device != recv.device:
        raise ArgumentError(
            f"{where}: send_tensor is {send.dtype} on {send.device}, recv_tensor {recv.dtype} on "
            f"{recv.device}; want the same"
        )


def require_count(where: str, name: str, tensor: torch.Tensor, count: int, meaning: str) -> None:
    """Raise `ArgumentError` unless `tensor` has `count` elements, which are `meaning`."""
    if tensor.numel() != count:
        raise ArgumentError(
            f"{where}: {name} has {tensor.numel()} elements; want {count}, which is {meaning}"
        )


def equal_part(where: str, name: str, tensor: torch.Tensor, parts: int) -> int:
    """Elements in each of `parts` equal parts of `tensor`; `ArgumentError` if they do not come out even."""
    if tensor.numel() % parts:
        raise ArgumentError(
            f"{where}: {name} has {tensor.numel()} elements; want a multiple of the {parts} ranks"
        )
    return tensor.numel() // parts


_TORCH_OPS = {op: getattr(dist.ReduceOp, op.name) for op in ReduceOp}


def torch_op(where: str, op: ReduceOp, tensor: torch.Tensor) -> Any:
    """What torch calls `op`; `ArgumentError` for what is none, or an average of whole numbers."""
    # Torch's constants are refused: in Bagua some of their numbers meant another operation.
    if not isinstance(op, int) or op not in ReduceOp.__members__.values():
        raise ArgumentError(f"{where}: op={op!r}; want ReduceOp's {', '.join(ReduceOp.__members__)}")
    if op == ReduceOp.AVG and not tensor.is_floating_point():
        raise ArgumentError(f"{where}: ReduceOp.AVG of {tensor.dtype}; want floating point, or SUM")
    return _TORCH_OPS[ReduceOp(op)]


def require_rank(where: str, name: str, rank: int, group: dist.ProcessGroup) -> int:
    """`rank`; `ArgumentError` if the group has none of that number."""
    if not 0 <= rank < dist.get_world_size(group):
        raise ArgumentError(
            f"{where}: {name}={rank}; want a rank of the communicator, 0 to {dist.get_world_size(group) - 1}"
        )
    return rank


def other_rank(where: str, name: str, rank: int, group: dist.ProcessGroup) -> int:
    """`rank`; `ArgumentError` if it is this rank, or none of the group."""
    if require_rank(where, name, rank, group) == dist.get_rank(group):
        raise ArgumentError(f"{where}: {name}={rank} is this rank itself; want another one")
    return rank


class Pieces:
    """The parts of one flat tensor that go to, or come from, each rank: `counts[i]` elements at `displs[i]`.

    Entries of `displs` after the last rank's are not used: Bagua's own example has the total there.
    Raises `ArgumentError` for parts that are not inside of the tensor.
    """

    def __init__(
        self, name: str, tensor: torch.Tensor, counts: Sequence[int], displs: Sequence[int], ranks: int
    ) -> None:
        self.tensor = tensor
        self.counts = [int(count) for count in counts]
        self.starts = [int(start) for start in displs][:ranks]
        if len(self.counts) != ranks or len(self.starts) != ranks:
            raise ArgumentError(
                f"alltoall_v: {name} has {len(self.counts)} counts and {len(displs)} displacements; "
                f"want one of each per rank, {ranks}"
            )
        for rank, (count, start) in enumerate(zip(self.counts, self.starts, strict=True)):
            if count < 0 or start < 0 or start + count > tensor.numel():
                raise ArgumentError(
                    f"alltoall_v: the part of {name} for rank {rank} is elements {start} to {start + count} "
                    f"of {tensor.numel()}; want a part of the tensor"
                )

    def require_apart(self, name: str) -> None:
        """Raise `ArgumentError` if two parts overlap: what one rank sends would replace another's."""
        end = 0
        for start, count in sorted(zip(self.starts, self.counts, strict=True)):
            if count and start < end:
                raise ArgumentError(f"alltoall_v: parts of {name} overlap at element {start}")
            end = max(end, start + count)

    def packed(self) -> torch.Tensor | None:
        """The parts as one view, if they lie one after the other in the ranks' order."""
        first = self.starts[0]
        if [first + total for total in accumulate(self.counts, initial=0)][:-1] != self.starts:
            return None
        return self.tensor[first : first + sum(self.counts)]

    def views(self) -> list[torch.Tensor]:
        """The parts, in the ranks' order."""
        return [
            self.tensor[start : start + count] for start, count in zip(self.starts, self.counts, strict=True)
        ]


def _fills_its_memory(tensor: torch.Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def _require_dense(where: str, name: str, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        kind = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ArgumentError(f"{where}: {name} is {kind}; want a dense tensor")
