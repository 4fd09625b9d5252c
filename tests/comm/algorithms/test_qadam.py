from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from baguarun.comm.algorithms import QAdam, QAdamOptimizer, resolve
from baguarun.comm.ddp import DistributedDataParallel
from baguarun.errors import UsageError
from tests.comm.algorithms.feedback import (
    PlainExchange,
    assert_result,
    local_gradients,
    plan_names,
    through_codec,
)
from tests.comm.models import assert_same_on_all_ranks, batch, loss, mlp
from tests.comm.ranks import run_ranks

WARMUP, STEPS, FLOOR = 4, 10, 0.05
BETAS = {"weight": (0.9, 0.99), "bias": (0.5, 0.95)}


def two_groups(module: nn.Module, **settings: Any) -> list[dict[str, Any]]:
    """Weights and biases with betas of their own."""
    return [
        {
            "params": [parameter for name, parameter in module.named_parameters() if name.endswith(kind)],
            "betas": betas,
            **settings,
        }
        for kind, betas in BETAS.items()
    ]


DECAY = 0.1


class PlainQAdam:
    """Torch's Adam or AdamW up to the end of the warm-up; then its last variance with the momentum given."""

    def __init__(self, module: nn.Module, is_decoupled: bool) -> None:
        self.is_decoupled = is_decoupled
        self.names = [name for name, _ in module.named_parameters()]
        self.weights = nn.ParameterDict(
            {
                name.replace(".", "_"): parameter.detach().clone()
                for name, parameter in module.named_parameters()
            }
        )
        groups = two_groups(self.weights, lr=0.01, weight_decay=DECAY)
        self.adam = torch.optim.AdamW(groups) if is_decoupled else torch.optim.Adam(groups)
        self.steps = 0

    def step(self, gradients: dict[str, torch.Tensor]) -> None:
        self.steps += 1
        for name in self.names:
            weight = self.weights[name.replace(".", "_")]
            weight.grad = gradients[name].clone()
            if self.steps > WARMUP:
                self._step_with_momentum(weight, BETAS["bias" if name.endswith("bias") else "weight"])
        if self.steps <= WARMUP:
            self.adam.step()

    def _step_with_momentum(self, weight: nn.Parameter, betas: tuple[float, float]) -> None:
        variance = self.adam.state[weight]["exp_avg_sq"] / (1 - betas[1] ** WARMUP)
        variance = torch.maximum(variance, FLOOR * variance.mean())
        assert weight.grad is not None
        with torch.no_grad():
            coupled = 0.0 if self.is_decoupled else (1 - betas[0]) * DECAY
            momentum = weight.grad + coupled * weight
            update = momentum / (1 - betas[0] ** WARMUP) / (variance.sqrt() + 1e-8)
            weight.copy_(weight * (1 - 0.01 * DECAY * self.is_decoupled) - 0.01 * update)

    def assert_same_weights(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            expected = self.weights[name.replace(".", "_")]
            torch.testing.assert_close(parameter, expected, rtol=1e-5, atol=1e-6, msg=name)


def follow(bits: int, micro_batches: int, set_to_none: bool, is_decoupled: bool) -> None:
    """Each step takes the gradients, momentum and weights that the plain one takes."""
    module = mlp(width=61)
    optimizer = QAdamOptimizer(
        two_groups(module),
        lr=0.01,
        warmup_steps=WARMUP,
        weight_decay=DECAY,
        decoupled_weight_decay=is_decoupled,
        variance_floor=FLOOR,
    )
    model = DistributedDataParallel(
        module, optimizers=[optimizer], algorithm=QAdam(bits=bits), bucket_cap_mb=0.01
    )
    plain = PlainQAdam(module, is_decoupled)
    lossy = through_codec("MINMAX8" if bits == 8 else "SIGN1")
    exchange = PlainExchange(lossy, dist.get_world_size(), feedback=bits == 1)
    named = dict(module.named_parameters())
    for step in range(STEPS):
        inputs = [batch(module) for _ in range(micro_batches)]

        def backward(local: nn.Module, inputs: list[torch.Tensor] = inputs) -> None:
            for x in inputs:
                loss(local(x)).backward()

        gradients = local_gradients(model, backward)
        optimizer.zero_grad(set_to_none)
        for x in inputs:
            with nullcontext() if x is inputs[-1] else model.no_sync():
                loss(model(x)).backward()
        if step < WARMUP:
            for name, parameter in named.items():
                average = torch.stack(gradients[name]).double().mean(0).float()
                torch.testing.assert_close(parameter.grad, average, rtol=1e-4, atol=1e-4)
        else:
            momentum = {
                name: [
                    torch.lerp(
                        optimizer.state[named[name]]["exp_avg"],
                        gradient,
                        1 - BETAS["bias" if name.endswith("bias") else "weight"][0],
                    )
                    for gradient in ranks
                ]
                for name, ranks in gradients.items()
            }
            assert_result(model, exchange.average(momentum, plan_names(model)))
        plain.step({name: parameter.grad.clone() for name, parameter in named.items()})
        optimizer.step()
        plain.assert_same_weights(module)
    assert_same_on_all_ranks(list(module.parameters()))


@pytest.mark.parametrize("bits", [8, 1])
@pytest.mark.parametrize(
    ("world_size", "micro_batches", "set_to_none", "is_decoupled"),
    [(2, 2, True, True), (3, 1, False, False), (4, 1, True, False)],
)
def test_every_step_equals_plain_adam_and_then_the_plain_exchange_of_momentum(
    world_size: int, micro_batches: int, set_to_none: bool, is_decoupled: bool, bits: int
) -> None:
    run_ranks(follow, world_size, bits, micro_batches, set_to_none, is_decoupled)


def regression(make: Callable[[nn.Module], tuple[nn.Module, torch.optim.Optimizer]], steps: int) -> float:
    """The loss after training on data of each rank's own."""
    module = mlp()
    model, optimizer = make(module)
    torch.manual_seed(100 + dist.get_rank())
    x = torch.randn(64, 37)
    target = torch.tanh(x.roll(1, 1) * 2) @ torch.eye(37, 40)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(x) - target).square().mean().backward()
        optimizer.step()
    assert_same_on_all_ranks(list(module.parameters()))
    found = (module(x) - target).square().mean().detach()
    dist.all_reduce(found)
    return found.item() / dist.get_world_size()


