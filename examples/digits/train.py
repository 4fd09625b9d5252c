"""Trains a small convolutional network on scikit-learn's handwritten digits (bundled: nothing is downloaded).

baguarun run --nproc-per-node 2 examples/digits/train.py
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import baguarun


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="per worker")
    parser.add_argument("--algorithm", help="a name from docs/algorithms.md (default gradient_allreduce)")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and of the images' order")
    return parser.parse_args()


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """1797 grey images of 8 x 8, split 80 : 20 alike on every worker."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    cut = len(labels) * 4 // 5
    train, test = order[:cut], order[cut:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def total(value: float, device: torch.device) -> float:
    """The sum over all workers."""
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return tensor.item()


def main() -> None:
    args = parse()
    baguarun.init_process_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    torch.manual_seed(args.seed)

    train_set, test_set = load_data()
    sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler)
    model = make_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model = baguarun.DistributedDataParallel(model, optimizers=[optimizer], algorithm=args.algorithm)

    started, samples = time.monotonic(), 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        epoch_loss = torch.zeros((), device=device)
        for images, labels in loader:
            loss = cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            epoch_loss += loss.detach()
            samples += len(labels)
        mean_loss = total(epoch_loss.item(), device) / len(loader) / world_size
        if rank == 0:
            rate = samples * world_size / (time.monotonic() - started)
            print(
                f"epoch {epoch + 1:2}/{args.epochs}   loss {mean_loss:.4f}   {rate:6.0f} samples/s",
                flush=True,
            )
    elapsed_s = time.monotonic() - started

    model.eval()
    with torch.no_grad():
        # Every worker looks at its share of the test images.
        images, labels = (tensor[rank::world_size].to(device) for tensor in test_set.tensors)
        logits = model.module(images)
    test_loss = total(cross_entropy(logits, labels, reduction="sum").item(), device) / len(test_set)
    accuracy = total((logits.argmax(1) == labels).sum().item(), device) / len(test_set)
    moved_mb = total(model.stats().bytes_sent, device) / 1e6
    samples = total(samples, device)
    if rank == 0:
        print(
            f"\ntest accuracy {accuracy:.1%}   test loss {test_loss:.4f}   "
            f"{samples / elapsed_s:.0f} samples/s   {moved_mb:.1f} MB moved between {world_size} worker(s)\n"
            "next: baguarun run --nproc-per-node 2 examples/charlm/train.py --algorithm bytegrad",
            flush=True,
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
