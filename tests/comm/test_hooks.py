"""The codecs as hooks of torch's own DistributedDataParallel."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from baguarun.comm import hooks
from baguarun.errors import UsageError
from tests.comm.algorithms.feedback import BLOCK, PlainExchange, through_codec, top_k
from tests.comm.models import assert_same_on_all_ranks
from tests.comm.ranks import run_ranks

HOOKS = ("bytegrad", "onebit", "topk")
KEEP = 256
LOSSY = {"bytegrad": through_codec("MINMAX8"), "onebit": through_codec("SIGN1"), "topk": top_k(KEEP)}
STEPS = 6


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(24, 150), nn.Tanh(), nn.Linear(150, 24))


def trains(name: str) -> None:
    model = DistributedDataParallel(network(), bucket_cap_mb=0.01)
    state = hooks.CodecState(keep=256)
    model.register_comm_hook(state, getattr(hooks, name))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    data = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(150):
        x = torch.randn(32, 24, generator=data)
        loss = (model(x) - x.roll(1, dims=1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        assert_same_on_all_ranks([p.grad for p in model.parameters()])
        optimizer.step()
        losses.append(loss.item())
    assert_same_on_all_ranks(list(model.parameters()))
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    assert bool(state.residuals) == (name != "bytegrad")


@pytest.mark.parametrize("backend", ["gloo", "baguanet"])
@pytest.mark.parametrize("name", HOOKS)
def test_replicas_stay_bit_equal_and_the_loss_falls(name: str, backend: str) -> None:
    run_ranks(trains, 2, name, backend=backend)


class Followed:
    """A hook of ours, held against the plain exchange of all ranks' buckets at every call."""

    def __init__(self, name: str, overflow: float | None) -> None:
        self.name, self.overflow = name, overflow
        self.state = hooks.CodecState(keep=KEEP)
        self.step = 0
        self.checked = 0
        self._expected: list[tuple[torch.futures.Future[torch.Tensor], torch.Tensor, torch.Tensor]] = []
        self._plain: dict[tuple[int, ...], PlainExchange] = {}

    # Without annotations: DDP compares them with classes.
    def hook(self, state, bucket):  # type: ignore[no-untyped-def]
        values = bucket.buffer()
        if self.overflow is not None and self.step == STEPS // 2 and dist.get_rank() == 1:
            values[values.numel() // 2] = self.overflow
        everyone: list[torch.Tensor | None] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, values.clone())
        parameters = tuple(id(parameter) for parameter in bucket.parameters())
        plain = self._plain.setdefault(
            parameters,
            PlainExchange(
                LOSSY[self.name],
                len(everyone),
                feedback=self.name != "bytegrad",
                chunk_align=BLOCK,
            ),
        )
        expected = plain.average({"all": everyone}, [["all"]])["all"].to(values.dtype)
        future = getattr(hooks, self.name)(self.state, bucket)
        # Others are on their way while backward goes on.
        assert future.done() == bucket.is_last()
        self._expected.append((future, expected, torch.stack(everyone).float()))
        return future

    def check(self) -> None:
        """All buckets of this step."""
        for future, expected, everyone in self._expected:
            found = future.value()
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
            assert bool(found.isfinite().all()) == (self.overflow is None or self.step != STEPS // 2)
            if self.name == "bytegrad" and self.overflow is None:
                # Half a step of a grid of 255, for each of the two roundings.
                assert (found.float() - everyone.mean(0)).abs().max() <= 1.1 * 2 * everyone.abs().max() / 255
            self.checked += 1
        self._expected.clear()


def follows_the_plain_exchange(name: str, dtype: torch.dtype, overflow: float | None) -> None:
    # Two buckets of two blocks each: with three ranks one has no share of them.
    model = DistributedDataParallel(network().to(dtype), bucket_cap_mb=0.004)
    followed = Followed(name, overflow)
    model.register_comm_hook(None, followed.hook)
    data = torch.Generator().manual_seed(dist.get_rank())
    for followed.step in range(STEPS):
        model.zero_grad()
        x = torch.randn(8, 24, generator=data).to(dtype)
        (model(x) - x.roll(1, dims=1)).float().square().mean().backward()
        followed.check()
    assert followed.checked > STEPS
    for residuals in followed.state.residuals.values():
        assert residuals.owed.isfinite().all()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", HOOKS)
def test_every_step_equals_the_plain_exchange(name: str, world_size: int) -> None:
    run_ranks(follows_the_plain_exchange, world_size, name, torch.float32, None, backend="gloo")


@pytest.mark.parametrize("name", HOOKS)
def test_16_bit_buckets_equal_the_plain_exchange(name: str) -> None:
    run_ranks(follows_the_plain_exchange, 2, name, torch.bfloat16, None, backend="gloo")


@pytest.mark.parametrize("overflow", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", HOOKS)
def test_an_overflow_reaches_all_ranks_and_is_gone_with_the_next_step(name: str, overflow: float) -> None:
    run_ranks(follows_the_plain_exchange, 2, name, torch.float32, overflow, backend="gloo")


def gives_the_average(world_size: int) -> None:
    """With few numbers kept, the average comes over several steps of the same gradient."""
    model = DistributedDataParallel(nn.Linear(1, 5000, bias=False))
    state = hooks.CodecState(keep=KEEP)
    model.register_comm_hook(state, hooks.topk)
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(world_size, 5000, 1, generator=generator)
    total = torch.zeros(5000, 1)
    steps = 40
    for _ in range(steps):
        model.zero_grad()
        (model(torch.ones(1, 1)) * gradients[rank].T).sum().backward()
        total += model.module.weight.grad
    (residuals,) = state.residuals.values()
    owed = residuals.owed.clone()
    dist.all_reduce(owed)
    owed /= world_size
    average = gradients.mean(dim=0)
    torch.testing.assert_close(total + owed.view(-1, 1), steps * average, rtol=0, atol=1e-3)
    assert (total / steps - average).norm() < 0.4 * average.norm()


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_top_k_leaves_out_comes_later(world_size: int) -> None:
    run_ranks(gives_the_average, world_size, world_size)


class Breaks(torch.autograd.Function):
    """An identity whose backward fails."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("on purpose")


class Net(nn.Module):
    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.first, self.last, self.breaks = nn.Linear(24, 150), nn.Linear(150, 24), breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(Breaks.apply(x) if self.breaks else x)  # type: ignore[no-any-return, no-untyped-call]


def begins_anew_after_a_backward_that_failed() -> None:
    state = hooks.CodecState()
    x = torch.full((4, 24), float(dist.get_rank()))
    # Whose buckets are small from the first step on.
    broken, whole = (
        DistributedDataParallel(Net(breaks), bucket_cap_mb=0.01, find_unused_parameters=True)
        for breaks in (True, False)
    )
    for model in (broken, whole):
        model.register_comm_hook(state, hooks.bytegrad)
    with pytest.raises(ArithmeticError, match="on purpose"):
        broken(x).sum().backward()
    (left,) = state.under_way
    whole(x).sum().backward()
    assert not state.under_way
    assert not left.average.done()
    assert_same_on_all_ranks([p.grad for p in whole.parameters()])


def test_a_backward_that_failed_leaves_nothing_to_the_next_one() -> None:
    run_ranks(begins_anew_after_a_backward_that_failed, 2, backend="gloo")


def refuses_float64() -> None:
    model = DistributedDataParallel(nn.Linear(2, 2).double())
    model.register_comm_hook(hooks.CodecState(), hooks.bytegrad)
    with pytest.raises(
        UsageError, match=r"torch\.float64 on cpu; want float32, float16 or bfloat16 on cpu or cuda"
    ):
        model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()


def test_gradients_without_a_codec_are_refused_by_name() -> None:
    run_ranks(refuses_float64, 1, backend="gloo")


@pytest.mark.parametrize("keep", [0, 257])
def test_a_share_out_of_range_is_refused(keep: int) -> None:
    with pytest.raises(UsageError, match=f"keep={keep}; want 1 <= keep <= 256"):
        hooks.CodecState(keep=keep)
