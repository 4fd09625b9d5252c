"""What a rank that is lost later is taken to have shared, from commit to commit."""

from __future__ import annotations

import torch
from torch import nn

import baguarun
from baguarun.comm.algorithms import LocalSGD
from baguarun.elastic import ElasticSampler, State
from baguarun.elastic.training.catching_up import CatchingUp
from tests.comm.ranks import run_ranks


def _shared_to(counts: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Epoch and place after each commit; `counts`: steps by then, and how many of them others have, too."""
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = baguarun.DistributedDataParallel(net, optimizers=[optimizer], algorithm=LocalSGD(local_steps=2))
    state = State(model=model, optimizer=optimizer)
    sampler = ElasticSampler(range(100), 1)
    state._samplers = [sampler]
    catching_up = CatchingUp(state, lambda: None)
    found = []
    for steps, shared in counts:
        model.shared_steps = lambda both=(steps, shared): both  # type: ignore[misc]
        sampler.cursor = steps
        catching_up.commit()
        found.append(catching_up._shared_to)
    return found


def test_what_was_shared_goes_with_the_exchanges_and_is_forgotten_with_a_checkpoint_that_is_loaded() -> None:
    counts = [(1, 0), (2, 2), (3, 2), (4, 4), (1, 0), (2, 2), (3, 2)]
    places: list[list[tuple[int, int]]] = [[], [(0, 2)], [(0, 2)], [(0, 4)], [], [(0, 2)], [(0, 2)]]
    assert run_ranks(_shared_to, 1, counts) == [places]
