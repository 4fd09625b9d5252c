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
        self,
        lossy: Lossy,
        world_size: int,
        *,
        feedback: bool = True,
        new_plan_after_first: bool = True,
        chunk_align: int = CHUNK_ALIGN,
    ) -> None:
        self.lossy = lossy
        self.chunk_align = chunk_align
        self.world_size = world_size
        self.feedback = feedback
        self.new_plan_after_first = new_plan_after_first
        self.rounds = 0
        self.residuals: list[dict[str, torch.Tensor]] = [{} for _ in range(world_size)]
        self.result_residuals: list[list[torch.Tensor]] = []

    def average(
        self, gradients: dict[str, list[torch.Tensor]], plan: Sequence[Sequence[str]]
    ) -> dict[str, torch.Tensor]:
        """By name: what every rank ends with. `gradients` are by name and rank, `plan` is names by bucket."""
        if self.rounds == 0 or (self.rounds == 1 and self.new_plan_after_first):
            self.result_residuals = [[] for _ in plan]
        self.rounds += 1
        results: dict[str, torch.Tensor] = {}
        for bucket, names in enumerate(plan):
            flats = [self._contribution(gradients, names, rank) for rank in range(self.world_size)]
            found = self._exchange(flats, bucket)
            for rank, all_owed in enumerate(found[0]):
                sizes = [gradients[name][rank].numel() for name in names]
                for name, owed in zip(names, all_owed.split(sizes), strict=True):
                    self._keep(self.residuals[rank], name, owed)
            sizes = [gradients[name][0].numel() for name in names]
            results.update(zip(names, found[1].split(sizes), strict=True))
        return results

    def _contribution(
        self, gradients: dict[str, list[torch.Tensor]], names: Sequence[str], rank: int
    ) -> torch.Tensor:
        owed = self.residuals[rank]
        parts = []
        for name in names:
            own = gradients[name][rank].reshape(-1).float()
            parts.append(own + owed[name] if name in owed else own)
        return torch.cat(parts)

    def _keep(self, residuals: dict[str, torch.Tensor], name: str, owed: torch.Tensor) -> None:
        if self.feedback:
            residuals[name] = _finite_or(owed, residuals.get(name))

    def _exchange(self, flats: list[torch.Tensor], bucket: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        """What each rank owes from now on, and what all have."""
        share = -(-flats[0].numel() // self.world_size)
        stride = -(-share // self.chunk_align) * self.chunk_align
        by_rank: list[list[torch.Tensor]] = [[] for _ in flats]
        results = []
        owed: list[torch.Tensor] = []
        for owner, pieces in enumerate(zip(*(flat.split(stride) for flat in flats), strict=True)):
            decoded = [self.lossy(piece) for piece in pieces]
            for rank, (piece, sent) in enumerate(zip(pieces, decoded, strict=True)):
                by_rank[rank].append(piece - sent)
            if self.feedback:
                # What its owner contributes itself is not sent, and lacks nothing.
                by_rank[owner][-1] = torch.zeros_like(pieces[owner])
                own = [pieces[owner]]
                decoded.pop(owner)
            else:
                own = []
            total = decoded[0].clone()
            for piece in decoded[1:] + own:
                total += piece
            total *= torch.tensor(1.0 / self.world_size, dtype=torch.float32)
            before = self.result_residuals[bucket][owner] if self.result_residuals[bucket] else None
            if before is not None and self.feedback:
                total += before
            results.append(self.lossy(total))
            owed.append(_finite_or(total - results[-1], before))
        self.result_residuals[bucket] = owed
        return [torch.cat(parts) for parts in by_rank], torch.cat(results)


def _finite_or(owed: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
    """What is owed; where that is not finite, what was owed before."""
    return torch.where(owed.isfinite(), owed, torch.zeros_like(owed) if before is None else before)


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
