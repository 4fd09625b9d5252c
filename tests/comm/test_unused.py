"""Parameters that get no gradient: refused by name, or allowed when asked for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from baguarun.comm.algorithms import Algorithm, PowerSGD, Sparse
from baguarun.comm.ddp import DistributedDataParallel
from baguarun.errors import CommunicationError, UsageError
from tests.comm.models import assert_averaged, gathered_gradients, loss
from tests.comm.nodes import live_on_nodes
from tests.comm.ranks import run_ranks, run_ranks_to_the_end


class Branches(nn.Module):
    """Uses the branches whose numbers it is given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(6, 6)
        self.branch = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor, used: list[int]) -> dict[str, torch.Tensor]:
        x = self.trunk(x)
        return {"out": sum((self.branch[i](x) for i in used), x)}


def check_branches(model: DistributedDataParallel, used: list[int], rtol: float = 1e-5) -> None:
    x = torch.randn(3, 6)
    reference = gathered_gradients(model.module, lambda local: loss(local(x, used)["out"]).backward())
    model.zero_grad()
    loss(model(x, used)["out"]).backward()
    assert_averaged(model.module, reference, rtol, one_scale=rtol > 0.01)


class WithBuffer(Branches):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))


def names_the_missing_parameters() -> None:
    model = DistributedDataParallel(Branches(), bucket_cap_mb=0.0001)
    loss(model(torch.randn(3, 6), [0, 2, 3])["out"]).backward()
    named = r"no gradient to 2 of 10 parameters: 'branch.1.weight'.*find_unused_parameters"
    with pytest.raises(UsageError, match=named):
        model(torch.randn(3, 6), [0])
    # Still refused: nothing can be right from here on.
    with pytest.raises(UsageError, match=r"'branch.1.bias' \(index 5\)"):
        model(torch.randn(3, 6), [0])


def finds_unused() -> None:
    rank = dist.get_rank()
    for algorithm, rtol in (("gradient_allreduce", 1e-5), ("bytegrad", 0.02)):
        model = DistributedDataParallel(
            Branches(), algorithm=algorithm, bucket_cap_mb=0.0001, find_unused_parameters=True
        )
        check_branches(model, [0, 1, 2, 3], rtol)
        # Another part on each rank: what one rank uses, all get.
        check_branches(model, [rank], rtol)
        # Unused everywhere: the gradient stays None, which check_branches asserts.
        check_branches(model, [3], rtol)
        check_branches(model, [], rtol)
        check_branches(model, [2, rank], rtol)


def finds_unused_over_accumulation() -> None:
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    x = torch.randn(3, 6)

    def both(local: nn.Module) -> None:
        loss(local(x, [0])["out"]).backward()
        loss(local(x, [1])["out"]).backward()

    for _ in range(2):
        reference = gathered_gradients(model.module, both)
        model.zero_grad()
        with model.no_sync():
            loss(model(x, [0])["out"]).backward()
        loss(model(x, [1])["out"]).backward()
        assert_averaged(model.module, reference)


def finds_unused_over_two_forwards() -> None:
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    x = torch.randn(3, 6)

    def joint(local: nn.Module) -> None:
        (loss(local(x, [0])["out"]) + loss(local(x, [1])["out"])).backward()

    for _ in range(2):
        reference = gathered_gradients(model.module, joint)
        model.zero_grad()
        joint(model)
        assert_averaged(model.module, reference)


class ReturnsWeight(Branches):
    def forward(self, x: torch.Tensor, used: list[int]) -> dict[str, torch.Tensor]:
        return {**super().forward(x, used), "weight": self.trunk.weight}


def ignores_forwards_without_a_backward() -> None:
    """Of all branches, as in a validation that nobody told that it needs no gradients."""
    for module in (Branches(), ReturnsWeight()):
        model = DistributedDataParallel(module, find_unused_parameters=True, bucket_cap_mb=0.0001)
        kept = []
        for used in ([0], [1], [0, 3], [2], [1]):
            x = torch.randn(3, 6)
            model(x, [0, 1, 2, 3])
            kept.append(model(x, [0, 1, 2, 3]))
            check_branches(model, used)
        assert model.stats().steps == 5


def finds_unused_of_each_forward() -> None:
    model = DistributedDataParallel(Branches(), find_unused_parameters=True, bucket_cap_mb=0.0001)
    x = torch.randn(3, 6)

    def in_turn(local: nn.Module) -> None:
        outputs = [local(x, used)["out"] for used in ([0], [1])]
        for output in outputs:
            loss(output).backward()

    for _ in range(3):
        reference = gathered_gradients(model.module, in_turn)
        model.zero_grad()
        in_turn(model)
        assert_averaged(model.module, reference)