def trains_as_well_as_adam() -> list[float]:
    def with_adamw(module: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        adamw = torch.optim.AdamW(module.parameters(), lr=0.003, weight_decay=0.0)
        return DistributedDataParallel(module), adamw

    def with_bits(bits: int) -> Callable[[nn.Module], tuple[nn.Module, torch.optim.Optimizer]]:
        def make(module: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
            qadam = QAdamOptimizer(module.parameters(), lr=0.003, warmup_steps=40)
            return DistributedDataParallel(module, optimizers=[qadam], algorithm=QAdam(bits=bits)), qadam

        return make

    begin = regression(with_adamw, 40)
    return [begin] + [regression(make, 240) for make in (with_adamw, with_bits(8), with_bits(1))]


def test_the_compressed_stage_gets_as_far_as_adam() -> None:
    begin, adam, eight, one = run_ranks(trains_as_well_as_adam, 4)[0]
    assert adam < 0.7 * begin
    assert eight < adam + 0.05 * (begin - adam)
    assert one < adam + 0.3 * (begin - adam)


def bytes_by_stage(bits: int) -> tuple[int, int]:
    module = nn.Linear(256, 256, bias=False)
    optimizer = QAdamOptimizer(module.parameters(), warmup_steps=2)
    model = DistributedDataParallel(module, optimizers=[optimizer], algorithm=QAdam(bits=bits))
    sent = []
    for _ in range(5):
        optimizer.zero_grad()
        before = model.stats().bytes_sent
        model(torch.randn(4, 256)).square().sum().backward()
        sent.append(model.stats().bytes_sent - before)
        optimizer.step()
    assert sent[0] == sent[1] and sent[2] == sent[3] == sent[4]
    return sent[0], sent[-1]


@pytest.mark.parametrize(("bits", "fewer"), [(8, 3.9), (1, 31)])
def test_so_many_times_fewer_bytes_travel_after_the_warm_up(bits: int, fewer: float) -> None:
    for full, compressed in run_ranks(bytes_by_stage, 4, bits):
        assert full == 2 * 3 * 256 * 256
        assert fewer < full / compressed < 32 / bits


def weights_after(scaler: torch.amp.GradScaler | None, overflow_at: int | None = None) -> torch.Tensor:
    module = mlp()
    optimizer = QAdamOptimizer(module.parameters(), lr=0.01, warmup_steps=3, grad_scaler=scaler)
    model = DistributedDataParallel(module, optimizers=[optimizer], algorithm=QAdam(bits=1))
    for step in range(9):
        torch.manual_seed(10 * step + dist.get_rank())
        x = torch.randn(5, 37)
        optimizer.zero_grad()
        value = loss(model(x))
        if scaler is None:
            value.backward()
            optimizer.step()
            continue
        if step == overflow_at and dist.get_rank() == 1:
            value = value * float("inf")
        scaler.scale(value).backward()
        before = torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])
        scaler.step(optimizer)
        after = torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])
        assert torch.equal(before, after) == (step == overflow_at)
        scaler.update()
    assert_same_on_all_ranks(list(module.parameters()))
    return after if scaler is not None else torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def grad_scaler_changes_nothing() -> None:
    # Grows every second step, by powers of two: exact.
    growing = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    assert torch.equal(weights_after(growing), weights_after(None))
    assert growing.get_scale() > 100
    overflowing = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert weights_after(overflowing, overflow_at=6).isfinite().all()
    assert overflowing.get_scale() == 4.0


