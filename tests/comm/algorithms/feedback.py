"""The scatter-reduce-gather with error feedback in plain torch, all ranks in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from baguarun.comm.ddp import DistributedDataParallel
from baguarun.comm.extension import load_extension
from tests.comm.models import gathered_gradients

CHUNK_ALIGN, BLOCK = 16, 2048

Lossy = Callable[[torch.Tensor], torch.Tensor]
"""What is left of a contiguous run of fp32 numbers after it has been encoded and decoded."""


def top_k(keep: int) -> Lossy:
    """The `keep` greatest magnitudes of each block, the first of equal ones, in plain torch."""

    def lossy(numbers: torch.Tensor) -> torch.Tensor:
        kept = torch.zeros_like(numbers)
        for here, there in zip(numbers.split(BLOCK), kept.split(BLOCK), strict=True):
            places = here.abs().sort(descending=True, stable=True).indices[: -(-keep * here.numel() // BLOCK)]
            there[places] = here[places]
        return kept

    return lossy


def through_codec(wire_name: str) -> Lossy:
    """By the codec itself, which has plain references of its own."""
    codec = load_extension()
    wire = getattr(codec.Wire, wire_name)

    def lossy(numbers: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = codec.decode(codec.encode(numbers, wire), wire, numbers.numel(), torch.float32)
        return result

    return lossy


class PlainExchange:
    """What one model's engine does with the gradients of all ranks, round by round."""

    def __init__(
        self, lossy: Lossy, world_size: int, *, feedback: bool = True, chunk_align: int = CHUNK_ALIGN
    ) -> None:
        self.lossy = lossy
        self.chunk_align = chunk_align
        self.world_size = world_size
        self.feedback = feedback
        self.residuals: list[dict[str, torch.Tensor]] = [{} for _ in range(world_size)]

    def average(
        self, gradients: dict[str, list[torch.Tensor]], plan: Sequence[Sequence[str]]
    ) -> dict[str, torch.Tensor]:
        """By name: what every rank ends with. `gradients` are by name and rank, `plan` is names by bucket."""
        results: dict[str, torch.Tensor] = {}
        for names in plan:
            sizes = [gradients[name][0].numel() for name in names]
            flats, owed = [], []
            for rank, residuals in enumerate(self.residuals):
                flats.append(torch.cat([gradients[name][rank].reshape(-1).float() for name in names]))
                nothing = [torch.zeros(size) for size in sizes]
                found = [residuals.get(name, zeros) for name, zeros in zip(names, nothing, strict=True)]
                owed.append(torch.cat(found))
            result = self._exchange(flats, owed)
            results.update(zip(names, result.split(sizes), strict=True))
            for residuals, left in zip(self.residuals, owed, strict=True):
                residuals.update(zip(names, left.split(sizes), strict=True))
        return results

    def _exchange(self, flats: list[torch.Tensor], owed: list[torch.Tensor]) -> torch.Tensor:
        """What all have; `owed`, by rank, is overwritten with what is owed from now on."""
        share = -(-flats[0].numel() // self.world_size)
        stride = -(-share // self.chunk_align) * self.chunk_align
        size = torch.tensor(float(self.world_size))
        results = []
        for owner in range(-(-flats[0].numel() // stride)):
            here = slice(owner * stride, (owner + 1) * stride)
            if not self.feedback:
                results.append(self.lossy(_sum([self.lossy(flat[here]) for flat in flats]) * (1 / size)))
                continue
            # What its owner contributes itself is not sent, and owes nothing; the result may.
            others = [rank for rank in range(self.world_size) if rank != owner]
            terms = [self._coded(flats[rank][here], owed[rank][here]) for rank in others]
            total = self._coded(_sum([flats[owner][here], *terms]), owed[owner][here])
            results.append(total * (1 / size))
        return torch.cat(results)

    def _coded(self, numbers: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """What comes of `numbers` with what was owed; `residual` is overwritten with what is owed then."""
        total = numbers + residual
        result = self.lossy(total)
        residual.copy_(_finite_or(total - result, residual))
        return result


def _sum(terms: list[torch.Tensor]) -> torch.Tensor:
    """In their order."""
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total


def _finite_or(owed: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """What is owed; where that is not finite, what was owed before."""
    return torch.where(owed.isfinite(), owed, before)


def plan_names(model: DistributedDataParallel) -> list[list[str]]:
    names = [name for name, parameter in model.module.named_parameters() if parameter.requires_grad]
    engine: Any = model._session._engine
    return [[names[index] for index in bucket] for bucket in engine.plan()]


def local_gradients(
    model: DistributedDataParallel, backward: Callable[[nn.Module], None]
) -> dict[str, list[torch.Tensor]]:
    """By name and rank, computed by plain torch; every parameter must get one."""
    found = gathered_gradients(model.module, backward)
    return {name: [each for each in ranks if each is not None] for name, ranks in found.items()}


def assert_result(model: DistributedDataParallel, expected: dict[str, torch.Tensor]) -> None:
    """Bit for bit."""
    for name, parameter in model.module.named_parameters():
        assert parameter.grad is not None, name
        assert torch.equal(parameter.grad.reshape(-1), expected[name].to(parameter.dtype)), name
