from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from baguarun.elastic.training.dealing import Deal, deals

SIZES = st.integers(1, 50)


def make_deal(first: int, samples: int, world_size: int, batch_size: int) -> Deal:
    return Deal(first=first, end=first + samples, world_size=world_size, batch_size=batch_size)


@given(first=st.integers(0, 1000), samples=st.integers(1, 300), world_size=SIZES, batch_size=SIZES)
def test_every_sample_of_a_step_is_dealt_exactly_once(first, samples, world_size, batch_size):
    deal = make_deal(first, samples, world_size, batch_size)
    dealt = [place for rank in range(world_size) for micro in deal.micro_batches(rank) for place in micro]
    assert dealt == list(range(first, first + samples))


@given(samples=st.integers(1, 300), world_size=SIZES, batch_size=SIZES)
def test_shares_differ_by_one_sample_and_micro_batches_are_as_few_as_can_be(samples, world_size, batch_size):
    deal = make_deal(0, samples, world_size, batch_size)
    shares = [len(deal.share(rank)) for rank in range(world_size)]
    assert max(shares) - min(shares) <= 1
    assert shares == sorted(shares, reverse=True)
    for rank, share in enumerate(shares):
        sizes = [len(micro) for micro in deal.micro_batches(rank)]
        assert len(sizes) == -(-share // batch_size)
        assert all(0 < size <= batch_size for size in sizes)
        assert not sizes or max(sizes) - min(sizes) <= 1


@given(samples=st.integers(1, 300), world_size=SIZES, batch_size=SIZES)
def test_weighted_gradients_average_to_the_mean_over_all_samples(samples, world_size, batch_size):
    """With the sample's place as its gradient."""
    deal = make_deal(0, samples, world_size, batch_size)
    of_ranks = [
        sum(
            Fraction(len(micro) * world_size, samples) * Fraction(sum(micro), len(micro))
            for micro in deal.micro_batches(rank)
        )
        for rank in range(world_size)
    ]
    for rank in range(world_size):
        for micro in deal.micro_batches(rank):
            assert deal.weight(micro) == len(micro) * world_size / samples
    assert sum(of_ranks) / world_size == Fraction(sum(range(samples)), samples)


def test_equal_shares_of_one_micro_batch_count_one():
    deal = make_deal(0, 128, 4, 32)
    assert [deal.weight(micro) for rank in range(4) for micro in deal.micro_batches(rank)] == [1.0] * 4


@given(
    length=st.integers(0, 500),
    global_batch=SIZES,
    drop_last=st.booleans(),
    worlds=st.lists(SIZES, min_size=1, max_size=8),
    data=st.data(),
)
def test_an_epoch_is_covered_exactly_once_however_the_world_changes(
    length, global_batch, drop_last, worlds, data
):
    seen: list[int] = []
    cursor = 0
    for position, world_size in enumerate(worlds):
        steps = deals(
            cursor,
            length,
            global_batch=global_batch,
            world_size=world_size,
            batch_size=8,
            drop_last=drop_last,
        )
        is_last = position == len(worlds) - 1
        stay = None if is_last else data.draw(st.integers(0, 5), label="steps in this World")
        for count, deal in enumerate(steps):
            if count == stay:
                break
            for rank in range(world_size):
                seen.extend(deal.share(rank))
            cursor = deal.end
    whole = length - length % global_batch if drop_last else length
    assert seen == list(range(whole))