class Reused(nn.Module):
    """One layer in several re-entrant checkpoints: its hook runs several times in one backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared, self.spare, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = checkpoint(self.shared, x, use_reentrant=True)
        return self.last(x)


def learns_a_static_graph() -> None:
    model = DistributedDataParallel(Reused(), static_graph=True, bucket_cap_mb=0.0001)
    for _ in range(4):
        x = torch.randn(2, 6, requires_grad=True)
        reference = gathered_gradients(model.module, lambda local, x=x: loss(local(x)).backward())
        model.zero_grad()
        loss(model(x)).backward()
        assert_averaged(model.module, reference)
        assert model.module.spare.weight.grad is None
    assert model.stats().steps == 4


def refuses_a_second_gradient() -> None:
    model = DistributedDataParallel(Reused(), find_unused_parameters=True, bucket_cap_mb=0.0001)
    with pytest.raises(UsageError, match=r"'shared\.\w+' .*second gradient.*static_graph=True"):
        loss(model(torch.randn(2, 6, requires_grad=True))).backward()


@pytest.mark.parametrize(
    "check",
    [
        names_the_missing_parameters,
        finds_unused,
        finds_unused_over_accumulation,
        finds_unused_over_two_forwards,
        ignores_forwards_without_a_backward,
        finds_unused_of_each_forward,
        learns_a_static_graph,
        refuses_a_second_gradient,
    ],
    ids=lambda check: check.__name__,
)
def test_unused_parameters(check: object) -> None:
    run_ranks(check, 2)  # type: ignore[arg-type]


def one_rank_leaves_a_parameter_out() -> str:
    model = DistributedDataParallel(WithBuffer(), bucket_cap_mb=0.0001)
    used = [0, 1, 2, 3] if dist.get_rank() == 0 else [0]
    with pytest.raises((UsageError, CommunicationError)) as caught:
        for _ in range(2):
            loss(model(torch.randn(3, 6), used)["out"]).backward()
    return str(caught.value)


def test_the_missing_parameters_are_named_before_buffers_are_sent() -> None:
    """Who has left some out is told at once, though the other rank never comes to its next forward."""
    outcomes = run_ranks_to_the_end(one_rank_leaves_a_parameter_out, 2)
    assert outcomes[1].error is None, outcomes[1].traceback
    assert "no gradient to " in outcomes[1].value


def uses_another_part_on_each_rank() -> None:
    """From the first step on, and for more of them than agreeing on the order takes."""
    rank = dist.get_rank()
    for algorithm, rtol in (("gradient_allreduce", 1e-5), ("bytegrad", 0.02)):
        model = DistributedDataParallel(
            Branches(), algorithm=algorithm, bucket_cap_mb=0.0001, find_unused_parameters=True
        )
        for used in ([[0, 1, 2, 3], [0]], [[0], [0, 1, 2, 3]], [[1], [2]], [[3], [3]]):
            check_branches(model, used[rank], rtol)


@pytest.mark.parametrize("backend", ["baguanet", "gloo"])
def test_ranks_may_use_different_parts_from_the_first_step_on(backend: str) -> None:
    run_ranks(uses_another_part_on_each_rank, 2, backend=backend)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ParameterList(nn.Parameter(torch.zeros(2048, 2)) for _ in range(2))

    def forward(self, gradients: list[torch.Tensor | None]) -> torch.Tensor:
        """Its gradients are `gradients`, those of a head without one is not used."""
        used = zip(self.heads, gradients, strict=True)
        return torch.stack([(head * given).sum() for head, given in used if given is not None]).sum()


def skip_a_head_that_owes(sizes: Sequence[int], algorithm: Algorithm) -> tuple[float, float]:
    """What has come of the first head's gradient in the end, and how far off that is at most."""
    live_on_nodes(sizes)
    model = DistributedDataParallel(
        TwoHeads(), algorithm=algorithm, find_unused_parameters=True, bucket_cap_mb=0.001
    )
    torch.manual_seed(1 + dist.get_rank())
    nothing = torch.zeros(2048, 2)
    owed = torch.randn(2048, 2)
    total = torch.zeros(2048, 2)
    for given in [owed, None, None, *[nothing] * 100]:
        model.zero_grad()
        model([given, nothing]).backward()
        gradient = model.module.heads[0].grad
        assert (gradient is None) == (given is None)
        total += 0 if gradient is None else gradient
    mean = owed.clone()
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    return (total - mean).abs().max().item(), mean.abs().max().item()


@pytest.mark.parametrize(
    ("sizes", "algorithm"),
    [
        ((2,), Sparse(warmup_steps=0, density=0.05)),
        ((2,), PowerSGD(start_step=0)),
        ((2, 1), PowerSGD(start_step=0, hierarchical=True)),
    ],
    ids=str,
)
def test_what_a_part_owes_is_kept_while_nobody_uses_it(sizes: Sequence[int], algorithm: Algorithm) -> None:
    for off, scale in run_ranks(skip_a_head_that_owes, sum(sizes), sizes, algorithm):
        assert off < 0.01 * scale
