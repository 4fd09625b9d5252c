"""The state that all ranks have in common, as it is sent to a rank that joins or is a step behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from baguarun.comm.arrival import require_arrived
from baguarun.comm.ddp import DistributedDataParallel
from baguarun.elastic.training import values
from baguarun.errors import UsageError


def collect(captured: Mapping[str, Any]) -> dict[str, Any]:
    """The values to be sent; tensors are the live ones."""
    return {name: values.state_of(name, value) for name, value in captured.items()}


def adopt(captured: dict[str, Any], sent: Mapping[str, Any], *, buffers: bool) -> None:
    """Make the state what was sent. Without `buffers` those of wrapped models stay their own."""
    for name, kept in sent.items():
        value = captured[name]
        if isinstance(value, nn.Module):
            _load_module(value, kept, buffers=buffers)
        else:
            captured[name] = values.restore(value, kept)


def collect_without_weights(captured: Mapping[str, Any]) -> dict[str, Any]:
    """What is equal on all ranks even where replicas differ: counters, schedulers, learning rates."""
    found: dict[str, Any] = {}
    for name, value in captured.items():
        if isinstance(value, torch.optim.Optimizer):
            settings = [
                {key: setting for key, setting in group.items() if key != "params"}
                for group in value.param_groups
            ]
            found[name] = values.readable(f"'{name}'.param_groups", settings)
        elif not isinstance(value, nn.Module):
            found[name] = values.state_of(name, value)
    return found


def adopt_without_weights(captured: dict[str, Any], sent: Mapping[str, Any]) -> None:
    """Make all that is not weights or an optimizer's state what was sent."""
    for name, kept in sent.items():
        value = captured[name]
        if isinstance(value, torch.optim.Optimizer):
            for group, settings in zip(value.param_groups, kept, strict=True):
                group.update(settings)
        else:
            captured[name] = values.restore(value, kept)


def require_replicas(captured: Mapping[str, Any]) -> None:
    """Raise `UsageError` for models and optimizers whose parts lie on different workers, which nobody could
    replace, and for models that could not follow into another World."""
    for name, value in captured.items():
        if is_spread(value):
            raise UsageError(
                f"State: '{name}' has its state spread over workers (ZeroRedundancyOptimizer); a lost "
                "worker's part could not be had back. Want the optimizer that it wraps, or "
                "`--elastic restart` with checkpoints"
            )
        if isinstance(value, nn.Module):
            if "_baguarun_session" in vars(value):
                raise UsageError(
                    f"State: '{name}' is data-parallel by with_bagua(), and would stay in the World where it "
                    "was made so; want State(model=baguarun.DistributedDataParallel(module, ...))"
                )
            inner = _first_of_torch_ddp(value)
            if inner is not None:
                raise UsageError(
                    f"State: '{name}' {inner} torch.nn.parallel.DistributedDataParallel, whose process group "
                    "ends with the first change of the World; want "
                    "State(model=baguarun.DistributedDataParallel(module, ...)), or `--elastic restart`"
                )
            sharded = _first_sharded(value)
            if sharded is not None:
                raise UsageError(
                    f"State: '{name}' has {sharded} spread over workers (DTensor, FSDP); a lost worker's "
                    "part could not be had back. Want `--elastic restart` with checkpoints"
                )


def require_one_kind(captured: Mapping[str, Any]) -> None:
    """Raise `UsageError` for wrapped models of which some have equal replicas and others have not: after a
    loss the ones would be made equal, and the others be left as they are."""
    wrapped = {name: value for name, value in captured.items() if isinstance(value, DistributedDataParallel)}
    first_of: dict[bool, str] = {}
    for name, model in wrapped.items():
        first_of.setdefault(model.algorithm.exchanges_weights, name)
    if len(first_of) < 2:
        return
    equal, differing = first_of[False], first_of[True]
    raise UsageError(
        f"State: '{equal}' ({wrapped[equal].algorithm.name}) keeps its replicas equal, '{differing}' "
        f"({wrapped[differing].algorithm.name}) lets them differ; after a loss `--elastic in-place` "
        "cannot go on with both. Want algorithms of one kind for all models of a State, or "
        "`--elastic restart` with checkpoints"
    )


