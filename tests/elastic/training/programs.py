"""Training that the tests interrupt: everything in it that has a state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import baguarun
from baguarun.elastic import Checkpoints, ElasticSampler, State

SAMPLES = 62


class Interrupted(Exception):
    """What ends a life of the job in the middle of a step."""


def make_data() -> TensorDataset:
    inputs = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin(), torch.arange(SAMPLES))


def make_model(dropout: float, normalise: type[nn.Module], width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    body = nn.Linear(6, width), normalise(width), nn.Tanh(), nn.Dropout(dropout)
    return nn.Sequential(*body, nn.Linear(width, 1))


def make_state(
    folder: Path | None,
    *,
    algorithm: Any = None,
    every_steps: int = 1,
    keep: int = 3,
    dropout: float = 0.2,
    normalise: type[nn.Module] = nn.BatchNorm1d,
) -> State:
    model = make_model(dropout, normalise)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model = baguarun.DistributedDataParallel(model, optimizers=[optimizer], algorithm=algorithm)
    return State(
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5),
        epoch=0,
        seen=[],
        checkpoints=None
        if folder is None
        else Checkpoints(folder=folder, every_steps=every_steps, keep=keep),
    )


def make_loader(batch_size: int = 4, workers: int = 0, **settings: Any) -> DataLoader[Any]:
    data = make_data()
    return DataLoader(
        data,
        batch_sampler=ElasticSampler(data, batch_size, **settings),
        num_workers=workers,
        persistent_workers=workers > 0,
    )


@baguarun.elastic.run
def train(state: State, loader: DataLoader[Any], epochs: int, stop_in_step: int | None = None) -> None:
    """Each rank keeps (epoch, sample) of what it was given in `seen`, at commit as everything else."""
    while state.epoch < epochs:
        for micro_batches in state.steps(loader):
            state.optimizer.zero_grad()
            given = []
            for inputs, wanted, names in micro_batches:
                nn.functional.mse_loss(state.model(inputs), wanted).backward()
                given += [(state.epoch, name) for name in names.tolist()]
            if state.committed_steps == stop_in_step:
                raise Interrupted
            state.optimizer.step()
            state.scheduler.step()
            state.seen = state.seen + given
            state.commit()
        state.epoch += 1


def weights_of(state: State) -> list[np.ndarray]:
    return [value.numpy().copy() for value in state.model.state_dict().values()]
