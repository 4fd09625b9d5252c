from __future__ import annotations

from collections.abc import Callable
from itertools import groupby, pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn

from baguarun.comm.algorithms import Algorithm, ByteGrad, Sparse, resolve
from baguarun.comm.ddp import DistributedDataParallel
from baguarun.comm.extension import load_extension
from baguarun.errors import UsageError
from tests.comm.algorithms.feedback import (
    Lossy,
    PlainExchange,
    assert_result,
    local_gradients,
    plan_names,
    through_codec,
    top_k,
)
from tests.comm.models import assert_same_on_all_ranks, batch, loss, mlp
from tests.comm.ranks import run_ranks

STEPS = 6


def follow(algorithm: Algorithm, lossy: Lossy, dtype: torch.dtype = torch.float32) -> None:
    """Every step of a short training gives the gradients of the plain exchange."""
    model = DistributedDataParallel(mlp(dtype, width=61), algorithm=algorithm, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    plain = PlainExchange(lossy, dist.get_world_size())
    plans = []
    for _ in range(STEPS):
        x = batch(model.module)
        gradients = local_gradients(model, lambda local, x=x: loss(local(x)).backward())
        optimizer.zero_grad()
        loss(model(x)).backward()
        plans.append(plan_names(model))
        assert len(plans[-1]) > 1
        assert_result(model, plain.average(gradients, plans[-1]))
        optimizer.step()
    assert_same_on_all_ranks(list(model.parameters()))


def follow_top_k() -> None:
    follow(Sparse(warmup_steps=0, density=0.05), top_k(round(0.05 * 2048)))
    follow(Sparse(warmup_steps=0, density=0.05), top_k(round(0.05 * 2048)), torch.bfloat16)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_step_equals_the_plain_exchange_bit_for_bit(world_size: int) -> None:
    run_ranks(follow_top_k, world_size)


def follow_eight_bits() -> None:
    follow(ByteGrad(error_feedback=True), through_codec("MINMAX8"))


@pytest.mark.parametrize("world_size", [3, 4])
def test_bytegrad_with_error_feedback_equals_it_too(world_size: int) -> None:
    run_ranks(follow_eight_bits, world_size)


def follow_warm_up() -> list[int]:
    """Every step equals the plain exchange with that step's density; the bytes of each."""
    algorithm = Sparse(warmup_steps=9, density=0.01)
    model = DistributedDataParallel(mlp(width=61), algorithm=algorithm, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    plain = PlainExchange(lambda numbers: numbers, dist.get_world_size())
    sent = [0]
    for step in range(12):
        x = batch(model.module)
        gradients = local_gradients(model, lambda local, x=x: loss(local(x)).backward())
        optimizer.zero_grad()
        loss(model(x)).backward()
        if step in (3, 6, 9):
            # Buckets are made anew, and what is owed stays.
            plain.lossy = top_k(round({3: 1 / 16, 6: 1 / 64, 9: 0.01}[step] * 2048))
        assert_result(model, plain.average(gradients, plan_names(model)))
        optimizer.step()
        sent.append(model.stats().bytes_sent)
    assert_same_on_all_ranks(list(model.parameters()))
    return [after - before for before, after in pairwise(sent)]


def test_the_density_falls_in_the_warm_up_and_nothing_owed_is_lost_between_its_parts() -> None:
    # Of two ranks, whose sums are the same bits in whatever order.
    for whole, sixteenth, sixty_fourth, rest in (found[::3] for found in run_ranks(follow_warm_up, 2)):
        assert whole > 8 * sixteenth > 20 * sixty_fourth > 22 * rest > 0


def bytes_of_steps(forwards_of: Callable[[int], int]) -> list[int]:
    """Of each step of a warm-up, in which there are so many forwards before the only backward."""
    model = DistributedDataParallel(nn.Linear(256, 256, bias=False), algorithm=Sparse(warmup_steps=9))
    sent = [0]
    for step in range(12):
        model.zero_grad()
        outputs = [model(torch.randn(4, 256)) for _ in range(forwards_of(step))]
        loss(torch.cat(outputs)).backward()
        sent.append(model.stats().bytes_sent)
    assert_same_on_all_ranks([model.module.weight.grad])
    return [after - before for before, after in pairwise(sent)]


def forwards_without_a_round_of_their_own() -> None:
    found = bytes_of_steps(lambda _step: 1)
    assert [len(list(same)) for _, same in groupby(found)] == [3, 3, 3, 3]
    assert bytes_of_steps(lambda _step: 2) == found


def test_two_forwards_of_one_backward_are_one_step_of_the_warm_up() -> None:
    run_ranks(forwards_without_a_round_of_their_own, 2)


def extra_forwards_on_one_rank() -> None:
    model = DistributedDataParallel(nn.Linear(256, 256, bias=False), algorithm=Sparse(warmup_steps=8))
    for step in range(10):
        if step in (1, 4) and dist.get_rank() == 0:
            # To look at the loss, say: in training mode, and no backward follows.
            model(torch.randn(4, 256))
        model.zero_grad()
        loss(model(torch.randn(4, 256))).backward()
        assert_same_on_all_ranks([model.module.weight.grad])


def test_a_forward_more_on_one_rank_leaves_the_ranks_in_one_stage() -> None:
    run_ranks(extra_forwards_on_one_rank, 2)


@pytest.mark.parametrize(
    ("settings", "densities"),
    [
        (Sparse(), [1 / 4, 1 / 16, 1 / 64, 0.01]),
        (Sparse(density=0.1), [1 / 4, 0.1]),
        (Sparse(density=1 / 1024), [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 1024]),
        (Sparse(warmup_steps=0), [0.01]),
    ],
)
def test_densities_fall_by_four(settings: Sparse, densities: list[float]) -> None:
    assert settings.densities() == densities


def gaps_of_sums() -> list[float]:
    """How far the average of what was received is from the average gradient, after 20, 40 and 80 steps."""
    torch.manual_seed(dist.get_rank())
    module = nn.Linear(90, 70, bias=False)
    model = DistributedDataParallel(module, algorithm=Sparse(warmup_steps=0, density=1 / 16))
    # The gradient of a linear loss does not depend on the weights.
    slope = torch.randn(70, 90)
    gradients = [torch.empty_like(slope) for _ in range(dist.get_world_size())]
    dist.all_gather(gradients, slope)
    wanted = torch.stack(gradients).mean(0)
    total = torch.zeros_like(slope)
    gaps = []
    for step in range(1, 81):
        model.zero_grad()
        (model(torch.eye(90)).T * slope).sum().backward()
        assert module.weight.grad is not None
        assert module.weight.grad.count_nonzero() <= slope.numel() / 16 + 4
        total += module.weight.grad
        if step in (20, 40, 80):
            gaps.append(float((total / step - wanted).norm() / wanted.norm()))
    return gaps


def test_the_sum_of_what_is_received_follows_the_sum_of_gradients() -> None:
    for early, middle, late in run_ranks(gaps_of_sums, 3):
        # What is owed does not grow: its share of the sum falls as 1/steps.
        assert early < 2
        assert middle < 0.65 * early
        assert late < 0.65 * middle


def losses_of(algorithm: Algorithm | str) -> tuple[float, float]:
    """Before and after a training on data of each rank's own."""
    torch.manual_seed(5 + dist.get_rank())
    x, target = torch.randn(64, 37), torch.randn(64, 40).tanh()
    model = DistributedDataParallel(mlp(), algorithm=algorithm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(150):
        optimizer.zero_grad()
        value = (model(x) - target).square().mean()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert_same_on_all_ranks(list(model.parameters()))
    return losses[0], losses[-1]


def train_sparse_and_whole() -> tuple[float, float, float]:
    return (*losses_of("gradient_allreduce"), losses_of(Sparse(warmup_steps=0, density=0.05))[1])


def test_it_trains_as_far_as_the_whole_gradient_and_replicas_stay_bit_identical() -> None:
    for begin, whole, sparse in run_ranks(train_sparse_and_whole, 4):
        assert whole < 0.95 * begin
        assert sparse < whole + 0.15 * (begin - whole)


def bytes_per_step() -> tuple[int, int]:
    model = DistributedDataParallel(
        nn.Linear(256, 256, bias=False), algorithm=Sparse(warmup_steps=0, density=1 / 128)
    )
    model(torch.ones(1, 256)).sum().backward()
    codec = load_extension()
    chunk = codec.encoded_bytes(codec.Wire.TOPK, 256 * 256 // 4, 16)
    return model.stats().bytes_sent, 2 * 3 * chunk


def test_six_bytes_travel_per_number_kept() -> None:
    for found, expected in run_ranks(bytes_per_step, 4):
        assert found == expected == 2 * 3 * 6 * 256 * 256 // 4 // 128


def overflow_on_one_rank() -> None:
    model = DistributedDataParallel(
        nn.Linear(100, 100, bias=False), algorithm=Sparse(warmup_steps=0, density=1 / 8)
    )
    gradients = []
    for step in range(40):
        model.zero_grad()
        x = torch.ones(1, 100)
        if step == 2 and dist.get_rank() == 1:
            x[0, 7] = float("inf")
        model(x).sum().backward()
        assert torch.isfinite(model.module.weight.grad).all() == (step != 2)
        gradients.append(model.module.weight.grad.clone())
    # Each number gets its turn, the one that overflowed too.
    assert (torch.stack(gradients[3:]).sum(0) > 0).all()


def test_an_overflow_is_seen_by_all_ranks_and_gone_in_the_next_step() -> None:
    run_ranks(overflow_on_one_rank, 3)


def keeps_what_has_no_codec() -> None:
    model = DistributedDataParallel(nn.Linear(4, 4).double(), algorithm=Sparse(warmup_steps=0))
    model(torch.full((1, 4), 1.0 + dist.get_rank(), dtype=torch.float64)).sum().backward()
    assert torch.equal(model.module.weight.grad, torch.full((4, 4), 1.5, dtype=torch.float64))


def test_float64_gradients_travel_whole() -> None:
    run_ranks(keeps_what_has_no_codec, 2)


@pytest.mark.parametrize("density", [0.0, 0.0004, 0.126, float("nan")])
def test_a_density_out_of_range_is_refused_with_the_range(density: float) -> None:
    with pytest.raises(UsageError, match=r"sparse: density=.*; want 0.00048828125 <= density <= 0.125"):
        Sparse(warmup_steps=0, density=density)


def test_it_is_known_by_name() -> None:
    assert resolve("sparse") == Sparse()
