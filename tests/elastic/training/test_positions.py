from __future__ import annotations

import itertools

import pytest

from baguarun.elastic.training.positions import Part, Standing, plan

NEWCOMER = Standing(valid=False)


def at(committed: int, sub_steps: int = 0) -> Standing:
    """Of steps that have two optimizer steps."""
    return Standing(valid=True, committed=committed, sub_steps=sub_steps, is_whole=sub_steps == 2)


def test_ranks_at_the_same_commit_do_the_step_again() -> None:
    assert plan([at(4), at(4)]) == [Part(rolls_back=True)] * 2


def test_a_rank_a_step_behind_keeps_what_is_its_own_and_receives_the_rest() -> None:
    assert plan([at(4, 1), at(5)]) == [Part(receive_from=1), Part(rolls_back=True, send_to=(0,))]


def test_an_optimizer_that_has_stepped_anywhere_has_stepped_everywhere() -> None:
    assert plan([at(4), at(4, 1)]) == [
        Part(receive_from=1, rolls_back=True),
        Part(send_to=(0,), rolls_back=True),
    ]


def test_a_step_that_is_applied_anywhere_is_applied_everywhere() -> None:
    assert plan([at(4), at(4, 2)]) == [
        Part(receive_from=1, rolls_back=True, is_applied=True),
        Part(send_to=(0,), rolls_back=True, is_applied=True),
    ]


def test_nobody_is_sent_what_is_of_no_whole_copy() -> None:
    assert plan([NEWCOMER, NEWCOMER]) == [Part(loads_checkpoint=True)] * 2


def test_relaxed_survivors_keep_their_own_position() -> None:
    parts = plan([at(4, 1), at(9), NEWCOMER], replicas_differ=True)
    assert parts[0] == Part(rolls_back=True, send_to=(2,))
    assert parts[1] == Part(rolls_back=True)
    assert parts[2] == Part(begins_anew=True, receive_from=0)


def on_node(node: int, *, valid: bool = True) -> Standing:
    return Standing(valid=valid, node=node)


def test_a_newcomer_is_sent_to_by_a_rank_of_its_node_where_there_is_one() -> None:
    """Two with whole copies on node 1, one on node 2; three newcomers on node 2 and one on node 0."""
    newcomers = [on_node(2, valid=False)] * 3 + [on_node(0, valid=False)]
    parts = plan([on_node(1), on_node(1), on_node(2), *newcomers])
    assert [part.send_to for part in parts[:3]] == [(6,), (), (3, 4, 5)]


STANDINGS = [NEWCOMER, at(2), at(2, 1), at(2, 2), at(3), at(3, 1)]


@pytest.mark.parametrize("differ", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_who_receives_is_sent_to_once_by_a_whole_copy_at_the_highest_position(
    world_size: int, differ: bool
) -> None:
    for standings in itertools.product(STANDINGS, repeat=world_size):
        parts = plan(standings, replicas_differ=differ)
        valid = [standing for standing in standings if standing.valid]
        assert all(part.loads_checkpoint == (not valid) for part in parts)
        sent = [(other, rank) for rank, part in enumerate(parts) for other in part.send_to]
        assert sorted(sent) == [
            (rank, part.receive_from) for rank, part in enumerate(parts) if part.receive_from is not None
        ]
        if not valid:
            assert not sent
            continue
        target = max(standing.position for standing in valid)
        sources = [rank for rank, part in enumerate(parts) if part.receive_from is None]
        loads = [len(parts[rank].send_to) for rank in sources]
        assert max(loads) - min(loads) <= 1
        for rank, (standing, part) in enumerate(zip(standings, parts, strict=True)):
            assert part.begins_anew == (not standing.valid)
            if differ:
                assert (part.receive_from is None) == standing.valid
                continue
            assert part.is_applied == (target[1] == 2)
            assert (rank in sources) == (standing.valid and standing.position == target)
            assert part.rolls_back == (standing.valid and standing.committed == target[0])
