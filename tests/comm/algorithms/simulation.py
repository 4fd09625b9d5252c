"""A small model trained by an algorithm on several ranks, and the same training of all ranks in one process.

The simulation is plain torch: a list of models, a list of optimizers, and functions that mix vectors.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from baguarun.comm.algorithms import Algorithm
from baguarun.comm.ddp import DistributedDataParallel
from tests.comm.ranks import BACKEND, run_ranks

Mix = Callable[[int, torch.Tensor], torch.Tensor]
"""(step, weights of all ranks as rows) -> the same after mixing."""


class Net(nn.Module):
    """With a frozen layer, a weight that is used twice, and a parameter that is not used at all."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first = nn.Linear(7, 11)
            self.frozen = nn.Linear(11, 11).requires_grad_(False)
            self.middle = nn.Linear(11, 11)
            self.again = nn.Linear(11, 11)
            self.last = nn.Linear(11, 3)
        self.again.weight = self.middle.weight
        self.unused = nn.Parameter(torch.ones(5))
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.frozen(self.first(x)))
        return self.last(torch.tanh(self.again(torch.relu(self.middle(hidden)))))


def make_optimizer(net: nn.Module) -> torch.optim.Optimizer:
    """Two groups with different rates, and momentum, which stays each rank's own."""
    parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim > 1], "lr": 0.05},
        {"params": [parameter for parameter in parameters if parameter.ndim == 1], "lr": 0.2},
    ]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def backward(net: nn.Module, rank: int, step: int, micro: int, dtype: torch.dtype = torch.float64) -> None:
    """One micro-batch, which is each rank's and step's own."""
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + micro)
    x = torch.randn(6, 7, generator=generator, dtype=torch.float64).to(dtype)
    target = torch.randn(6, 3, generator=generator, dtype=torch.float64).to(dtype)
    (net(x) - target).square().mean().backward()


def weights_of(net: nn.Module) -> torch.Tensor:
    trainable = [parameter for parameter in net.parameters() if parameter.requires_grad]
    return torch.cat([parameter.detach().reshape(-1).double() for parameter in trainable])


def set_weights(net: nn.Module, values: torch.Tensor) -> None:
    start = 0
    for parameter in net.parameters():
        if parameter.requires_grad:
            part = values[start : start + parameter.numel()]
            parameter.data.copy_(part.view_as(parameter))
            start += parameter.numel()


def one_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int, micro_batches: int, dtype: torch.dtype
) -> None:
    assert isinstance(model, DistributedDataParallel)
    optimizer.zero_grad()
    for micro in range(micro_batches):
        last = micro == micro_batches - 1
        with nullcontext() if last else model.no_sync():
            backward(model, dist.get_rank(), step, micro, dtype)
    optimizer.step()


def wrapped(
    algorithm: Algorithm, dtype: torch.dtype = torch.float64, *, init_sync: bool = True
) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    """A new `Net` and its optimizer. Without `init_sync` each rank goes on from weights of its own."""
    net = Net(dtype)
    optimizer = make_optimizer(net)
    model = DistributedDataParallel(
        net, optimizers=[optimizer], algorithm=algorithm, find_unused_parameters=True, init_sync=init_sync
    )
    return model, optimizer


def train(
    algorithm: Algorithm, steps: int, *, micro_batches: int = 1, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """On one rank: its weights after each step, a row each."""
    model, optimizer = wrapped(algorithm, dtype)
    rows = []
    for step in range(steps):
        one_step(model, optimizer, step, micro_batches, dtype)
        rows.append(weights_of(model.module))
    return torch.stack(rows)


def train_through(algorithm: Algorithm, steps: int, *, cut: int | None = None) -> torch.Tensor:
    """On one rank: its last weights. At `cut` all goes through a checkpoint of its own into new objects."""
    model, optimizer = wrapped(algorithm)
    for step in range(steps):
        if step == cut:
            file = io.BytesIO()
            torch.save([model.state_dict(), optimizer.state_dict(), model.algorithm_state_dict()], file)
            file.seek(0)
            weights, optimizer_state, algorithm_state = torch.load(file)
            model, optimizer = wrapped(algorithm, init_sync=False)
            model.load_state_dict(weights)
            optimizer.load_state_dict(optimizer_state)
            model.load_algorithm_state_dict(algorithm_state)
        one_step(model, optimizer, step, 1, torch.float64)
    return weights_of(model.module)


def train_each(algorithms: Sequence[Algorithm], steps: int, micro_batches: int = 1) -> list[torch.Tensor]:
    return [train(algorithm, steps, micro_batches=micro_batches) for algorithm in algorithms]


def unchanged(_step: int, weights: torch.Tensor) -> torch.Tensor:
    return weights


def simulate(
    world_size: int,
    steps: int,
    *,
    before_step: Mix = unchanged,
    after_step: Mix = unchanged,
    warmup_steps: int = 0,
    micro_batches: int = 1,
) -> torch.Tensor:
    """Weights as [step, rank, number]. Both mixes see all ranks' weights, before and after the optimizers."""
    nets = [Net() for _ in range(world_size)]
    optimizers = [make_optimizer(net) for net in nets]
    history = []
    for step in range(steps):
        for rank, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            optimizer.zero_grad()
            for micro in range(micro_batches):
                backward(net, rank, step, micro)
        if step < warmup_steps:
            average_gradients(nets)
        mix_all(nets, step, before_step)
        for optimizer in optimizers:
            optimizer.step()
        mix_all(nets, step, after_step)
        history.append(torch.stack([weights_of(net) for net in nets]))
    return torch.stack(history)


def average_gradients(nets: Sequence[nn.Module]) -> None:
    for parameters in zip(*(net.parameters() for net in nets), strict=True):
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if gradients:
            average = torch.stack(gradients).mean(0)
            for parameter in parameters:
                parameter.grad = average.clone()


def mix_all(nets: Sequence[nn.Module], step: int, mix: Mix) -> None:
    mixed = mix(step, torch.stack([weights_of(net) for net in nets]))
    for net, row in zip(nets, mixed, strict=True):
        set_weights(net, row)


def assert_same_training(found: Sequence[torch.Tensor], expected: torch.Tensor) -> None:
    """`found[rank]` is [step, number], `expected` is [step, rank, number]; to rounding of float64."""
    together = torch.stack(list(found), dim=1)
    for step, (here, there) in enumerate(zip(together, expected, strict=True)):
        assert torch.allclose(here, there, rtol=1e-10, atol=1e-12), f"step {step} differs"


def run_for_tensors(
    function: Callable[..., Any], world_size: int, *args: Any, backend: str = BACKEND
) -> list[Any]:
    """As `run_ranks`, for results with tensors in them, which outlive the ranks only as bytes."""
    found = run_ranks(_packed, world_size, function, args, backend=backend)
    return [torch.load(io.BytesIO(each)) for each in found]


def _packed(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    file = io.BytesIO()
    torch.save(function(*args), file)
    dist.barrier()
    return file.getvalue()
