"""Adam for compressed momentum: after a warm-up the variance stands still and momentum is what travels."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import ParamsT

from baguarun.comm.algorithms.stages import GradientStages
from baguarun.comm.algorithms.stepper import require_range
from baguarun.comm.extension import load_extension
from baguarun.errors import ArgumentError, UsageError


class QAdamOptimizer(torch.optim.Optimizer):
    """Adam whose variance and bias corrections stand still after `warmup_steps` steps (1-bit Adam, arXiv
    2102.02888; Bagua's QAdam, arXiv 2107.01499).

    For use with the algorithm "qadam", and by itself in a World of one. The warm-up is torch's Adam, or with
    `decoupled_weight_decay` its AdamW. Of a model with several of these optimizers it ends for all of them
    when the last one has taken its steps, in a step that has a gradient.

    After the warm-up a step is x -= lr / (1 - beta1^w) * m / (sqrt(v / (1 - beta2^w)) + eps), where m is in
    `grad` already, averaged over the ranks. Weight decay stays, and passes no codec: coupled it is added to m
    by each rank, (1 - beta1) * weight_decay * x, which is what it would be with gradients. Rules for what
    would blow up:

    - Numbers whose variance is below `variance_floor` times the mean of their parameter's count as that;
      those of a parameter that got no gradient in the warm-up count as the mean over all parameters.
    - A step in which any gradient is not finite is left out, on all ranks, with a warning, and does not
      count. So no NaN stays in the momentum. One that gets into `grad` after backward past torch's version
      counter (by numpy, .data, a collective of another group) raises `UsageError`.

    With torch.amp.GradScaler give it as `grad_scaler`, since momentum is mixed before the scaler sees it.
    Gradients must be zeroed after every step: `grad` holds momentum, to which a gradient cannot be added.
    Clipping clips the momentum. `foreach` is torch's and changes nothing; `fused=True` raises `UsageError`.
    """

    grad_scaler: torch.amp.GradScaler | None = None
    # Who mixes momentum into gradients; the engine's stages, if there is an engine.
    _stages: weakref.ref[GradientStages] | None = None
    # All that step one model, this one included; without a model, nobody.
    _together: Sequence[weakref.ref[QAdamOptimizer]] = ()

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        warmup_steps: int = 100,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled_weight_decay: bool = False,
        variance_floor: float = 1e-2,
        grad_scaler: torch.amp.GradScaler | None = None,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        # Steps are in foreach kernels whatever is asked: a loop over parameters gives the same numbers.
        del foreach
        if fused:
            raise UsageError(
                "QAdamOptimizer: fused=True: after the warm-up the step takes momentum that is averaged "
                "already, and torch's fused kernel would mix it in again; want fused=None (steps are foreach)"
            )
        defaults = {
            "lr": lr,
            "warmup_steps": warmup_steps,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
            "variance_floor": variance_floor,
            "steps": 0,
        }
        super().__init__(params, defaults)
        if len({group["warmup_steps"] for group in self.param_groups}) > 1:
            raise UsageError(
                "QAdamOptimizer: warmup_steps differs between parameter groups; want one for all"
            )
        self.grad_scaler = grad_scaler

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("decoupled_weight_decay", False)

    @property
    def warmup_steps(self) -> int:
        """Steps of plain Adam, at the least."""
        return int(self.param_groups[0]["warmup_steps"])

    @property
    def steps(self) -> int:
        """Steps taken since the start of training, resumed ones included."""
        return int(self.param_groups[0]["steps"])

    @property
    def in_warmup(self) -> bool:
        """Whether the next step is one of the warm-up."""
        return not any("denominator" in state for state in self.state.values())

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # Makes a GradScaler that we do not know of show itself in step().
        return self.grad_scaler is None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Before the first step only: what is added later would have no warm-up."""
        if self.param_groups and self.steps > 0:
            raise UsageError("QAdamOptimizer: add_param_group after the first step; want it before")
        super().add_param_group(param_group)
        _check_group(self.param_groups[-1])

    def averages(self, asked: set[int]) -> Iterator[tuple[nn.Parameter, torch.Tensor, float]]:
        """After the warm-up, of its parameters whose ids are `asked`: each, its momentum and its beta."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if id(parameter) in asked:
                    yield (
                        parameter,
                        self._require_state(group, parameter)["exp_avg"],
                        float(group["betas"][0]),
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if getattr(self, "found_inf", None) is not None:
            raise UsageError(
                "QAdamOptimizer is stepped by a GradScaler whose scale it does not know; want "
                "QAdamOptimizer(..., grad_scaler=scaler)"
            )
        if not self._finite():
            warnings.warn(
                f"QAdamOptimizer: a gradient is not finite; step {self.steps + 1} is left out", stacklevel=2
            )
            return loss
        in_warmup, has_stepped = self.in_warmup, False
        if not in_warmup:
            self._require_exchanged()
        for group in self.param_groups:
            parameters: list[torch.Tensor] = [each for each in group["params"] if each.grad is not None]
            if parameters:
                has_stepped = True
                if group["decoupled_weight_decay"] and group["weight_decay"] != 0:
                    torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                self._adam(group, parameters) if in_warmup else self._compressed(group, parameters)
            group["steps"] += 1
        # Without any gradient it may be one that is applied already, and whose count is put back.
        if in_warmup and has_stepped:
            self._freeze_together()
        return loss

    def _require_exchanged(self) -> None:
        stages = self._stages() if self._stages is not None else None
        if stages is not None:
            found = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
            stages.require_exchanged(found)

    def _freeze_together(self) -> None:
        """Unless one of those that step the model has still to take steps of the warm-up."""
        found = [optimizer for each in self._together if (optimizer := each()) is not None] or [self]
        if all(optimizer.steps >= optimizer.warmup_steps for optimizer in found):
            for optimizer in found:
                # Of a checkpoint some may be frozen already.
                if optimizer.in_warmup:
                    optimizer._freeze()

    def _finite(self) -> bool:
        parameters: list[nn.Parameter] = [
            parameter
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None and parameter.numel() > 0
        ]
        stages = self._stages() if self._stages is not None else None
        if not parameters or (stages is not None and stages.are_known_finite(parameters)):
            return True
        gradients = [_gradient(parameter) for parameter in parameters]
        if all(gradient.is_cpu for gradient in gradients):
            return bool(load_extension().all_finite(gradients))
        ends = list(torch._foreach_norm(gradients, math.inf))
        return bool(torch.stack([end.double() for end in ends]).isfinite().all())

    def _adam(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        beta1, beta2 = group["betas"]
        states = [self._state_of(parameter) for parameter in parameters]
        gradients = _decayed_gradients(group, parameters)
        for state in states:
            state["step"] += 1
        averages = [state["exp_avg"] for state in states]
        squares = [state["exp_avg_sq"] for state in states]
        torch._foreach_lerp_(averages, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        denominators = torch._foreach_sqrt(squares)
        torch._foreach_div_(denominators, [math.sqrt(1 - beta2 ** state["step"]) for state in states])
        torch._foreach_add_(denominators, group["eps"])
        sizes = [-group["lr"] / (1 - beta1 ** state["step"]) for state in states]
        torch._foreach_addcdiv_(parameters, averages, denominators, sizes)

    def _compressed(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        states = [self._require_state(group, parameter) for parameter in parameters]
        gradients = [_gradient(parameter) for parameter in parameters]
        averages = [state["exp_avg"] for state in states]
        denominators = [state["denominator"] for state in states]
        sizes = [-group["lr"] / state["correction"] for state in states]
        share = 1 - group["betas"][0]
        decay = share * _coupled_decay(group)
        if not self._gradients_are_momentum():
            torch._foreach_lerp_(averages, _decayed_gradients(group, parameters), share)
        elif all(parameter.is_cpu for parameter in parameters):
            # Two passes over memory in one; both are on the path of every step.
            apply = load_extension().apply_momentum
            if not apply(parameters, gradients, averages, denominators, sizes, decay):
                raise UsageError(
                    "QAdamOptimizer: a gradient that was finite when it came is not any more, and its "
                    "version counter does not tell (numpy, .data, a collective of another group): it is in "
                    "momentum and weights now; want a torch operation in place, or another tensor as grad"
                )
            return
        else:
            torch._foreach_copy_(averages, gradients)
            if decay != 0:
                torch._foreach_add_(averages, parameters, alpha=decay)
        torch._foreach_addcdiv_(parameters, averages, denominators, sizes)

    def _gradients_are_momentum(self) -> bool:
        stages = self._stages() if self._stages is not None else None
        return stages is not None and stages.entered > 0

    def _state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state

    def _freeze(self) -> None:
        """Replace each variance by the denominator that it gives from now on."""
        variances = {}
        for group, parameter in self._each():
            state = self._state_of(parameter)
            steps = state["step"] or self.steps
            beta1, beta2 = group["betas"]
            state["correction"] = 1 - beta1**steps
            variances[parameter] = _wide(state.pop("exp_avg_sq")) / (1 - beta2**steps)
        seen = [variance for variance in variances.values() if variance.any()]
        if not seen:
            raise UsageError("QAdamOptimizer: all gradients of the warm-up were zero; want some that are not")
        mean = sum(map(_sum, seen)) / sum(variance.numel() for variance in seen)
        for group, parameter in self._each():
            variance = variances.pop(parameter)
            own = _sum(variance) / max(variance.numel(), 1)
            least = group["variance_floor"] * own if variance.any() else mean
            denominator = variance.clamp_(min=least).sqrt_().add_(group["eps"])
            self.state[parameter]["denominator"] = denominator.to(parameter.dtype)

    def _each(self) -> Iterator[tuple[dict[str, Any], nn.Parameter]]:
        """Those that are trained, or have been before they were frozen."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad or parameter in self.state:
                    yield group, parameter

    def _require_state(self, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
        """After the warm-up. One that was frozen all through it counts as the mean of all."""
        state = self._state_of(parameter)
        if "denominator" not in state:
            del state["exp_avg_sq"]
            state["correction"] = 1 - group["betas"][0] ** self.steps
            known = [
                (_wide(self.state[each]["denominator"]) - other["eps"]).square_()
                for other, each in self._each()
                if "denominator" in self.state[each]
            ]
            mean = sum(map(_sum, known)) / sum(square.numel() for square in known)
            state["denominator"] = torch.full_like(parameter, math.sqrt(mean) + group["eps"])
        return state


def _check_group(group: dict[str, Any]) -> None:
    name = QAdamOptimizer.__name__
    require_range(name, "lr", group["lr"], 0)
    require_range(name, "warmup_steps", group["warmup_steps"], 1)
    require_range(name, "eps", group["eps"], 0)
    require_range(name, "weight_decay", group["weight_decay"], 0)
    require_range(name, "variance_floor", group["variance_floor"], 0, 1)
    if len(group["betas"]) != 2 or not all(0 <= beta < 1 for beta in group["betas"]):
        raise ArgumentError(f"{name}: betas={group['betas']}; want two numbers, 0 <= beta < 1")


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _coupled_decay(group: dict[str, Any]) -> float:
    """How much of a parameter is gradient as well."""
    return 0.0 if group["decoupled_weight_decay"] else float(group["weight_decay"])


def _decayed_gradients(group: dict[str, Any], parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    gradients = [_gradient(parameter) for parameter in parameters]
    decay = _coupled_decay(group)
    if decay == 0:
        return gradients
    return list(torch._foreach_add(gradients, parameters, alpha=decay))


def _sum(tensor: torch.Tensor) -> float:
    """In float64: its order is that of this rank's threads, and in fp32 no two ranks would have the same."""
    return float(tensor.sum(dtype=torch.float64))


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