def test_with_grad_scaler_the_same_bits_and_an_overflow_leaves_the_step_out_on_all_ranks() -> None:
    run_ranks(grad_scaler_changes_nothing, 3)


def nan_on_one_rank(bits: int, at: int) -> None:
    module = mlp()
    optimizer = QAdamOptimizer(module.parameters(), lr=0.01, warmup_steps=3)
    model = DistributedDataParallel(module, optimizers=[optimizer], algorithm=QAdam(bits=bits))
    for step in range(8):
        optimizer.zero_grad()
        x = batch(module)
        if step == at and dist.get_rank() == 1:
            x[0, 0] = float("nan")
        loss(model(x)).backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        assert [str(each.message) for each in caught] == (
            [f"QAdamOptimizer: a gradient is not finite; step {step + 1} is left out"] if step == at else []
        )
    assert optimizer.steps == 7
    assert all(parameter.isfinite().all() for parameter in module.parameters())
    assert_same_on_all_ranks(list(module.parameters()))


@pytest.mark.parametrize("bits", [8, 1])
@pytest.mark.parametrize("at", [1, 5])
def test_a_nan_leaves_one_step_out_and_is_gone_in_the_next(bits: int, at: int) -> None:
    run_ranks(nan_on_one_rank, 3, bits, at)


class PlainPair:
    """One AdamW for weights and one for biases. When both have taken WARMUP steps, both stand still."""

    def __init__(self, module: nn.Module, kinds: Sequence[str]) -> None:
        self.kinds = kinds
        self.weights = {name: nn.Parameter(each.detach().clone()) for name, each in module.named_parameters()}
        self.adamw = {
            kind: torch.optim.AdamW(
                [weight for name, weight in self.weights.items() if name.endswith(kind)],
                lr=0.01,
                betas=BETAS[kind],
                weight_decay=0.1,
            )
            for kind in kinds
        }
        self.taken = dict.fromkeys(kinds, 0)
        self.momentum: dict[str, torch.Tensor] = {}
        self.denominators: dict[str, torch.Tensor] = {}

    @property
    def is_frozen(self) -> bool:
        return bool(self.denominators)

    @torch.no_grad()
    def step(self, gradients: dict[str, torch.Tensor]) -> None:
        """`gradients` are momentum if both stood still before this."""
        are_momentum = self.is_frozen
        for kind in self.kinds:
            mine = {name: each for name, each in gradients.items() if name.endswith(kind)}
            if not all(each.isfinite().all() for each in mine.values()):
                continue
            if self.is_frozen:
                for name, gradient in mine.items():
                    beta = 0.0 if are_momentum else BETAS[kind][0]
                    self.momentum[name] = beta * self.momentum[name] + (1 - beta) * gradient
                    weight = self.weights[name]
                    update = self.momentum[name] / (1 - BETAS[kind][0] ** self.taken[kind])
                    weight.copy_(weight * (1 - 0.01 * 0.1) - 0.01 * update / self.denominators[name])
                continue
            for name, gradient in mine.items():
                self.weights[name].grad = gradient.clone()
            self.adamw[kind].step()
            self.taken[kind] += 1
            if min(self.taken.values()) >= WARMUP:
                self._freeze()

    def _freeze(self) -> None:
        for name, weight in self.weights.items():
            kind = "bias" if name.endswith("bias") else "weight"
            state = self.adamw[kind].state[weight]
            self.momentum[name] = state["exp_avg"].clone()
            variance = state["exp_avg_sq"] / (1 - BETAS[kind][1] ** self.taken[kind])
            self.denominators[name] = variance.clamp(min=FLOOR * variance.mean().item()).sqrt() + 1e-8


