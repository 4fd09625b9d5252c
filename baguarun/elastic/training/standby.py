"""What a worker that waits to be taken in does ahead: the others would stand while it does it later."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from baguarun.comm.ddp import DistributedDataParallel
from baguarun.comm.extension import load_extension
from baguarun.elastic.training.sampler import ElasticSampler
from baguarun.elastic.training.streaming import Landing


def start_loaders(values: Iterable[object]) -> None:
    """Start the processes of the loaders among `values`, the training function's arguments, whose processes
    persist. They load nothing yet: the epoch would begin with waiting for what nobody wants. Before
    `own_memory`, as the processes share all pages.
    """
    for value in values:
        if not isinstance(value, DataLoader) or not value.persistent_workers:
            continue
        if isinstance(value.batch_sampler, ElasticSampler):
            random_state = torch.get_rng_state()
            with value.batch_sampler.dealing_nothing():
                iter(value)
            torch.set_rng_state(random_state)


def own_memory(captured: Mapping[str, Any]) -> Landing:
    """Have the memory that the state takes; room for what will be sent is returned."""
    models = [value for value in captured.values() if isinstance(value, nn.Module)]
    trained = [value for value in models if isinstance(value, DistributedDataParallel)]
    for model in trained:
        model.prepare()
    _own_pages(models)
    return Landing(parameter for model in trained for parameter in _trainable(model))


def _own_pages(models: Iterable[nn.Module]) -> None:
    """Have the weights' pages copied now, which were shared when loaders' processes were forked."""
    owned = set()
    for model in models:
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_cpu and tensor.layout is torch.strided:
                memory = tensor.untyped_storage()
                if memory.data_ptr() not in owned:
                    owned.add(memory.data_ptr())
                    load_extension().own_pages(memory.data_ptr(), memory.nbytes())


def _trainable(model: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for parameter in model.parameters() if parameter.requires_grad)
