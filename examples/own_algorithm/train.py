"""Trains a small network by an algorithm that is not part of baguarun but lies next to this file.

baguarun run --nproc-per-node 2 examples/own_algorithm/train.py --algorithm ring
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from half_bytes import HalfBytes
from ring import Ring
from torch import nn

import baguarun
from baguarun.comm.algorithms import ALGORITHMS

# From here on the names work wherever an algorithm is named, `baguarun run --algorithm` included.
ALGORITHMS.update({Ring.name: Ring, HalfBytes.name: HalfBytes})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--algorithm", help="ring, half_bytes or one of baguarun's; default: the launcher's")
    parser.add_argument("--steps", type=int, default=300)
    return parser.parse_args()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points of the plane, each worker's own, and whether they lie inside of a ring."""
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    points = 4 * torch.rand(64, 2, generator=generator) - 2
    distance = points.norm(dim=1, keepdim=True)
    return points, ((distance > 0.7) & (distance < 1.5)).float()


def main() -> None:
    args = parse()
    baguarun.init_process_group()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    model = baguarun.DistributedDataParallel(net, optimizers=[optimizer], algorithm=args.algorithm)
    for step in range(args.steps):
        points, inside = batch(step)
        loss = nn.functional.binary_cross_entropy_with_logits(model(points), inside)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1:3}   loss {loss.item():.3f}", flush=True)
    if dist.get_rank() == 0:
        print(f"{model.stats().bytes_sent} bytes sent by each worker", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
