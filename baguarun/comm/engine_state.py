"""What a checkpoint keeps of an engine, as a dict of names and tensors: each rank its own."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from baguarun.errors import UsageError

Named = Sequence[tuple[str, nn.Parameter]]


def take_engine_state(engine: Any, parameters: Named, group: dist.ProcessGroup) -> dict[str, Any]:
    """The order in which gradients are packed, and what error feedback owes; the tensors are copies."""
    found = engine.state()
    names = [name for name, _ in parameters]
    return {
        "order": [names[index] for index in found.order],
        "order_adopted": found.order_adopted,
        "residuals": {
            name: residual
            for name, residual in zip(names, found.residuals, strict=True)
            if residual.numel() > 0
        },
        "rank": dist.get_rank(group),
        "world_size": dist.get_world_size(group),
    }


def load_engine_state(
    extension: Any, engine: Any, parameters: Named, group: dist.ProcessGroup, state: dict[str, Any]
) -> None:
    """Go on from there. Collective: the order is rank 0's.

    What another rank owes, or a rank of another World, is given up with a warning. Raises `UsageError` for
    the state of another model or another stage of training.
    """
    index_of = {name: index for index, (name, _) in enumerate(parameters)}
    if sorted(state["order"]) != sorted(index_of):
        differing = sorted(set(state["order"]) ^ set(index_of))
        raise UsageError(
            f"the algorithm's state is of another model: {', '.join(differing[:10])} in one of them only"
        )
    residuals = _residuals(engine, parameters, group, state)
    engine.load_state(
        extension.EngineState(
            order=[index_of[name] for name in state["order"]],
            order_adopted=state["order_adopted"],
            residuals=residuals,
        )
    )


def _residuals(
    engine: Any, parameters: Named, group: dist.ProcessGroup, state: dict[str, Any]
) -> list[torch.Tensor]:
    """By parameter; none if they are to be given up."""
    saved = state["residuals"]
    if not saved:
        return []
    here = (dist.get_rank(group), dist.get_world_size(group))
    if (state["rank"], state["world_size"]) != here:
        warnings.warn(
            f"the algorithm's state is of rank {state['rank']} of {state['world_size']}, this is rank "
            f"{here[0]} of {here[1]}: what error feedback had left to send is given up",
            stacklevel=2,
        )
        return []
    found = []
    for (name, parameter), own in zip(parameters, engine.state().residuals, strict=True):
        residual = saved.get(name, own)
        if residual.numel() != own.numel():
            wanted = parameter.numel() if own.numel() else "no"
            raise UsageError(
                f"the algorithm's state owes {residual.numel()} numbers of '{name}'; want {wanted} (the same "
                "model and settings, and the optimizers' state loaded before)"
            )
        found.append(residual)
    return found
