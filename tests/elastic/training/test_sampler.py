from __future__ import annotations

import numpy as np
import pytest
from torch.utils.data import DataLoader

from baguarun.elastic import ElasticSampler
from baguarun.elastic.training.sampler import FIRST_SAMPLES
from baguarun.errors import UsageError

DATA = list(range(100))


def take(sampler: ElasticSampler, steps: int) -> list[int]:
    """The samples of the next steps, as a training loop would move on."""
    found: list[int] = []
    micro_batches = iter(sampler)
    for deal, _ in zip(sampler.deals(), range(steps), strict=False):
        for _ in deal.micro_batches(sampler.rank):
            found += next(micro_batches)
        sampler.cursor = deal.end
    return found


def test_an_epoch_has_every_sample_once_and_the_next_one_another_order():
    sampler = ElasticSampler(DATA, 8)
    first = take(sampler, 100)
    sampler.begin_epoch()
    second = take(sampler, 100)
    assert sorted(first) == sorted(second) == DATA
    assert first != second != DATA


def test_without_shuffle_the_order_is_that_of_the_data():
    assert take(ElasticSampler(DATA, 8, shuffle=False), 100) == DATA


def test_the_rest_of_an_epoch_goes_on_where_it_was_left():
    whole = take(ElasticSampler(DATA, 8, seed=3), 100)
    sampler = ElasticSampler(DATA, 8, seed=3)
    begun = take(sampler, 4)
    other = ElasticSampler(DATA, 8, seed=3)
    other.load_state_dict(sampler.state_dict())
    assert begun + take(other, 100) == whole


def test_the_number_of_batches_is_what_the_loader_will_give():
    sampler = ElasticSampler(DATA, 8, drop_last=True)
    loader = DataLoader(DATA, batch_sampler=sampler)
    assert len(loader) == len(list(loader)) == 12
    take(sampler, 2)
    assert len(loader) == len(list(loader)) == 10


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"batch_size": 9}, "batch_size=8"),
        ({"batch_size": 8, "seed": 1}, "seed=0"),
        ({"batch_size": 8, "shuffle": False}, "shuffle=True"),
        ({"batch_size": 8, "drop_last": True}, "drop_last=False"),
        ({"batch_size": 8, "policy": "scale_lr"}, "policy='constant'"),
    ],
)
def test_a_place_in_another_order_is_refused(settings, name):
    kept = ElasticSampler(DATA, 8).state_dict()
    with pytest.raises(UsageError, match=name):
        ElasticSampler(DATA, **settings).load_state_dict(kept)
    with pytest.raises(UsageError, match="length=100, here it is 99"):
        ElasticSampler(DATA[:99], 8).load_state_dict(kept)


def test_a_place_of_before_all_settings_were_kept_is_gone_on_from():
    kept = ElasticSampler(DATA, 8).state_dict() | {"cursor": 16}
    del kept["drop_last"], kept["policy"]
    sampler = ElasticSampler(DATA, 8, drop_last=True, policy="scale_lr")
    sampler.load_state_dict(kept)
    assert sampler.cursor == 16


def test_settings_of_numpy_are_kept_as_pythons():
    sampler = ElasticSampler(DATA, np.int64(8), seed=np.int64(3), shuffle=np.bool_(True))
    assert [type(value) for value in sampler.state_dict().values()] == [
        type(value) for value in ElasticSampler(DATA, 8).state_dict().values()
    ]


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"batch_size": 0}, "want at least 1"), ({"batch_size": 1, "policy": "fixed"}, "want one of constant")],
)
def test_settings_out_of_range_are_refused_with_the_range(settings, words):
    with pytest.raises(UsageError, match=words):
        ElasticSampler(DATA, **settings)


def test_a_step_that_is_applied_already_is_dealt_as_large_as_it_was() -> None:
    """And the next ones are those of the present World, also where that is gone on from."""
    sampler = ElasticSampler(range(10), 2, shuffle=False, policy="fixed_per_worker")
    sampler.load_state_dict({**sampler.state_dict(), "cursor": 1, FIRST_SAMPLES: 5})
    assert [(deal.first, deal.end) for deal in sampler.deals()] == [(1, 6), (6, 8), (8, 10)]
    assert list(sampler) == [[1, 2], [3, 4], [5], [6, 7], [8, 9]]
    sampler.cursor = 6
    assert [(deal.first, deal.end) for deal in sampler.deals()] == [(6, 8), (8, 10)]
    sampler.load_state_dict({**sampler.state_dict(), "cursor": 1})
    assert [(deal.first, deal.end) for deal in sampler.deals()][:2] == [(1, 3), (3, 5)]
