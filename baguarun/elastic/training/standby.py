"""What a worker that waits to be taken in does ahead: the others would stand while it does it later."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from baguarun.comm.ddp import DistributedDataParallel
from baguarun.elastic.training.sampler import ElasticSampler
from baguarun.elastic.training.streaming import Landing


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
                if tensor.is_cpu and _is_dense(tensor):
                    tensor.copy_(tensor.clone())


def _trainable(model: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for parameter in model.parameters() if parameter.requires_grad)


def _is_dense(tensor: torch.Tensor) -> bool:
    """False where numbers lie upon each other, as in expanded buffers, which cannot be written."""
    return tensor.layout is torch.strided and torch.empty_like(tensor).stride() == tensor.stride()
