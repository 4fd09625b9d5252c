"""A state at one commit, on the CPU: what all ranks have in common, and what is each rank's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from baguarun.comm.ddp import DistributedDataParallel
from baguarun.elastic.training import random_state, values


@dataclass(kw_only=True)
class Snapshot:
    """`shared` is equal on all ranks. `own` is this rank's, None where it was not kept."""

    steps: int
    places: list[dict[str, Any]]
    shared: dict[str, Any]
    own: dict[str, Any] | None = field(default=None, repr=False)

    @classmethod
    def take(cls, captured: Mapping[str, Any], steps: int, places: list[dict[str, Any]]) -> Snapshot:
        """Collective if the algorithm lets replicas differ: their average is what they have in common."""
        kept = {name: values.capture(name, value) for name, value in captured.items()}
        own: dict[str, Any] = {"random": random_state.portable(), "algorithm": {}, "replica": {}}
        differ = [name for name, value in captured.items() if _replicas_differ(value)]
        for name, value in captured.items():
            if isinstance(value, DistributedDataParallel):
                algorithm = value.algorithm_state_dict()
                own["algorithm"][name] = values.readable(f"'{name}'.algorithm_state_dict()", algorithm)
            if differ and values.is_stateful(value):
                own["replica"][name] = kept[name]
        for name in differ:
            kept[name] = _averaged(kept[name])
        return cls(steps=steps, places=places, shared=kept, own=own)

    def put_back(self, captured: dict[str, Any]) -> None:
        """Give all values back what they were. Without `own`, algorithms and random numbers begin anew."""
        for name in captured:
            if name in self.shared:
                replica = {} if self.own is None else self.own["replica"]
                captured[name] = values.restore(captured[name], replica.get(name, self.shared[name]))
        if self.own is None:
            return
        for name, state in self.own["algorithm"].items():
            if state and name in captured:
                captured[name].load_algorithm_state_dict(state)
        random_state.restore_portable(self.own["random"])


def _replicas_differ(value: object) -> bool:
    return isinstance(value, DistributedDataParallel) and value.algorithm.exchanges_weights


def _averaged(state: dict[str, Any]) -> dict[str, Any]:
    """The average over the ranks of all floating-point tensors; others stay this rank's."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return state
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else "cpu"
    averaged = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            total = value.to(device, torch.float64 if value.dtype == torch.float64 else torch.float32)
            total = total.clone() if total is value else total
            dist.all_reduce(total)
            value = (total / dist.get_world_size()).to("cpu", value.dtype)
        averaged[name] = value
    return averaged