def require_optimizers(captured: Mapping[str, Any]) -> None:
    """Raise `UsageError` for optimizers that a wrapped model was given and that are not captured themselves:
    their steps would not be counted, and a newcomer would not be sent what they keep."""
    held = [value for value in captured.values() if isinstance(value, torch.optim.Optimizer)]
    for name, value in captured.items():
        if isinstance(value, DistributedDataParallel):
            for optimizer in value.optimizers:
                if not any(optimizer is each for each in held):
                    raise UsageError(
                        f"State: '{name}' was wrapped with optimizers=[...] of which State does not hold the "
                        f"{type(optimizer).__name__}; want State({name}=..., optimizer=optimizer), with each "
                        "optimizer under a name of its own"
                    )


def is_spread(optimizer: object) -> bool:
    """Whether each worker has a part of what `optimizer` keeps."""
    return any(each.__name__ == "ZeroRedundancyOptimizer" for each in type(optimizer).__mro__)


def _first_of_torch_ddp(model: nn.Module) -> str | None:
    """How `model` is one of torch's data-parallel models, or has one inside, in words."""
    for inner, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            return f"has '{inner}', a" if inner else "is a"
    return None


def _first_sharded(model: nn.Module) -> str | None:
    """The first part of `model` that is spread over workers, in words."""
    # First by class: the state_dict of such a module is whole, and collective to take.
    for inner, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            return f"'{inner}'" if inner else "its parameters"
    tensors = model.state_dict(keep_vars=True)
    return next((f"'{inner}'" for inner, each in tensors.items() if type(each).__name__ == "DTensor"), None)


def average(captured: Mapping[str, Any]) -> None:
    """Make trained weights that differ from rank to rank the average of all. Collective over the default
    group."""
    differing = _differing(captured)
    # All are there before the first is changed: a loss meanwhile leaves each rank what it had.
    _set(differing, _averages(differing, dist.get_world_size()))


def average_newcomers(captured: Mapping[str, Any], *, newcomer: bool, survivors: int) -> None:
    """Make newcomers' trained weights the survivors' average. Collective over the default group."""
    differing = _differing(captured)
    averages = _averages(differing, survivors, contributes=not newcomer)
    if newcomer:
        _set(differing, averages)


def _differing(captured: Mapping[str, Any]) -> list[torch.Tensor]:
    return [
        parameter.detach()
        for value in captured.values()
        if isinstance(value, DistributedDataParallel) and value.algorithm.exchanges_weights
        for parameter in value.module.parameters()
        if parameter.requires_grad
    ]


def _averages(mine: Sequence[torch.Tensor], among: int, *, contributes: bool = True) -> list[torch.Tensor]:
    """Over `among` ranks that contribute, in fp32 at least: one all-reduce for all tensors of a dtype and a
    device."""
    alike: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for place, each in enumerate(mine):
        wide = torch.promote_types(each.dtype, torch.float32)
        alike.setdefault((wide, each.device), []).append(place)
    found: dict[int, torch.Tensor] = {}
    for (wide, where), places in alike.items():
        sizes = [mine[place].numel() for place in places]
        if contributes:
            flat = torch.cat([mine[place].reshape(-1).to(wide) for place in places])
        else:
            flat = torch.zeros(sum(sizes), dtype=wide, device=where)
        dist.all_reduce(flat)
        require_arrived(where)
        flat.div_(among)
        for place, part in zip(places, torch.split(flat, sizes), strict=True):
            found[place] = part.view_as(mine[place])
    return [found[place] for place in range(len(mine))]


def _set(tensors: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    for tensor, value in zip(tensors, wanted, strict=True):
        tensor.copy_(value)


def _load_module(model: nn.Module, kept: Mapping[str, Any], *, buffers: bool) -> None:
    module = model.module if isinstance(model, DistributedDataParallel) else model
    if buffers or module is model:
        module.load_state_dict(kept)
        return
    own = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    module.load_state_dict({name: item for name, item in kept.items() if name not in own}, strict=False)
