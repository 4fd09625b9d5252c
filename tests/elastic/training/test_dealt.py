from __future__ import annotations

from baguarun.elastic import ElasticSampler
from baguarun.elastic.training.dealt import Account, complement, merge, settle, translate


def test_what_survivors_have_done_or_were_shared_is_not_dealt_again() -> None:
    ahead = Account(epoch=1, done=[(0, 6), (8, 10)], dealt=[(0, 12)])
    behind = Account(epoch=1, done=[(0, 8)], dealt=[(0, 8)])
    settlement = settle([ahead, behind])
    assert settlement.done == [(0, 10)]
    assert (settlement.redealt, settlement.left_behind) == (2, 0)


def test_the_newest_epoch_counts_and_what_is_left_of_older_ones_is_told() -> None:
    settlement = settle(
        [
            Account(epoch=2, done=[(0, 2)], dealt=[(0, 4)]),
            Account(epoch=1, done=[(0, 50)], dealt=[(0, 56)]),
        ]
    )
    assert (settlement.epoch, settlement.done) == (2, [(0, 2)])
    assert (settlement.redealt, settlement.left_behind) == (2, 6)


def test_spans_are_united_turned_round_and_translated() -> None:
    assert merge([(5, 7), (0, 2), (1, 3), (3, 4), (9, 9)]) == [(0, 4), (5, 7)]
    assert complement([(0, 4), (5, 7)], 9) == [(4, 5), (7, 9)]
    assert translate((1, 4), [(10, 12), (0, 1), (20, 30)]) == [(11, 12), (0, 1), (20, 21)]


def test_a_sampler_deals_what_is_left_and_keeps_that_over_a_checkpoint() -> None:
    sampler = ElasticSampler(range(10), 2, shuffle=False)
    sampler.go_on_from(settle([Account(epoch=3, done=[(0, 2), (4, 7)], dealt=[(0, 8)])]))
    again = ElasticSampler(range(10), 2, shuffle=False)
    again.load_state_dict(sampler.state_dict())
    assert list(sampler) == list(again) == [[2, 3], [7, 8], [9]]
    sampler.cursor += 2
    assert sampler.account(shared_to=0, is_whole=True).done == [(0, 7)]
    sampler.begin_epoch()
    assert [place for batch in sampler for place in batch] == list(range(10))
