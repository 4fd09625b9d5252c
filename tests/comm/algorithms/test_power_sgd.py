from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from baguarun.comm.algorithms import PowerSGD, resolve
from baguarun.comm.ddp import DistributedDataParallel
from baguarun.errors import UsageError
from tests.comm.algorithms.simulation import (
    Net,
    average_gradients,
    backward,
    make_optimizer,
    one_step,
    run_for_tensors,
    weights_of,
)
from tests.comm.models import assert_averaged, assert_same_on_all_ranks, batch, gathered_gradients, loss, mlp
from tests.comm.nodes import live_on_nodes

STEPS = 6
SMALL_BUCKETS_MB = 0.0004
"""So that several are under way at once."""


class PlainPowerSGD:
    """Algorithms 1 and 2 of the paper in plain torch, with torch's QR, on the gradients of all ranks."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.residuals: dict[tuple[int, int], torch.Tensor] = {}
        self.q: dict[int, torch.Tensor] = {}

    def __call__(self, nets: list[Net]) -> None:
        generator = torch.Generator().manual_seed(0)
        for index, parameters in enumerate(zip(*(net.parameters() for net in nets), strict=True)):
            rows = parameters[0].shape[0]
            columns = parameters[0].numel() // rows
            pairs = min(self.rank, rows, columns)
            if not parameters[0].requires_grad or parameters[0].ndim < 2:
                continue
            if (rows + columns) * pairs >= rows * columns:
                continue
            if index not in self.q:
                # The engine's begins are float32, row by row of the transposed Q.
                begin = torch.empty(pairs, columns).normal_(generator=generator)
                self.q[index] = begin.double().t()
            owed = []
            for rank, parameter in enumerate(parameters):
                assert parameter.grad is not None
                zero = torch.zeros(rows, columns, dtype=torch.float64)
                owed.append(parameter.grad.view(rows, columns) + self.residuals.get((index, rank), zero))
            p = torch.linalg.qr((torch.stack(owed) @ self.q[index]).mean(0)).Q
            self.q[index] = torch.stack([matrix.t() @ p for matrix in owed]).mean(0)
            for rank, (parameter, matrix) in enumerate(zip(parameters, owed, strict=True)):
                result = p @ self.q[index].t()
                self.residuals[index, rank] = matrix - result
                parameter.grad = result.view_as(parameter).clone()


def simulated(world_size: int, settings: PowerSGD, micro_batches: int) -> torch.Tensor:
    """Weights after each step, which are all ranks'."""
    nets = [Net() for _ in range(world_size)]
    optimizers = [make_optimizer(net) for net in nets]
    compress = PlainPowerSGD(settings.rank)
    rows = []
    for step in range(STEPS):
        for rank, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            optimizer.zero_grad()
            for micro in range(micro_batches):
                backward(net, rank, step, micro)
        if step >= settings.start_step:
            compress(nets)
        # What was compressed is equal already.
        average_gradients(nets)
        for optimizer in optimizers:
            optimizer.step()
        rows.append(weights_of(nets[0]))
    return torch.stack(rows)


def train(settings: PowerSGD, micro_batches: int) -> torch.Tensor:
    net = Net(torch.float32)
    optimizer = make_optimizer(net)
    model = DistributedDataParallel(
        net, algorithm=settings, find_unused_parameters=True, bucket_cap_mb=SMALL_BUCKETS_MB
    )
    rows = []
    for step in range(STEPS):
        one_step(model, optimizer, step, micro_batches, torch.float32)
        assert_same_on_all_ranks([parameter.detach() for parameter in net.parameters()])
        rows.append(weights_of(net))
    return torch.stack(rows)


def train_all(algorithms: list[PowerSGD], micro_batches: int) -> list[torch.Tensor]:
    return [train(settings, micro_batches) for settings in algorithms]


@pytest.mark.parametrize(
    ("world_size", "backend", "micro_batches"), [(2, "gloo", 2), (3, "baguanet", 1), (4, "baguanet", 1)]
)
def test_every_step_is_that_of_the_written_out_algorithm(
    world_size: int, backend: str, micro_batches: int
) -> None:
    algorithms = [PowerSGD(start_step=0), PowerSGD(rank=2, start_step=0), PowerSGD(start_step=2)]
    found = run_for_tensors(train_all, world_size, algorithms, micro_batches, backend=backend)
    for index, settings in enumerate(algorithms):
        expected = simulated(world_size, settings, micro_batches)
        moved = (expected - weights_of(Net())).abs().max()
        for each in found:
            assert (each[index] - expected).abs().max() < 1e-4 * moved


def train_by_rail(sizes: Sequence[int], settings: PowerSGD) -> torch.Tensor:
    live_on_nodes(sizes)
    return train(settings, 1)


