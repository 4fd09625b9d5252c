"""Training with much to keep, for every launcher: one line of JSON per committed step and worker.

Adam, BatchNorm, dropout, GradScaler, a scheduler and a loader with two processes of its own; 32 MB of weights
and optimizer state with the default `--width`. Lines go to `$STEP_LOG` in one write each; besides the fields
of `tests.lab.steps.Step` they name the samples that the worker trained on in that step. Step 0 says that the
worker has done all that it can do alone; step -1, of rank 0 at the end, has the loss on data held out.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import baguarun
from baguarun.comm.algorithms import DiLoCo, QAdamOptimizer, resolve
from baguarun.elastic import Checkpoints, ElasticSampler, State

CLASSES = 10
FEATURES = 784
WIDTH = 1280


class Blobs(Dataset):
    """Points around one centre per class: their number, themselves, their class."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[int, Tensor, int]:
        label = index % CLASSES
        noise = torch.randn(FEATURES, generator=torch.Generator().manual_seed(index))
        return index, self._centres[label] + 12 * noise, label


def network(width: int, norm: str = "batch") -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, width),
        {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm}[norm](width),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, CLASSES),
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--algorithm", default="gradient_allreduce")
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--norm", choices=["batch", "layer"], default="batch", help="layer: see chaos_run")
    parser.add_argument("--samples", type=int, default=3200, help="in an epoch")
    parser.add_argument("--epochs", type=int, default=10**6)
    parser.add_argument("--batch-size", type=int, default=8, help="per worker at the start")
    parser.add_argument("--loader-workers", type=int, default=2)
    parser.add_argument("--checkpoints", help="folder; none are written without it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--digests", action="store_true", help="of weights and optimizer state, in each line")
    pace_s = float(os.environ.get("PACE_S", "0"))
    parser.add_argument("--pace-s", type=float, default=pace_s, help="sleep in every step (default: $PACE_S)")
    return parser.parse_args()


@baguarun.elastic.run
def train(state: State, loader: DataLoader, log: int, args: argparse.Namespace) -> None:
    while state.epoch < args.epochs:
        for micro_batches in state.steps(loader):
            numbers: list[int] = []
            state.optimizer.zero_grad()
            loss = torch.zeros(())
            for indices, points, labels in micro_batches:
                loss = cross_entropy(state.model(points), labels)
                state.scaler.scale(loss).backward()
                numbers += indices.tolist()
            time.sleep(args.pace_s)
            state.scaler.step(state.optimizer)
            state.scaler.update()
            state.scheduler.step()
            epoch = state.epoch
            state.commit()
            line = {"epoch": epoch, "samples": numbers, "loss": loss.item()}
            line |= {"lost_samples": state.lost_samples, "missed_samples": state.missed_samples}
            if args.digests:
                line |= {"weights": digest(state)}
            write(log, step=state.committed_steps, **line)
        state.epoch += 1


def digest(state: State) -> int:
    """Of all that replicas have in common; equal bits have equal numbers."""
    number = 0
    moments = [each for kept in state.optimizer.state.values() for each in kept.values()]
    for tensor in [*state.model.module.parameters(), *moments]:
        number = zlib.crc32(tensor.detach().numpy().tobytes(), number)
    return number


def write(log: int, **more: object) -> None:
    line = {
        "time": time.time(),
        "pid": os.getpid(),
        "node": os.uname().nodename,
        "rank": dist.get_rank(),
        "world_size": dist.get_world_size(),
        "generation": int(os.environ.get("BAGUARUN_GENERATION", 0)),
        "restart_count": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)),
        **more,
    }
    os.write(log, json.dumps(line).encode() + b"\n")


@torch.no_grad()
def loss_held_out(model: nn.Module, first: int) -> float:
    data = Blobs(first + 1000)
    drawn = [data[index] for index in range(first, first + 1000)]
    points, labels = (
        torch.stack([point for _, point, _ in drawn]),
        torch.tensor([label for *_, label in drawn]),
    )
    model.eval()
    return float(cross_entropy(model(points), labels))


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    log = os.open(os.environ["STEP_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    baguarun.init_process_group()
    torch.manual_seed(args.seed)
    model: nn.Module = network(args.width, args.norm)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    if args.algorithm == "qadam":
        optimizer = QAdamOptimizer(model.parameters(), lr=1e-3, warmup_steps=50, grad_scaler=scaler)
    algorithm = DiLoCo(local_steps=10) if args.algorithm == "diloco" else resolve(args.algorithm)
    model = baguarun.DistributedDataParallel(model, optimizers=[optimizer], algorithm=algorithm)
    state = State(
        model=model,
        optimizer=optimizer,
        scaler=scaler,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, step_size=1000, gamma=0.9),
        epoch=0,
        checkpoints=Checkpoints(folder=args.checkpoints, every_steps=50) if args.checkpoints else None,
    )
    data = Blobs(args.samples)
    loader = DataLoader(
        data,
        batch_sampler=ElasticSampler(data, args.batch_size, seed=args.seed),
        num_workers=args.loader_workers,
        persistent_workers=args.loader_workers > 0,
    )
    write(log, step=0)
    train(state, loader, log, args)
    if dist.get_rank() == 0:
        write(log, step=-1, loss=loss_held_out(model.module, args.samples))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