def one_of_two_left_behind(bits: int, kinds: list[str], with_scaler: bool) -> None:
    module = mlp(width=61)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100) if with_scaler else None
    groups = dict(zip(BETAS, two_groups(module), strict=True))
    optimizers = [
        QAdamOptimizer(
            [groups[kind]],
            lr=0.01,
            warmup_steps=WARMUP,
            weight_decay=0.1,
            decoupled_weight_decay=True,
            variance_floor=FLOOR,
            grad_scaler=scaler,
        )
        for kind in kinds
    ]
    model = DistributedDataParallel(
        module, optimizers=optimizers, algorithm=QAdam(bits=bits), bucket_cap_mb=0.01
    )
    plain = PlainPair(module, kinds)
    stages = []
    for step in range(STEPS):
        x = batch(module)
        # Of a bias, on one rank: the weights know nothing of it.
        factor = float("nan") if step == 1 and dist.get_rank() == 1 else 1.0
        handle = module[2].bias.register_hook(lambda gradient, factor=factor: gradient * factor)
        for optimizer in optimizers:
            optimizer.zero_grad()
        value = loss(model(x))
        (value if scaler is None else scaler.scale(value)).backward()
        handle.remove()
        stages.append(model._session._stages.entered)  # type: ignore[union-attr]
        assert (stages[-1] == 1) == plain.is_frozen
        scale = 1.0 if scaler is None else scaler.get_scale()
        plain.step({name: parameter.grad / scale for name, parameter in module.named_parameters()})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for optimizer in optimizers:
                optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(parameter, plain.weights[name], rtol=1e-4, atol=1e-5, msg=name)
    assert stages == [0] * (WARMUP + 1) + [1] * (STEPS - WARMUP - 1)
    assert_same_on_all_ranks(list(module.parameters()))


@pytest.mark.parametrize("with_scaler", [False, True], ids=["alone", "GradScaler"])
@pytest.mark.parametrize("kinds", [["weight", "bias"], ["bias", "weight"]], ids=" then ".join)
@pytest.mark.parametrize("bits", [8, 1])
def test_the_warm_up_lasts_until_the_optimizer_that_left_a_step_out_has_ended_it(
    bits: int, kinds: list[str], with_scaler: bool
) -> None:
    run_ranks(one_of_two_left_behind, 2, bits, kinds, with_scaler)


def resume_one_of_two() -> str:
    def make() -> tuple[DistributedDataParallel, list[QAdamOptimizer]]:
        module = mlp()
        optimizers = [QAdamOptimizer([group], warmup_steps=2) for group in two_groups(module)]
        return DistributedDataParallel(module, optimizers=optimizers, algorithm="qadam"), optimizers

    model, optimizers = make()
    for _ in range(3):
        loss(model(batch(model.module))).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    resumed, others = make()
    others[0].load_state_dict(optimizers[0].state_dict())
    with pytest.raises(UsageError) as caught:
        resumed(batch(model.module))
    return str(caught.value)


def test_the_state_of_one_optimizer_of_two_is_refused() -> None:
    for message in run_ranks(resume_one_of_two, 2):
        assert "qadam: of optimizers that have taken 3, 0 steps some have ended the warm-up" in message


