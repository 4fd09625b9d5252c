"""What ranks of a new World take over from each other."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from baguarun.comm.legacy import share_what_differs
from tests.comm.ranks import run_ranks

SOURCE = 1


def share(known: list[bool], own: list[float]) -> tuple[list[float], str]:
    """What this rank has after that, and how it went about."""
    rank = dist.get_rank()
    calls = []
    for name in ("broadcast", "batch_isend_irecv"):
        call = getattr(dist, name)

        def counted(*args: object, call: object = call, name: str = name, **settings: object) -> object:
            calls.append(name)
            return call(*args, **settings)  # type: ignore[operator]

        setattr(dist, name, counted)
    tensors = [torch.full((1000,), own[rank]), torch.full((3,), own[rank], dtype=torch.float64)]
    assert dist.group.WORLD is not None
    share_what_differs(tensors, SOURCE, dist.group.WORLD, is_known=known[rank])
    found = {float(each) for tensor in tensors for each in tensor}
    return sorted(found), " ".join(sorted(set(calls)))


@pytest.mark.parametrize("backend", ["baguanet", "gloo"])
@pytest.mark.parametrize(
    ("known", "own", "calls"),
    [
        # Three survivors that are equal, and nobody else.
        ([True] * 3, [5, 5, 5], ["", "", ""]),
        # A newcomer, whose memory happens to be the same.
        ([True, True, False], [5, 5, 5], ["", "batch_isend_irecv", "batch_isend_irecv"]),
        # A survivor that has not come to the last outer step.
        ([True] * 3, [4, 5, 5], ["batch_isend_irecv", "batch_isend_irecv", ""]),
        ([False, True, False], [0, 5, 0], ["broadcast"] * 3),
    ],
)
def test_only_those_who_have_something_else_are_sent_it(
    known: list[bool], own: list[float], calls: list[str], backend: str
) -> None:
    found = run_ranks(share, 3, known, own, backend=backend)
    assert found == [([5.0], each) for each in calls]


def test_a_model_without_weights_shares_nothing() -> None:
    assert dist.group.WORLD is None
    share_what_differs([], 0, dist.group.WORLD, is_known=True)  # type: ignore[arg-type]
