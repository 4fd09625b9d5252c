"""What ranks that train together must have alike, and what is said where they have not."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from baguarun.comm.agreement import Declaration, require_same, tensor_form
from baguarun.comm.ddp import DistributedDataParallel
from baguarun.elastic.training import values
from baguarun.elastic.training.replicated import is_spread
from baguarun.elastic.training.sampler import ElasticSampler

_LONGEST = 80


def declare(captured: Mapping[str, Any]) -> Declaration:
    """Names and forms, which must be the same on all ranks."""
    settings = [("what State holds", ", ".join(captured))]
    tensors: list[tuple[str, str]] = []
    for name, value in captured.items():
        kind = type(value).__name__ if values.is_stateful(value) else "a plain value"
        settings.append((f"State's '{name}'", kind))
        if isinstance(value, nn.Module):
            named = [*value.named_parameters(), *value.named_buffers()]
            tensors += [(f"{name}.{inner}", tensor_form(tensor)) for inner, tensor in named]
        elif isinstance(value, torch.optim.Optimizer):
            groups = [[list(each.shape) for each in group["params"]] for group in value.param_groups]
            settings.append((f"parameters of State's '{name}'", str(groups)))
    return Declaration(settings=tuple(settings), tensors=tuple(tensors))


def with_models(declaration: Declaration, captured: Mapping[str, Any]) -> Declaration:
    """`declaration`, and what wrapped models compare where they enter a World: layers may be frozen since."""
    settings, tensors = list(declaration.settings), list(declaration.tensors)
    for name, value in captured.items():
        if isinstance(value, DistributedDataParallel):
            own = value.declaration()
            settings += [(f"{setting} of State's '{name}'", found) for setting, found in own.settings]
            tensors += [(f"{name}.{inner}", form) for inner, form in own.tensors]
    return Declaration(settings=tuple(settings), tensors=tuple(tensors))


def require_equal(captured: Mapping[str, Any]) -> None:
    """Raise `UsageError` on every rank of the default group if the ranks hold different things. Collective.

    Compared are names and forms, plain values, what schedulers, scalers and other objects keep, optimizers'
    settings, their state where no wrapped model has made it rank 0's, and the weights of models that are not
    wrapped, as of those that follow another one. To be called before a checkpoint is read, and never with a
    newcomer, which has the values of a script that has just begun.
    """
    forms = declare(captured)
    found = list(forms.settings)
    shared = [
        optimizer
        for value in captured.values()
        if isinstance(value, DistributedDataParallel)
        for optimizer in value.optimizers
    ]
    for name, value in captured.items():
        if isinstance(value, torch.optim.Optimizer):
            found += _settings_in_words(name, value)
            is_compared = not is_spread(value) and not any(value is each for each in shared)
            state = values.state_of(name, value).get("state") if is_compared else None
            found.append((f"the state of State's '{name}'", _in_words(state)))
        elif isinstance(value, nn.Module):
            if not isinstance(value, DistributedDataParallel):
                found.append((f"the weights of State's '{name}'", _in_words(value.state_dict())))
        else:
            found += _parts_in_words(f"State's '{name}'", values.state_of(name, value))
    _require_same(Declaration(settings=tuple(found), tensors=forms.tensors))


def require_same_samples(name: str, sampler: ElasticSampler) -> None:
    """Raise `UsageError` on every rank of the default group if their samplers would not deal the same samples
    from the same place. Collective."""
    parts = [(f"{part} of {name}", repr(value)) for part, value in sampler.state_dict().items()]
    _require_same(Declaration(settings=tuple(parts), tensors=()))


def _require_same(declaration: Declaration) -> None:
    world = dist.group.WORLD
    assert world is not None
    require_same(declaration, world)


def _settings_in_words(name: str, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, str]]:
    for number, group in enumerate(optimizer.param_groups):
        settings = {key: setting for key, setting in group.items() if key != "params"}
        kept = values.readable(f"'{name}'.param_groups[{number}]", settings)
        yield f"the settings of State's '{name}', group {number}", _in_words(kept)


def _parts_in_words(name: str, kept: Any) -> Iterator[tuple[str, str]]:
    """Of a dict by its keys, so that who reads it finds the part."""
    if isinstance(kept, dict):
        keys = sorted(kept, key=repr)
        yield name, f"a dict of {_in_words(keys)}"
        for key in keys:
            yield f"{name}[{key!r}]", _in_words(kept[key])
    else:
        yield name, _in_words(kept)


def digest(declaration: Declaration) -> int:
    """63 bits that tell declarations apart."""
    return int.from_bytes(hashlib.sha256(repr(declaration).encode()).digest()[:8], "little") >> 1


def _in_words(value: Any) -> str:
    """Text that is the same for equal values only, of any size."""
    text = repr(_with_digests(value))
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]}... (digest {hashlib.sha256(text.encode()).hexdigest()[:16]})"


def _with_digests(value: Any) -> Any:
    """`value` with text in place of tensors."""
    if isinstance(value, torch.Tensor):
        numbers = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"{tensor_form(value)} {hashlib.sha256(numbers).hexdigest()[:16]}"
    if isinstance(value, Mapping):
        return sorted(
            ((repr(key), _with_digests(item)) for key, item in value.items()), key=lambda pair: pair[0]
        )
    if isinstance(value, (list, tuple)):
        return [_with_digests(item) for item in value]
    if isinstance(value, set):
        # In an order of its own in each process.
        return sorted(map(repr, value))
    kind: Any = type(value)
    # Where an object lies tells nothing about it.
    return kind.__name__ if kind.__repr__ is object.__repr__ else value
