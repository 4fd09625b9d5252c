"""All ranks must build the same model with the same settings; this finds out before the first step."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist

from baguarun.comm.groups import device_of_group, require_group
from baguarun.errors import CommunicationError, UsageError


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """What one rank is about to do, as text that can be compared and shown."""

    settings: tuple[tuple[str, str], ...]
    """Name and value of everything that must be equal, the algorithm first."""
    tensors: tuple[tuple[str, str], ...] = ()
    """Name and form of each parameter and buffer, in order."""
    refusal: str = ""
    """Why this rank cannot take part; empty if it can."""


def tensor_form(tensor: torch.Tensor) -> str:
    """Shape, type and layout of a parameter or buffer in words."""
    form = f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    if not tensor.is_contiguous():
        form += f" with strides {list(tensor.stride())}"
    return form if tensor.requires_grad else form + " (no gradient)"


def named_forms(named: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, str]]:
    return [(name, tensor_form(tensor)) for name, tensor in named]


def require_same(mine: Declaration, group: dist.ProcessGroup) -> None:
    """Raise the same `UsageError` on every rank of `group` if the ranks' declarations differ. Collective.

    A rank that declares a refusal comes back: the error is its own to raise.
    """
    digest = hashlib.sha256(repr(mine).encode()).digest()
    own = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device_of_group(group))
    world_size = dist.get_world_size(group)
    digests = [torch.empty_like(own) for _ in range(world_size)]
    try:
        dist.all_gather(digests, own, group=group)
        if all(bytes(other.tolist()) == digest for other in digests):
            # A rank that differs sees it too: equality is transitive.
            return
        declarations: list[Declaration | None] = [None] * world_size
        dist.all_gather_object(declarations, mine, group=group)
    except RuntimeError as error:
        raise CommunicationError(f"comparing the models of the ranks failed: {error}") from error
    if not mine.refusal:
        raise UsageError(describe_difference([found for found in declarations if found is not None]))


@contextmanager
def refusals_told(process_group: dist.ProcessGroup | None) -> Iterator[None]:
    """Before ranks compare their models: a `UsageError` from inside is told to the others of the group.

    Without this they would wait in `require_same` until this process ends. An error makes it collective.
    """
    try:
        yield
    except UsageError as error:
        if dist.is_initialized() and dist.get_world_size(process_group) > 1:
            # Whoever has gone already cannot be told; what is wrong here is the same.
            with suppress(CommunicationError):
                group = require_group(process_group)
                refusal = Declaration(settings=(), tensors=(), refusal=str(error))
                require_same(refusal, group)
        raise


def describe_difference(declarations: Sequence[Declaration]) -> str:
    """The first rank that cannot take part, or the first thing in which some rank differs from rank 0."""
    for rank, declaration in enumerate(declarations):
        if declaration.refusal:
            return f"rank {rank} cannot take part: {declaration.refusal}"
    first = declarations[0]
    for rank, other in enumerate(declarations[1:], start=1):
        # What a rank means to do is the name of the first of them.
        if [name for name, _ in first.settings[:1]] != [name for name, _ in other.settings[:1]]:
            return f"one of the ranks 0 and {rank} wraps a model that is wrapped already, the other does not"
        for (name, here), (_, there) in zip(first.settings, other.settings, strict=True):
            if here != there:
                return (
                    f"ranks differ in {name}: rank 0 has {here}, rank {rank} has {there}; "
                    "want the same on all"
                )
        for index in range(max(len(first.tensors), len(other.tensors))):
            here, there = _tensor_at(first, index), _tensor_at(other, index)
            if here != there:
                return (
                    f"ranks build different models: parameter or buffer {index} is {here} on rank 0 "
                    f"and {there} on rank {rank}; "
                    "want the same names, shapes and types in the same order on all ranks"
                )
    return "ranks build different models"


def _tensor_at(declaration: Declaration, index: int) -> str:
    if index >= len(declaration.tensors):
        return f"missing (there are {len(declaration.tensors)})"
    name, form = declaration.tensors[index]
    return f"'{name}' {form}"
