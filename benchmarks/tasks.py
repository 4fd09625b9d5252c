"""What is trained: the examples' models and data, cut to what two cores train in seconds."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

from examples.charlm import train as charlm
from examples.digits import train as digits

Batch = tuple[Tensor, Tensor]
"""Inputs and wanted classes, which have the shape of the inputs' leading dimensions."""


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A model, its data and how long it is trained."""

    steps: int
    learning_rate: float
    target_loss: float
    """Named beforehand: what counts as trained, in nats of validation loss."""

    @abstractmethod
    def model(self) -> nn.Module:
        """With first weights by torch's global seed."""

    @abstractmethod
    def batches(self, seed: int, rank: int, size: int) -> Iterator[Batch]:
        """One rank's batches without end, the same whoever trains on them."""

    @abstractmethod
    def validation(self, rank: int, size: int) -> Batch:
        """One rank's share of the data that nobody trains on; all shares have the same size."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, wanted = batch
        return cross_entropy(model(inputs).flatten(0, -2), wanted.flatten())


@functools.cache
def _text() -> tuple[Tensor, Tensor]:
    return charlm.split(charlm.load_text())


@dataclass(frozen=True, kw_only=True)
class Charlm(Task):
    """The next character of Python's standard library. `length` is a window's, in characters."""

    d_model: int
    layers: int
    length: int
    batch_size: int
    """Windows per rank."""

    def model(self) -> nn.Module:
        return charlm.CharTransformer(self.d_model, self.layers)

    def batches(self, seed: int, rank: int, size: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed * size + rank)
        while True:
            yield self._cut(charlm.draw(_text()[0], self.batch_size, self.length, generator))

    def validation(self, rank: int, size: int) -> Batch:
        generator = torch.Generator().manual_seed(0)
        return self._cut(charlm.draw(_text()[1], 256 // size * size, self.length, generator)[rank::size])

    def _cut(self, windows: Tensor) -> Batch:
        return windows[:, :-1], windows[:, 1:]


@dataclass(frozen=True, kw_only=True)
class Digits(Task):
    """scikit-learn's handwritten digits."""

    batch_size: int
    """Images per rank."""

    def model(self) -> nn.Module:
        return digits.make_model()

    def batches(self, seed: int, rank: int, size: int) -> Iterator[Batch]:
        images, _ = digits.load_data()
        sampler: DistributedSampler[Batch] = DistributedSampler(images, size, rank, seed=seed)
        epoch = 0
        while True:
            sampler.set_epoch(epoch)
            yield from DataLoader(images, self.batch_size, sampler=sampler)
            epoch += 1

    def validation(self, rank: int, size: int) -> Batch:
        images, labels = digits.load_data()[1].tensors
        kept = len(labels) // size * size
        return images[rank:kept:size], labels[rank:kept:size]


# Target losses are what DDP reaches after about half of the steps: who learns a little slower gets there too.
TASKS: dict[str, Task] = {
    "charlm": Charlm(
        steps=160, learning_rate=3e-3, target_loss=2.5, d_model=64, layers=2, length=64, batch_size=8
    ),
    "digits": Digits(steps=120, learning_rate=1e-3, target_loss=0.2, batch_size=32),
    # 1.9 million parameters and few characters per step: at 100 Mbit/s nearly all of DDP's time is the wire.
    "charlm_wide": Charlm(
        steps=140, learning_rate=1e-3, target_loss=2.6, d_model=192, layers=4, length=32, batch_size=2
    ),
}
