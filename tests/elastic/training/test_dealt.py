from __future__ import annotations

from baguarun.elastic import ElasticSampler
from baguarun.elastic.training.dealt import Account, carry_over, complement, merge, settle, translate


def test_what_survivors_have_done_or_were_shared_is_not_dealt_again() -> None:
    ahead = Account(epoch=1, own=[(8, 10)], shared=[(0, 6)], dealt=[(0, 12)], shared_to=(1, 6))
    behind = Account(epoch=1, own=[(6, 8)], shared=[(0, 3)], dealt=[(0, 8)], shared_to=(1, 3))
    settlement = settle([ahead, behind], length=20, world_size=3, with_few=False)
    assert settlement.done == [(0, 10)]
    assert (settlement.redealt, settlement.left_behind) == (2, 0)


def test_of_a_ring_who_waited_for_the_lost_knows_how_far_it_had_come() -> None:
    """Four ranks with a place each in a step; rank 1 is lost after step 5, and rank 3 is opposite."""

    def account(rank: int, steps: int, shared: int) -> Account:
        own = [(4 * step + rank, 4 * step + rank + 1) for step in range(steps)]
        end = 4 * shared
        return Account(epoch=0, own=own, shared=[(0, end)], dealt=[(0, 4 * steps)], shared_to=(0, end))

    accounts = [account(0, 6, 5), account(2, 6, 5), account(3, 7, 6)]
    settlement = settle(accounts, length=40, world_size=4, with_few=True)
    # Of the sixth step nobody has what rank 1 did, and nobody else has come to the end of the seventh.
    assert complement(settlement.done, 28) == [(21, 22), (24, 27)]
    assert settlement.redealt == 4


def test_the_newest_epoch_counts_and_a_rank_s_part_of_the_rest_of_older_ones_is_told() -> None:
    ahead = Account(epoch=2, own=[(0, 2)], shared=[], dealt=[(0, 4)], shared_to=(1, 40))
    behind = Account(epoch=1, own=[(40, 45)], shared=[(0, 30)], dealt=[(0, 52)], shared_to=(1, 30))
    settlement = settle([ahead, behind], length=64, world_size=4, with_few=False)
    assert (settlement.epoch, settlement.done) == (2, [(0, 2)])
    # One that is behind has left 3 of its own, and two that are lost 6 each.
    assert (settlement.redealt, settlement.left_behind) == (2, 3 + 2 * 6)
    # What was shared in the new epoch includes all of the old one.
    shared = Account(epoch=2, own=[(0, 2)], shared=[(0, 3)], dealt=[(0, 4)], shared_to=(2, 3))
    settlement = settle([shared, behind], length=64, world_size=4, with_few=False)
    assert (settlement.done, settlement.redealt, settlement.left_behind) == ([(0, 3)], 1, 3)


def test_a_loss_that_is_settled_once_more_without_another_rank_counts_only_what_that_one_had_not_shared() -> (
    None
):
    accounts = [
        Account(
            epoch=0,
            own=[(rank, rank + 1), (rank + 4, rank + 5)],
            shared=[(0, 2)],
            dealt=[(0, 8)],
            shared_to=(0, 2),
        )
        for rank in (0, 2, 3)
    ]
    first = settle(accounts, length=20, world_size=4, with_few=False)
    assert complement(first.done, 8) == [(5, 6)] and first.redealt == 1
    again = [first.account_of(account) for account in accounts[:2]]
    second = settle(again, length=20, world_size=3, with_few=False)
    assert complement(second.done, 8) == [(3, 4), (5, 6), (7, 8)] and second.redealt == 2


def test_what_was_not_shared_before_a_loss_is_not_shared_by_the_next_world_s_beginning() -> None:
    before = Account(epoch=1, own=[(4, 6)], shared=[(0, 3)], dealt=[(0, 8)], shared_to=(1, 3))
    now = Account(epoch=1, own=[(9, 10)], shared=[(0, 8)], dealt=[(0, 12)], shared_to=(1, 8))
    carried = carry_over(before, now)
    assert (carried.own, carried.shared, carried.shared_to) == ([(4, 6), (9, 10)], [(0, 3)], (1, 3))
    assert carried.dealt == [(0, 12)]
    ended = Account(epoch=2, own=[(0, 1)], shared=[], dealt=[(0, 2)], shared_to=(0, 0))
    assert carry_over(before, ended) == Account(
        epoch=2, own=[(0, 1)], shared=[], dealt=[(0, 2)], shared_to=(1, 3)
    )


def test_spans_are_united_turned_round_and_translated() -> None:
    assert merge([(5, 7), (0, 2), (1, 3), (3, 4), (9, 9)]) == [(0, 4), (5, 7)]
    assert complement([(0, 4), (5, 7)], 9) == [(4, 5), (7, 9)]
    assert translate((1, 4), [(10, 12), (0, 1), (20, 30)]) == [(11, 12), (0, 1), (20, 21)]


def test_a_sampler_deals_what_is_left_and_keeps_that_over_a_checkpoint() -> None:
    sampler = ElasticSampler(range(10), 2, shuffle=False)
    account = Account(epoch=3, own=[(4, 7)], shared=[(0, 2)], dealt=[(0, 8)], shared_to=(3, 2))
    sampler.go_on_from(settle([account], length=10, world_size=1, with_few=False))
    again = ElasticSampler(range(10), 2, shuffle=False)
    again.load_state_dict(sampler.state_dict())
    assert list(sampler) == list(again) == [[2, 3], [7, 8], [9]]
    sampler.cursor += 2
    assert sampler.account(shared_to=(0, 0), is_whole=True).shared == [(0, 7)]
    # Where dealing began all were alike.
    assert sampler.account(shared_to=(2, 9), is_whole=False).shared == [(0, 2), (4, 7)]
    sampler.begin_epoch()
    assert [place for batch in sampler for place in batch] == list(range(10))
