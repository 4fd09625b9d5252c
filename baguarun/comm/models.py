"""What a model offers to an engine: its parameters, how large buckets are to be, what forward returned."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from baguarun.errors import UsageError

KIB, MIB = 2**10, 2**20


def trainable_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Named parameters that require gradients, each once; raises `UsageError` for what cannot be served."""
    _refuse_sparse(module)
    found = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    if not found:
        raise UsageError(
            "the module has no parameter that requires a gradient: there is nothing to make parallel"
        )
    device = found[0][1].device
    for name, parameter in found:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise UsageError(
                f"parameter '{name}' is not initialised; run one forward before wrapping the module"
            )
        if parameter.is_complex():
            raise UsageError(f"parameter '{name}' is {parameter.dtype}; complex parameters are not supported")
        if parameter.layout is not torch.strided:
            raise UsageError(f"parameter '{name}' has layout {parameter.layout}; want a dense one")
        if parameter.device != device:
            raise UsageError(
                f"parameter '{name}' is on {parameter.device}, '{found[0][0]}' on {device}; want one device"
            )
    return found


def device_of(module: nn.Module) -> torch.device:
    """Where its first parameter that requires a gradient is, or else its first one; the CPU without any."""
    first = next(module.parameters(), None)
    trained = (parameter for parameter in module.parameters() if parameter.requires_grad)
    found = next(trained, first)
    return torch.device("cpu") if found is None else found.device


def bucket_limits(
    total_bytes: int, world_size: int, device: torch.device, cap_mb: float | None
) -> tuple[int, int]:
    """Bytes at which small buckets close, and the others, for `total_bytes` of gradients. Small is the first
    one; of coded ones the last or all (`limitsFor` in cpp_ext/engine/engine_buckets.cpp)."""
    if device.type != "cpu":
        # What NCCL wants: few launches; the first bucket is small so that communication starts early.
        cap = int(cap_mb * MIB) if cap_mb is not None else 25 * MIB
        return min(cap, MIB), cap
    if cap_mb is not None:
        return int(cap_mb * MIB), int(cap_mb * MIB)
    # Enough buckets to overlap, as long as the messages of one bucket are worth sending; the first one small,
    # so that the network has something to do while backward has not got far.
    floor = max(256 * KIB, 16 * KIB * world_size)
    cap = min(max(total_bytes // 4, floor), max(16 * MIB, floor))
    return max(cap // 2, floor), cap


def find_tensors(output: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested lists, tuples, mappings and dataclasses."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from find_tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from find_tensors(value)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from find_tensors(getattr(output, field.name))


def map_tensors(output: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`output` with `change(tensor)` in place of each tensor that `find_tensors` finds; the rest is shared.

    The same tensor in two places becomes the same one again.
    """
    changed: dict[int, torch.Tensor] = {}

    def mapped(value: Any) -> Any:
        again: Any
        if isinstance(value, torch.Tensor):
            if id(value) not in changed:
                changed[id(value)] = change(value)
            return changed[id(value)]
        if isinstance(value, Mapping):
            items = {key: mapped(item) for key, item in value.items()}
            if not isinstance(value, MutableMapping):
                return items
            # A copy, which keeps the type (and the attributes of those that have their items as such, too).
            again = copy.copy(value)
            for key, item in items.items():
                again[key] = item
            return again
        if isinstance(value, tuple):
            parts = [mapped(item) for item in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        if isinstance(value, list):
            again = copy.copy(value)
            again[:] = [mapped(item) for item in value]
            return again
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            again = copy.copy(value)
            for field in dataclasses.fields(value):
                object.__setattr__(again, field.name, mapped(getattr(value, field.name)))
            return again
        return value

    return mapped(output)


def refuse_local(module: nn.Module) -> None:
    """Refuse what torch's and Bagua's wrappers leave to each rank: to send it would be another training.

    Raises `UsageError` that names them.
    """
    for attribute in ("_bagua_params_and_buffers_to_ignore", "_ddp_params_and_buffers_to_ignore"):
        names = getattr(module, attribute, None)
        if names:
            raise UsageError(
                f"{attribute} is {list(names)}; parameters that stay local are not there yet, want none"
            )
    for name, parameter in module.named_parameters():
        if getattr(parameter, "expert", False):
            raise UsageError(
                f"parameter '{name}' is marked as an expert's; parameters that stay local are not there yet"
            )


def _refuse_sparse(module: nn.Module) -> None:
    for name, child in module.named_modules():
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse and child.weight.requires_grad:
            path = f"{name}.weight" if name else "weight"
            raise UsageError(
                f"parameter '{path}' has sparse gradients, which are not supported; want sparse=False"
            )
