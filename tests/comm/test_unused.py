"""Parameters that get no gradient: refused by name, or allowed when asked for."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from baguarun.comm.ddp import DistributedDataParallel
from baguarun.errors import UsageError
from tests.comm.models import assert_averaged, gathered_gradients, loss
from tests.comm.ranks import run_ranks


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
        learns_a_static_graph,
        refuses_a_second_gradient,
    ],
    ids=lambda check: check.__name__,
)
def test_unused_parameters(check: object) -> None:
    run_ranks(check, 2)  # type: ignore[arg-type]
