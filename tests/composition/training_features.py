"""Features of the training loop. Each is one program: with the feature it runs on our wrapper, without on the
reference, and both must train alike.
"""

from __future__ import annotations

import io
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.composition.models import STEPS, batch, loss, mlp
from tests.composition.sides import Ours, Side, Trainer

OVERFLOW_STEP, OVERFLOW_RANK = 2, 1
MAX_NORM = 0.3


def accumulates(side: Side) -> None:
    trainer = side.wrap(mlp())
    for step in range(STEPS):
        trainer.zero_grad()
        first, second, third = (batch(step, micro) for micro in range(3))
        if side.has_feature:
            with trainer.no_sync():
                loss(trainer(first)).backward()
                loss(trainer(second)).backward()
            loss(trainer(third)).backward()
        else:
            output = trainer(torch.cat([first, second, third]))
            sum(loss(part) for part in output.chunk(3)).backward()
        trainer.step()


def scales_losses(side: Side) -> None:
    """One rank's gradients overflow once: the step is left out by all who see it, and by nobody else."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000, enabled=side.has_feature)
    net = mlp()
    known = {"grad_scaler": scaler} if side.row.knows_scaler and side.has_feature else {}
    trainer = side.wrap(net, [side.make_optimizer(net.parameters(), **known)])
    for step in range(STEPS):
        trainer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = loss(trainer(batch(step)))
        if step == OVERFLOW_STEP and dist.get_rank() == OVERFLOW_RANK:
            value = value * float("inf")
        scaler.scale(value).backward()
        trainer.combine()
        overflows = not _is_finite(trainer)
        if dist.get_rank() == OVERFLOW_RANK:
            assert overflows == (step == OVERFLOW_STEP)
        if side.has_feature:
            expected_scale = scaler.get_scale() * (0.5 if overflows else 1)
            # A step that was left out ends with the next forward, so what it did shows after the next step.
            trainer.step(partial(_step_scaled, trainer, scaler), record=step != OVERFLOW_STEP)
            assert scaler.get_scale() == expected_scale
        else:
            trainer.step(_do_nothing if overflows else None, record=step != OVERFLOW_STEP)


def _step_scaled(trainer: Trainer, scaler: torch.amp.GradScaler) -> None:
    (optimizer,) = trainer.optimizers
    scaler.step(optimizer)
    scaler.update()


def _is_finite(trainer: Trainer) -> bool:
    gradients = [parameter.grad for parameter in trainer.net.parameters() if parameter.grad is not None]
    return all(bool(gradient.isfinite().all()) for gradient in gradients)


def _do_nothing() -> None:
    return


def trains_in_bf16(side: Side) -> None:
    """Against the same training in float32."""
    dtype = torch.bfloat16 if side.has_feature else torch.float32
    trainer = side.wrap(mlp().to(dtype))
    for step in range(STEPS):
        trainer.zero_grad()
        loss(trainer(batch(step).to(dtype))).backward()
        trainer.step()


def has_parameter_groups(side: Side) -> None:
    """Against an optimizer for each group."""
    net = mlp()
    matrices = {"params": [parameter for parameter in net.parameters() if parameter.ndim > 1], "lr": 0.05}
    vectors = {"params": [parameter for parameter in net.parameters() if parameter.ndim == 1], "lr": 0.2}
    groups = [[matrices, vectors]] if side.has_feature else [[matrices], [vectors]]
    trainer = side.wrap(net, [side.make_optimizer(group) for group in groups])
    for step in range(STEPS):
        trainer.zero_grad()
        loss(trainer(batch(step))).backward()
        trainer.step()


def clips_gradients(side: Side) -> None:
    """Against a norm taken and applied by hand."""
    trainer = side.wrap(mlp())
    for step in range(STEPS):
        trainer.zero_grad()
        loss(trainer(batch(step))).backward()
        trainer.combine()
        gradients = [parameter.grad for parameter in trainer.net.parameters() if parameter.grad is not None]
        norm = torch.cat([gradient.reshape(-1).double() for gradient in gradients]).norm().item()
        assert step > 0 or norm > MAX_NORM
        if side.has_feature:
            found = nn.utils.clip_grad_norm_(trainer.net.parameters(), MAX_NORM).item()
            assert abs(found - norm) < 1e-4 * norm
        else:
            torch._foreach_mul_(gradients, min(1.0, MAX_NORM / norm))
        trainer.step()


def follows_a_schedule(side: Side) -> None:
    trainer = side.wrap(mlp())
    (optimizer,) = trainer.optimizers
    rate = optimizer.param_groups[0]["lr"]
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5) if side.has_feature else None
    for step in range(STEPS):
        trainer.zero_grad()
        loss(trainer(batch(step))).backward()
        if schedule is None:
            optimizer.param_groups[0]["lr"] = rate * 0.5 ** (step // 2)
        trainer.step()
        if schedule is not None:
            schedule.step()


def trains_two_models(side: Side) -> None:
    """Steps of two models by turns, and one backward through both; against one after the other."""
    seeds = (0, 1)
    if not side.has_feature:
        for seed in seeds:
            trainer = side.wrap(mlp())
            for step in range(STEPS):
                trainer.zero_grad()
                loss(trainer(batch(step, seed))).backward()
                trainer.step()
        return
    trainers = [side.wrap(mlp()) for _ in seeds]
    for step in range(STEPS):
        for trainer in trainers:
            trainer.zero_grad()
        losses = [loss(trainer(batch(step, seed))) for trainer, seed in zip(trainers, seeds, strict=True)]
        if step % 2 == 0:
            sum(losses).backward()
        else:
            for value in reversed(losses):
                value.backward()
        for trainer in trainers:
            trainer.step()


def takes_foreach_optimizers(side: Side) -> None:
    _trains_with_option(side, "foreach")


def takes_fused_optimizers(side: Side) -> None:
    _trains_with_option(side, "fused")


def _trains_with_option(side: Side, option: str) -> None:
    """torch's faster kernels, against its loop over parameters."""
    net = mlp()
    options = {option: True} if side.has_feature else {"foreach": False}
    trainer = side.wrap(net, [side.make_optimizer(net.parameters(), **options)])
    for step in range(STEPS):
        trainer.zero_grad()
        loss(trainer(batch(step))).backward()
        trainer.step()


def resumes(side: Side) -> None:
    """Each rank goes on from its own checkpoint with new objects; against training without a break."""
    trainer = side.wrap(mlp())
    for step in range(STEPS):
        if step == STEPS // 2 and side.has_feature:
            trainer = _saved_and_loaded(side, trainer)
        trainer.zero_grad()
        loss(trainer(batch(step))).backward()
        trainer.step()


def _saved_and_loaded(side: Side, before: Trainer) -> Trainer:
    assert isinstance(before, Ours)
    file = io.BytesIO()
    state: dict[str, Any] = {
        "net": before.net.state_dict(),
        "optimizer": before.optimizers[0].state_dict(),
        "algorithm": before.wrapped.algorithm_state_dict(),
    }
    torch.save(state, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    net = mlp()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    net.load_state_dict(saved["net"])
    optimizer = side.make_optimizer(net.parameters())
    optimizer.load_state_dict(saved["optimizer"])
    after = side.wrap(net, [optimizer], init_sync=False)
    assert isinstance(after, Ours)
    after.wrapped.load_algorithm_state_dict(saved["algorithm"])
    side.go_on(before, after)
    return after
