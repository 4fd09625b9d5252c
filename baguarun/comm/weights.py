"""The trainable weights of a model as a few flat buffers, so that they travel in few large messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import nn

from baguarun.comm.extension import load_extension
from baguarun.errors import UsageError

_ALIGN_BYTES = 64
"""Where each parameter starts: what vector code on CPUs likes best."""
_LEAST_PIECE_BYTES, _MOST_PIECES = 1 << 20, 16


class FlatWeights:
    """Moves parameters into one 1-D buffer per dtype; a change of a buffer is a change of the model.

    Only `parameter.data` is replaced, so optimizers and tied modules keep their references, and strides stay
    as they are (channels_last). Between parameters lie up to 63 bytes of zeros. Raises `UsageError` for
    parameters that share memory with each other without being one object, or that do not fill their memory.

    Threads: the one that trains.
    """

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        _refuse_overlap(parameters)
        self.buffers: list[torch.Tensor] = []
        # With its address and shape: `check` comes once a step.
        self._placed: list[tuple[str, nn.Parameter, int, torch.Size]] = []
        self._spare: list[list[torch.Tensor]] = []
        for dtype in dict.fromkeys(parameter.dtype for _, parameter in parameters):
            self._place([(name, found) for name, found in parameters if found.dtype == dtype])

    def empty_copy(self, *, exact: bool = False) -> list[torch.Tensor]:
        """A tensor of any content per buffer, like it; `exact`: fp32 where that has fewer bits."""
        dtypes = [exact_dtype(buffer.dtype) if exact else buffer.dtype for buffer in self.buffers]
        for index, spare in enumerate(self._spare):
            if [tensor.dtype for tensor in spare] == dtypes:
                return self._spare.pop(index)
        return [
            torch.empty_like(buffer, dtype=dtype) for buffer, dtype in zip(self.buffers, dtypes, strict=True)
        ]

    def keep_spare(self, count: int, *, exact: bool = False) -> None:
        """Make so many copies for `empty_copy` ahead, with all their pages: to be given those takes longer
        than what they are for. On the CPU only."""
        if not all(buffer.is_cpu for buffer in self.buffers):
            return
        self._spare = [self.empty_copy(exact=exact) for _ in range(count)]
        for tensor in (tensor for spare in self._spare for tensor in spare):
            load_extension().own_pages(tensor.data_ptr(), tensor.nbytes)

    def drop_spare(self) -> None:
        """Give the memory back that nobody has taken."""
        self._spare.clear()

    def check(self) -> None:
        """Raise `UsageError` if a parameter no longer lives in its buffer."""
        for name, parameter, address, shape in self._placed:
            if parameter.data_ptr() != address or parameter.shape != shape:
                was = f"{list(shape)} on {self.buffers[0].device}"
                raise UsageError(
                    f"parameter '{name}' was {was} when it was wrapped and has been moved or replaced since; "
                    f"it is {list(parameter.shape)} on {parameter.device} now. Wrap the model again after "
                    "changing it"
                )

    def _place(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        first = parameters[0][1]
        align = _ALIGN_BYTES // first.element_size()
        starts = [0]
        for _, parameter in parameters:
            starts.append(-(-(starts[-1] + parameter.numel()) // align) * align)
        buffer = torch.zeros(starts[-1], dtype=first.dtype, device=first.device)
        for start, (name, parameter) in zip(starts, parameters, strict=False):
            view = buffer.as_strided(parameter.shape, parameter.stride(), start)
            view.copy_(parameter.detach())
            parameter.data = view
            self._placed.append((name, parameter, view.data_ptr(), view.shape))
        self.buffers.append(buffer)


def pieces_of(buffers: Sequence[torch.Tensor], most: int = _MOST_PIECES) -> list[torch.Tensor]:
    """Views that are worth a message each, `most` of a buffer: one is worked on while the next ones are on
    their way."""
    return [
        piece
        for buffer in buffers
        for piece in buffer.tensor_split(min(max(buffer.nbytes // _LEAST_PIECE_BYTES, 1), most))
    ]


def at_places(
    buffers: Sequence[torch.Tensor], pieces: Iterable[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each of `pieces`, which follow each other and make up tensors of the buffers' sizes and types, behind
    the view of `buffers` that is in its place."""
    whole = iter(buffers)
    rest = next(whole)
    for piece in pieces:
        while rest.numel() < piece.numel() or rest.dtype != piece.dtype:
            rest = next(whole)
        yield rest[: piece.numel()], piece
        rest = rest[piece.numel() :]


def replace_as_they_come(
    buffers: Sequence[torch.Tensor], pieces: Iterator[torch.Tensor], all_are_there: Callable[[], bool]
) -> None:
    """Overwrite flat tensors piece by piece, while later ones are on their way, or not at all: if one fails
    to come, what was replaced is put back. What has come is lost then, as its memory is used for that. Raises
    what `pieces` raises."""
    swap = load_extension().swap_tensors
    replaced: list[tuple[torch.Tensor, torch.Tensor]] = []
    places = at_places(buffers, pieces)
    try:
        for mine, piece in places:
            if not piece.is_cpu or all_are_there():
                # One may have come to nothing, which is known when all have been taken.
                last = [(mine, piece), *places]
                torch._foreach_copy_([mine for mine, _ in last], [piece for _, piece in last])
                return
            swap(mine, piece)
            replaced.append((mine, piece))
    except BaseException:
        for mine, kept in replaced:
            mine.copy_(kept)
        raise


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 in place of types with fewer bits."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _refuse_overlap(parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
    spans = []
    for name, parameter in parameters:
        # Only a dense tensor keeps its strides in a copy.
        if torch.empty_like(parameter).stride() != parameter.stride():
            raise UsageError(
                f"parameter '{name}' has strides {list(parameter.stride())} that leave gaps or overlap; want "
                "a dense one"
            )
        if parameter.numel() > 0:
            spans.append((parameter.data_ptr(), parameter.data_ptr() + parameter.nbytes, name))
    for (_, end, name), (start, _, other) in pairwise(sorted(spans)):
        if start < end:
            raise UsageError(
                f"parameters '{name}' and '{other}' share memory but are two objects; want one nn.Parameter "
                "used in both places"
            )