@pytest.mark.parametrize("backend", ["gloo", "baguanet"])
@pytest.mark.parametrize("sizes", [(2, 2), (3, 1), (1, 2)], ids=str)
def test_by_rail_a_step_is_that_of_the_written_out_algorithm(sizes: Sequence[int], backend: str) -> None:
    settings = PowerSGD(rank=2, start_step=2, hierarchical=True)
    expected = simulated(sum(sizes), settings, 1)
    moved = (expected - weights_of(Net())).abs().max()
    for each in run_for_tensors(train_by_rail, sum(sizes), sizes, settings, backend=backend):
        assert (each - expected).abs().max() < 1e-4 * moved


def average_of_low_rank() -> None:
    """One row per rank gives gradients of rank one, whose average has the rank of the World."""
    world_size = dist.get_world_size()
    model = mlp(width=24)
    wrapped = DistributedDataParallel(
        model, algorithm=PowerSGD(rank=world_size, start_step=0), bucket_cap_mb=SMALL_BUCKETS_MB
    )
    for _ in range(3):
        inputs = batch(model, rows=1)
        reference = gathered_gradients(model, lambda net: loss(net(inputs)).backward())
        model.zero_grad()
        loss(wrapped(inputs)).backward()
        assert_averaged(model, reference, rtol=1e-4)


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_average_of_low_rank_comes_out_exactly(world_size: int) -> None:
    run_for_tensors(average_of_low_rank, world_size)


class Images(nn.Module):
    """A convolution whose weight lies in memory as channels_last, and a layer that is too small to gain."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.convolution = nn.Conv2d(6, 8, 3).to(memory_format=torch.channels_last)
            self.tiny = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tiny(torch.relu(self.convolution(x)).mean((2, 3)))


def train_images(dtype: torch.dtype) -> tuple[float, float]:
    """Loss before and after, with replicas compared bit for bit."""
    net = Images().to(dtype)
    model = DistributedDataParallel(net, algorithm=PowerSGD(start_step=1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(16, 6, 8, 8, generator=generator).to(dtype)
    target = x.float().square().mean((1, 2, 3)).unsqueeze(1)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        error = (model(x).float() - target).square().mean()
        error.backward()
        optimizer.step()
        losses.append(error.item())
    assert net.convolution.weight.grad is not None
    assert net.convolution.weight.grad.stride() == net.convolution.weight.stride()
    assert_same_on_all_ranks([parameter.detach() for parameter in net.parameters()])
    return losses[0], losses[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_16_bit_gradients_and_channels_last_train(dtype: torch.dtype) -> None:
    for before, after in run_for_tensors(train_images, 2, dtype):
        assert after < 0.3 * before


def overflow_on_one_rank(sizes: Sequence[int]) -> list[list[bool]]:
    """Which gradients are finite in each step; rank 1's of the second layer overflow in step 1."""
    live_on_nodes(sizes)
    model = mlp(width=24)
    wrapped = DistributedDataParallel(model, algorithm=PowerSGD(start_step=0))
    found = []
    for step in range(3):
        model.zero_grad()
        output = wrapped(batch(model))
        weight = model[2].weight
        extra = weight.flatten()[0] * float("inf" if step == 1 and dist.get_rank() == 1 else 0)
        (loss(output) + extra).backward()
        found.append([bool(layer.weight.grad.isfinite().all()) for layer in (model[0], model[2], model[4])])
        if step == 1:
            assert model[2].weight.grad.isnan().all()
    residuals = wrapped.algorithm_state_dict()["residuals"]
    assert all(residual.isfinite().all() for residual in residuals)
    assert all(residual.abs().max() < 1e3 for residual in residuals)
    return found


@pytest.mark.parametrize("sizes", [(3,), (2, 2)], ids=str)
def test_an_overflow_reaches_the_gradients_of_all_ranks_and_leaves_with_its_step(
    sizes: Sequence[int],
) -> None:
    for found in run_for_tensors(overflow_on_one_rank, sum(sizes), sizes):
        assert found == [[True, True, True], [True, False, True], [True, True, True]]


def train_halves(settings: PowerSGD, cut: int | None) -> torch.Tensor:
    """Trains through; at `cut` all goes through a checkpoint of each rank's own into a new model."""
    net = Net(torch.float32)
    optimizer = make_optimizer(net)
    model = DistributedDataParallel(net, algorithm=settings, find_unused_parameters=True)
    for step in range(STEPS):
        if step == cut:
            file = io.BytesIO()
            torch.save([model.state_dict(), optimizer.state_dict(), model.algorithm_state_dict()], file)
            file.seek(0)
            weights, inner, state = torch.load(file)
            net = Net(torch.float32)
            optimizer = make_optimizer(net)
            model = DistributedDataParallel(net, algorithm=settings, find_unused_parameters=True)
            model.load_state_dict(weights)
            optimizer.load_state_dict(inner)
            model.load_algorithm_state_dict(state)
            assert model.algorithm_state_dict()["steps"] == cut
        one_step(model, optimizer, step, 1, torch.float32)
    return weights_of(net)


