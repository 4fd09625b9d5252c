"""Sends a tree of values and tensors from one rank to others: structure first, then the tensors' bytes.

Large tensors travel as they lie, small ones packed together. What arrives is whole or not at all: nothing of
the receiver is touched before everything is there.
"""

from __future__ import annotations

import io
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from baguarun.comm.extension import load_extension
from baguarun.errors import UsageError

_PACK_BYTES = 4 * 2**20
"""Tensors are put together up to this size."""
_AHEAD = 2
"""Messages that are begun before the first of them has ended, so that the wire is never idle."""
_SLOT = "baguarun.tensor"
_COPIES = 3
"""Of each trained tensor in the state to come: itself and, of most optimizers, two estimates."""

Form = tuple[torch.dtype, tuple[int, ...]]


class Landing:
    """Memory on the CPU for a state that will be sent, by dtype and shape, all of whose pages are there.

    To be given fresh pages can take longer than to receive what they are for.

    Threads: one.
    """

    def __init__(self, parameters: Iterable[torch.Tensor] = ()) -> None:
        """Room for the state of an optimizer of `parameters`, and for them."""
        self._free: dict[tuple[torch.dtype, tuple[int, ...]], list[torch.Tensor]] = {}
        for parameter in parameters:
            if parameter.is_cpu:
                room = [_room_for(parameter) for _ in range(_COPIES)]
                self._free.setdefault((parameter.dtype, tuple(parameter.shape)), []).extend(room)

    def take(self, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """A tensor of any content that nobody else is given."""
        free = self._free.get((dtype, shape)) if device.type == "cpu" else None
        return free.pop() if free else torch.empty(shape, dtype=dtype, device=device)


def require_sendable(name: str, value: Any) -> None:
    """Raise `UsageError` if a newcomer could not be sent `value`."""
    try:
        _decode(_encode(*_take_apart(value)))
    except Exception as error:
        raise UsageError(
            f"State: '{name}' cannot be sent to a worker that joins: {error}; want a state of numbers, "
            "strings, tensors and lists, tuples or dicts of them"
        ) from error


def send(value: Any, ranks: Sequence[int], device: torch.device) -> None:
    """Send `value` to `ranks` of the default group; each calls `receive`."""
    if not ranks:
        return
    skeleton, tensors = _take_apart(value)
    forms = [_form(tensor) for tensor in tensors]
    structure = torch.frombuffer(bytearray(_encode(skeleton, tensors)), dtype=torch.uint8).to(device)
    length = torch.tensor([structure.numel()], device=device)
    _send_all(length, ranks)
    _send_all(structure, ranks)
    under_way: deque[tuple[torch.Tensor, list[dist.Work | None]]] = deque()
    for group in _groups(forms):
        parts = [_as_bytes(tensors[index].to(device)) for index in group]
        message = parts[0] if len(parts) == 1 else torch.cat(parts)
        under_way.append((message, [dist.isend(message, dst=rank) for rank in ranks]))
        if len(under_way) > _AHEAD:
            _wait(under_way.popleft()[1])
    while under_way:
        _wait(under_way.popleft()[1])


def receive(rank: int, device: torch.device, landing: Landing | None = None) -> Any:
    """What that rank of the default group sends; its tensors are on `device`, and of `landing` where it has
    any."""
    landing = landing or Landing()
    length = torch.zeros(1, dtype=torch.int64, device=device)
    dist.recv(length, src=rank)
    structure = torch.empty(int(length.item()), dtype=torch.uint8, device=device)
    dist.recv(structure, src=rank)
    skeleton, forms = _decode(structure.cpu().numpy().tobytes())
    tensors = [landing.take(dtype, shape, device) for dtype, shape in forms]
    under_way: deque[tuple[torch.Tensor, list[torch.Tensor], list[dist.Work | None]]] = deque()

    def unpack() -> None:
        packed, views, works = under_way.popleft()
        _wait(works)
        if len(views) > 1:
            for view, part in zip(views, torch.split(packed, [view.numel() for view in views]), strict=True):
                view.copy_(part)

    for group in _groups(forms):
        views = [_as_bytes(tensors[index]) for index in group]
        size = sum(view.numel() for view in views)
        packed = views[0] if len(views) == 1 else torch.empty(size, dtype=torch.uint8, device=device)
        under_way.append((packed, views, [dist.irecv(packed, src=rank)]))
        if len(under_way) > _AHEAD:
            unpack()
    while under_way:
        unpack()
    return _put_together(skeleton, tensors)


def _room_for(parameter: torch.Tensor) -> torch.Tensor:
    room = torch.empty(parameter.shape, dtype=parameter.dtype)
    load_extension().own_pages(room.data_ptr(), room.nbytes)
    return room


def _send_all(tensor: torch.Tensor, ranks: Sequence[int]) -> None:
    _wait([dist.isend(tensor, dst=rank) for rank in ranks])


def _wait(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()


def _groups(forms: Sequence[Form]) -> list[list[int]]:
    """Indices of the tensors of each message; empty tensors are in none."""
    groups: list[list[int]] = []
    room = 0
    for index, (dtype, shape) in enumerate(forms):
        size = dtype.itemsize * torch.Size(shape).numel()
        if size == 0:
            continue
        if size > room or not groups:
            groups.append([])
            room = _PACK_BYTES
        groups[-1].append(index)
        room -= size
    return groups


def _form(tensor: torch.Tensor) -> Form:
    return tensor.dtype, tuple(tensor.shape)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _take_apart(value: Any) -> tuple[Any, list[torch.Tensor]]:
    """`value` with numbered slots in place of tensors, and the tensors."""
    tensors: list[torch.Tensor] = []

    def visit(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            if item.layout is not torch.strided:
                raise UsageError(f"a tensor of layout {item.layout}")
            tensors.append(item)
            return {_SLOT: len(tensors) - 1}
        if isinstance(item, dict):
            return _like(item, {key: visit(entry) for key, entry in item.items()})
        if isinstance(item, list):
            return [visit(entry) for entry in item]
        if isinstance(item, tuple):
            return tuple(visit(entry) for entry in item)
        return item

    return visit(value), tensors


def _put_together(skeleton: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(skeleton, dict):
        if skeleton.keys() == {_SLOT}:
            return tensors[skeleton[_SLOT]]
        return _like(skeleton, {key: _put_together(entry, tensors) for key, entry in skeleton.items()})
    if isinstance(skeleton, (list, tuple)):
        return type(skeleton)(_put_together(entry, tensors) for entry in skeleton)
    return skeleton


def _like(model: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """`items` in a dict of `model`'s kind, if that can be sent."""
    return type(model)(items) if type(model) in (OrderedDict, Counter) else items


def _encode(skeleton: Any, tensors: Sequence[torch.Tensor]) -> bytes:
    file = io.BytesIO()
    torch.save((skeleton, [_form(tensor) for tensor in tensors]), file)
    return file.getvalue()


def _decode(data: bytes) -> tuple[Any, list[Form]]:
    skeleton, forms = torch.load(io.BytesIO(data), weights_only=True)
    return skeleton, forms
