"""Digits again, trained so that any worker may be killed at any time and the number of workers may change.

baguarun run --nproc-per-node 2 --max-restarts 3 examples/preemptible/train.py --checkpoints /tmp/digits
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import baguarun
from baguarun.elastic import Checkpoints, ElasticSampler, State


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoints", required=True, help="folder that all workers see")
    parser.add_argument("--every-steps", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="per worker at the start")
    return parser.parse_args()


@baguarun.elastic.run
def train(state: State, loader: DataLoader, epochs: int) -> None:
    while state.epoch < epochs:
        for micro_batches in state.steps(loader):
            state.optimizer.zero_grad()
            for images, labels in micro_batches:
                loss = cross_entropy(state.model(images), labels)
                loss.backward()
            state.optimizer.step()
            state.commit()
        state.epoch += 1
        if dist.get_rank() == 0:
            print(
                f"epoch {state.epoch:2}/{epochs}   step {state.committed_steps}   loss {loss:.4f}", flush=True
            )


def main() -> None:
    args = parse()
    baguarun.init_process_group()
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(digits.target)
    data = TensorDataset(images, labels)
    model: nn.Module = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model = baguarun.DistributedDataParallel(model, optimizers=[optimizer])
    state = State(
        model=model,
        optimizer=optimizer,
        epoch=0,
        checkpoints=Checkpoints(folder=args.checkpoints, every_steps=args.every_steps),
    )
    train(state, DataLoader(data, batch_sampler=ElasticSampler(data, args.batch_size)), args.epochs)
    with torch.no_grad():
        accuracy = (model.module(images).argmax(1) == labels).float().mean().item()
    if dist.get_rank() == 0:
        print(f"accuracy {accuracy:.1%} after {state.committed_steps} steps", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
