"""QAdam's optimizer by itself: weight decay, threads, states."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from baguarun.comm.algorithms import QAdamOptimizer
from tests.comm.models import loss, mlp

DECAY = 0.1


@pytest.mark.parametrize("is_decoupled", [False, True])
def test_weight_decay_in_the_warm_up_has_the_bits_of_torchs(is_decoupled: bool) -> None:
    ours, theirs = mlp(), mlp()
    mine = QAdamOptimizer(ours.parameters(), weight_decay=DECAY, decoupled_weight_decay=is_decoupled)
    torchs = (torch.optim.AdamW if is_decoupled else torch.optim.Adam)(
        theirs.parameters(), lr=1e-3, weight_decay=DECAY
    )
    for _ in range(20):
        x = torch.randn(5, 37)
        for module, optimizer in ((ours, mine), (theirs, torchs)):
            optimizer.zero_grad()
            loss(module(x)).backward()
            optimizer.step()
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(own, other)


def test_by_itself_coupled_weight_decay_is_in_the_momentum() -> None:
    """After the warm-up, as an optimizer to which the decay's gradient was added beforehand."""
    plain, decayed = mlp(), mlp()
    ours = QAdamOptimizer(plain.parameters(), lr=0.01, warmup_steps=2, weight_decay=DECAY)
    by_hand = QAdamOptimizer(decayed.parameters(), lr=0.01, warmup_steps=2)
    for _ in range(6):
        x = torch.randn(5, 37)
        for module, optimizer in ((plain, ours), (decayed, by_hand)):
            optimizer.zero_grad()
            loss(module(x)).backward()
        for parameter in decayed.parameters():
            assert parameter.grad is not None
            parameter.grad.add_(parameter.detach(), alpha=DECAY)
        ours.step()
        by_hand.step()
    for own, other in zip(plain.parameters(), decayed.parameters(), strict=True):
        torch.testing.assert_close(own, other)


def denominators(num_threads: int, seed: int) -> torch.Tensor:
    """Most of them at the floor, which is a mean."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        weight = nn.Parameter(torch.zeros(200_000))
        optimizer = QAdamOptimizer([weight], warmup_steps=1, variance_floor=1.0)
        weight.grad = torch.randn(200_000, generator=torch.Generator().manual_seed(seed)).exp_()
        optimizer.step()
    finally:
        torch.set_num_threads(before)
    found: torch.Tensor = optimizer.state[weight]["denominator"]
    return found


def test_how_many_threads_a_rank_has_changes_no_bit_of_what_stands_still() -> None:
    for seed in range(20):
        assert torch.equal(denominators(1, seed), denominators(4, seed))


def test_states_of_before_there_was_a_choice_are_read() -> None:
    optimizer = QAdamOptimizer(mlp().parameters(), weight_decay=DECAY)
    state = optimizer.state_dict()
    del state["param_groups"][0]["decoupled_weight_decay"]
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["decoupled_weight_decay"] is False