class LateBranch(nn.Module):
    """A layer that takes part when asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(20, 20)
        self.late = nn.Linear(20, 20)
        self.uses_late = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.late(self.always(x)) if self.uses_late else self.always(x)


def first_gradient_after_the_warm_up(bits: int) -> None:
    module = LateBranch()
    optimizer = QAdamOptimizer(module.parameters(), lr=0.01, warmup_steps=3)
    model = DistributedDataParallel(
        module, optimizers=[optimizer], algorithm=QAdam(bits=bits), find_unused_parameters=True
    )
    start = module.late.weight.detach().clone()
    for step in range(12):
        module.uses_late = step >= 6
        optimizer.zero_grad()
        model(torch.randn(8, 20)).square().mean().backward()
        optimizer.step()
    moved = (module.late.weight.detach() - start).abs()
    assert 0 < moved.max() < 6 * 0.1
    assert_same_on_all_ranks(list(module.parameters()))


@pytest.mark.parametrize("bits", [8, 1])
def test_a_parameter_without_a_gradient_in_the_warm_up_does_not_explode(bits: int) -> None:
    run_ranks(first_gradient_after_the_warm_up, 2, bits)


def freeze_and_unfreeze_after_the_warm_up(bits: int) -> None:
    torch.manual_seed(0)
    module = nn.ModuleDict({"early": nn.Linear(6, 6), "late": nn.Linear(6, 6)})
    start = module["late"].weight.detach().clone()
    optimizer = QAdamOptimizer(module.parameters(), lr=0.01, warmup_steps=3)

    def wrap() -> DistributedDataParallel:
        chain = nn.Sequential(*module.values())
        algorithm = QAdam(bits=bits)
        return DistributedDataParallel(
            chain, optimizers=[optimizer], algorithm=algorithm, find_unused_parameters=True
        )

    def steps(model: DistributedDataParallel, count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            model(torch.randn(8, 6)).square().mean().backward()
            optimizer.step()
        assert_same_on_all_ranks(list(module.parameters()))

    module["late"].requires_grad_(False)
    model = wrap()
    steps(model, 5)
    assert torch.equal(module["late"].weight, start)
    # Was not there in the warm-up, and nobody exchanges its gradients before it is wrapped.
    module["late"].requires_grad_(True)
    if dist.get_world_size() == 1:
        steps(model, 1)
    else:
        with pytest.raises(UsageError, match="were frozen when the model was wrapped"):
            steps(model, 1)
    model = wrap()
    steps(model, 3)
    assert 0 < (module["late"].weight - start).abs().max() < 6 * 3 * 0.01
    # Goes away from a model that is wrapped.
    module["early"].requires_grad_(False)
    early = module["early"].weight.detach().clone()
    steps(model, 3)
    assert torch.equal(module["early"].weight, early)


@pytest.mark.parametrize("bits", [8, 1])
@pytest.mark.parametrize("world_size", [1, 2])
def test_parameters_may_be_frozen_and_unfrozen_after_the_warm_up(bits: int, world_size: int) -> None:
    run_ranks(freeze_and_unfreeze_after_the_warm_up, world_size, bits)


def optimize_what_is_not_of_the_model() -> str:
    module, scale = nn.Linear(3, 3), nn.Parameter(torch.zeros(2, 5))
    optimizer = QAdamOptimizer([*module.parameters(), scale], warmup_steps=3)
    with pytest.raises(UsageError) as caught:
        DistributedDataParallel(module, optimizers=[optimizer], algorithm="qadam")
    return str(caught.value)


def test_an_optimizer_with_parameters_of_others_is_refused() -> None:
    for message in run_ranks(optimize_what_is_not_of_the_model, 2):
        assert "1 parameters of QAdamOptimizer, of shape (2, 5), are not of this model" in message


def alone() -> None:
    """In a World of one the optimizer mixes by itself: as AdamW with its variance frozen."""
    torch.manual_seed(0)
    module, plain = nn.Linear(9, 5), nn.Linear(9, 5)
    plain.load_state_dict(module.state_dict())
    optimizer = QAdamOptimizer(module.parameters(), lr=0.01, warmup_steps=3, variance_floor=0)
    model = DistributedDataParallel(module, optimizers=[optimizer], algorithm="qadam")
    adamw = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0)
    momentum: dict[nn.Parameter, torch.Tensor] = {}
    for step in range(7):
        x = torch.randn(4, 9)
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
        adamw.zero_grad()
        plain(x).square().sum().backward()
        if step < 3:
            adamw.step()
        for parameter in plain.parameters() if step >= 3 else ():
            state = adamw.state[parameter]
            old = momentum.get(parameter, state["exp_avg"])
            momentum[parameter] = 0.9 * old + 0.1 * parameter.grad
            denominator = (state["exp_avg_sq"] / (1 - 0.999**3)).sqrt() + 1e-8
            parameter.data -= 0.01 * momentum[parameter] / (1 - 0.9**3) / denominator
        for own, other in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


def test_in_a_world_of_one_momentum_is_mixed_by_the_optimizer() -> None:
    run_ranks(alone, 1)


def whole_momentum() -> None:
    """Float64 has no codec: as the optimizer by itself with gradients averaged beforehand."""
    module, plain = mlp(torch.float64), mlp(torch.float64)
    made = [QAdamOptimizer(two_groups(each), lr=0.01, warmup_steps=3) for each in (module, plain)]
    model = DistributedDataParallel(module, optimizers=made[:1], algorithm=QAdam(bits=1))
    for _ in range(7):
        x = batch(module)
        gradients = local_gradients(model, lambda local, x=x: loss(local(x)).backward())
        made[0].zero_grad()
        loss(model(x)).backward()
        made[0].step()
        for name, parameter in plain.named_parameters():
            parameter.grad = torch.stack(gradients[name]).mean(0)
        made[1].step()
        for own, other in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-12)


def test_a_step_without_any_gradient_does_not_end_the_warm_up() -> None:
    """One that is applied already, and gone through once more, has none, and its count is put back."""
    net = torch.nn.Linear(3, 2)
    optimizer = QAdamOptimizer(net.parameters(), warmup_steps=2)

    def step() -> None:
        net(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    optimizer.step()
    optimizer.param_groups[0]["steps"] = 1
    assert optimizer.in_warmup
    step()
    assert not optimizer.in_warmup


def test_float64_momentum_travels_whole() -> None:
    run_ranks(whole_momentum, 3)


def refusals() -> None:
    module = mlp()
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    for optimizers, message in [
        ([], r"qadam: found optimizers=\[\]; want optimizers=\[QAdamOptimizer\(\.\.\.\)\]"),
        ([sgd], r"qadam: found optimizers=\[SGD\]; want"),
        (
            [QAdamOptimizer(module[0].parameters())],
            r"qadam: no QAdamOptimizer has 2.weight, 2.bias",
        ),
        (
            [QAdamOptimizer(module.parameters(), warmup_steps=dist.get_rank() + 1)],
            "warmup_steps",
        ),
    ]:
        with pytest.raises(UsageError, match=message):
            DistributedDataParallel(module, optimizers=optimizers, algorithm="qadam")
    optimizer = QAdamOptimizer(module.parameters())
    model = DistributedDataParallel(module, optimizers=[optimizer], algorithm="qadam")
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss(model(batch(module)))).backward()
    with pytest.raises(UsageError, match=r"want QAdamOptimizer\(\.\.\., grad_scaler=scaler\)"):
        scaler.step(optimizer)


def test_a_wrong_optimizer_is_refused_with_what_to_write() -> None:
    run_ranks(refusals, 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warmup_steps": 0}, "warmup_steps=0; want 1 <= warmup_steps"),
        ({"lr": -1.0}, r"lr=-1.0; want 0 <= lr"),
        ({"betas": (0.9, 1.0)}, "want two numbers, 0 <= beta < 1"),
        ({"variance_floor": 2}, "want 0 <= variance_floor <= 1"),
        ({"weight_decay": -0.1}, "want 0 <= weight_decay"),
    ],
)
def test_a_setting_out_of_range_is_refused_with_its_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        QAdamOptimizer(nn.Linear(2, 2).parameters(), **settings)


def test_bits_are_8_or_1() -> None:
    assert resolve("qadam") == QAdam(bits=8)
    with pytest.raises(UsageError, match="qadam: bits=4; want 8 or 1"):
        QAdam(bits=4)
