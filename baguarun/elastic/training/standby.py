"""What a worker that waits to be taken in does ahead: the others would stand while it does it later."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from baguarun.comm.ddp import DistributedDataParallel
from baguarun.elastic.training.sampler import ElasticSampler

_COPIES = 3
"""Of each trained tensor in the state to come: itself and, of most optimizers, two estimates."""


class Landing:
    """Memory on the CPU for a state that will be sent, by dtype and shape, all of it written to already.

    To be given fresh pages can take longer than to receive what they are for.

    Threads: one.
    """

    def __init__(self, parameters: Iterable[torch.Tensor] = ()) -> None:
        """Room for the state of an optimizer of `parameters`, and for them."""
        self._free: dict[tuple[torch.dtype, tuple[int, ...]], list[torch.Tensor]] = {}
        for parameter in parameters:
            if parameter.is_cpu:
                room = [torch.zeros(parameter.shape, dtype=parameter.dtype) for _ in range(_COPIES)]
                self._free.setdefault((parameter.dtype, tuple(parameter.shape)), []).extend(room)

    def take(self, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """A tensor of any content that nobody else is given."""
        free = self._free.get((dtype, shape)) if device.type == "cpu" else None
        return free.pop() if free else torch.empty(shape, dtype=dtype, device=device)


def prepare(captured: Mapping[str, Any], arguments: Iterable[object]) -> Landing:
    """Start the loaders' processes, and have the memory that the state takes, which is returned.

    `arguments` are those of the training function.
    """
    _start_loaders(arguments)
    models = [value for value in captured.values() if isinstance(value, nn.Module)]
    trained = [value for value in models if isinstance(value, DistributedDataParallel)]
    for model in trained:
        model.prepare()
    _own_pages(models)
    return Landing(parameter for model in trained for parameter in _trainable(model))


def _start_loaders(values: Iterable[object]) -> None:
    """Start the processes of the loaders among `values` whose processes persist.

    What they load now is dropped when an epoch begins.
    """
    for value in values:
        if not isinstance(value, DataLoader) or not value.persistent_workers:
            continue
        if isinstance(value.batch_sampler, ElasticSampler):
            random_state = torch.get_rng_state()
            iter(value)
            torch.set_rng_state(random_state)


def _own_pages(models: Iterable[nn.Module]) -> None:
    """Write what the weights are to where they are: since loaders' processes were forked their pages are
    common, and are copied one by one when they are written first."""
    with torch.no_grad():
        for model in models:
            for tensor in [*model.parameters(), *model.buffers()]:
                if tensor.is_cpu and tensor.is_contiguous():
                    tensor.copy_(tensor.clone())


def _trainable(model: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for parameter in model.parameters() if parameter.requires_grad)
