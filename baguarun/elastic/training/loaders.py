"""Loaders of a worker that waits to be taken in."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.utils.data import DataLoader

from baguarun.elastic.training.sampler import ElasticSampler


def start_early(values: Iterable[object]) -> None:
    """Start the processes of the loaders among `values` whose processes persist.

    They take a while, in which the others would stand once this worker is one of them. What they load now is
    dropped when an epoch begins.
    """
    for value in values:
        if not isinstance(value, DataLoader) or not value.persistent_workers:
            continue
        if isinstance(value.batch_sampler, ElasticSampler):
            random_state = torch.get_rng_state()
            iter(value)
            torch.set_rng_state(random_state)