def train_with_and_without_a_cut() -> list[torch.Tensor]:
    settings = PowerSGD(start_step=3)
    return [train_halves(settings, cut) for cut in (None, 1, 3, 5)]


def test_a_resumed_training_is_that_without_a_pause_bit_for_bit() -> None:
    for through, *resumed in run_for_tensors(train_with_and_without_a_cut, 2):
        assert all(torch.equal(through, other) for other in resumed)


def load_a_wrong_state() -> str:
    def wrap(rank: int) -> DistributedDataParallel:
        return DistributedDataParallel(mlp(), algorithm=PowerSGD(rank=rank))

    with pytest.raises(UsageError) as caught:
        wrap(1).load_algorithm_state_dict(wrap(2).algorithm_state_dict())
    return str(caught.value)


def test_the_state_of_another_rank_is_refused() -> None:
    for message in run_for_tensors(load_a_wrong_state, 2):
        assert "want the state of the same model with the same rank" in message


def average_of_many_numbers(sizes: Sequence[int]) -> None:
    """More than go to everybody at once: vectors of 128 kB, and more."""
    live_on_nodes(sizes)
    world_size = dist.get_world_size()
    model = nn.Linear(16000, 24)
    wrapped = DistributedDataParallel(model, algorithm=PowerSGD(rank=world_size, start_step=0))
    inputs = torch.randn(1, 16000)
    reference = gathered_gradients(model, lambda net: loss(net(inputs)).backward())
    model.zero_grad()
    loss(wrapped(inputs)).backward()
    assert_averaged(model, reference, rtol=1e-4)
    assert model.weight.grad is not None
    assert_same_on_all_ranks([model.weight.grad])


@pytest.mark.parametrize("sizes", [(2,), (2, 2), (3, 2)], ids=str)
def test_an_average_of_low_rank_of_large_matrices_comes_out_exactly(sizes: Sequence[int]) -> None:
    run_for_tensors(average_of_many_numbers, sum(sizes), sizes)


def count_bytes(rank: int) -> list[int]:
    """Of a step in full and of a compressed one."""
    net = nn.Linear(1000, 300)
    model = DistributedDataParallel(net, algorithm=PowerSGD(rank=rank, start_step=1), share_memory=False)
    sent = [0]
    for _ in range(2):
        model(torch.ones(1, 1000)).sum().backward()
        sent.append(model.stats().bytes_sent)
    return [after - before for before, after in pairwise(sent)]


def test_two_vectors_per_pair_are_sent_in_place_of_the_matrix() -> None:
    both_ways = 2 * 2 / 3 * 4
    for full, compressed in run_for_tensors(count_bytes, 3, 2):
        assert full == pytest.approx(both_ways * 300_300, rel=0.01)
        # So few go to both others at once.
        assert compressed == 2 * 4 * (2 * 1300 + 300)
    for _, compressed in run_for_tensors(count_bytes, 3, 9):
        assert compressed == pytest.approx(2 * 4 * (9 * 300 + 300) + both_ways * 9 * 1000, rel=0.01)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "rank=0; want 1 <= rank"),
        ({"start_step": -1}, "want 0 <= start_step"),
        ({"hierarchical": "yes"}, "hierarchical='yes'; want True, False or 'auto'"),
    ],
)
def test_a_setting_out_of_range_is_refused_with_its_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PowerSGD(**settings)


def test_it_is_known_by_name() -> None:
    assert resolve("power_sgd") == PowerSGD()


def compress_what_is_tiny(size: float) -> bool:
    module = nn.Linear(40, 40, bias=False)
    model = DistributedDataParallel(module, algorithm=PowerSGD(start_step=0))
    for _ in range(4):
        model.zero_grad()
        (model(torch.randn(3, 40)) * size).sum().backward()
    assert module.weight.grad is not None
    return bool(module.weight.grad.isfinite().all())


@pytest.mark.parametrize("size", [1e-20, 1e-21, 1e-30])
def test_tiny_gradients_stay_numbers(size: float) -> None:
    assert run_for_tensors(compress_what_is_tiny, 2, size) == [True, True]


def load_what_rank_zero_owes() -> tuple[list[str], list[bool]]:
    model = DistributedDataParallel(mlp(), algorithm=PowerSGD(start_step=0))
    loss(model(batch(model.module))).backward()
    states = [model.algorithm_state_dict()]
    dist.broadcast_object_list(states, src=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.load_algorithm_state_dict(states[0])
    owed = model.algorithm_state_dict()["residuals"]
    return [str(each.message) for each in caught], [bool(residual.any()) for residual in owed]


def test_residuals_of_another_rank_are_given_up_with_a_warning() -> None:
    (zero, owes_zero), (one, owes_one) = run_for_tensors(load_what_rank_zero_owes, 2)
    assert zero == [] and any(owes_zero)
    assert one == [
        "power_sgd: the state is of rank 0 of 2, this is rank 1 of 2: what it had left to send is given up"
    ]
    assert not any(owes_one)
