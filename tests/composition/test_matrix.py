"""The matrix notices what is wrong, refuses little, covers every algorithm, and its page is up to date."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn

from baguarun.comm.algorithms import ALGORITHMS, Algorithm, Operation
from baguarun.contract import WorkerEnv
from baguarun.errors import UsageError
from tests.comm.ranks import run_ranks
from tests.composition import page
from tests.composition.matrix import (
    FEATURES,
    NOTES,
    REFUSED,
    Refusal,
    assert_same_training,
    check_refusal,
    judge,
    train_both,
)
from tests.composition.rows import ROWS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alone(Algorithm):
    """Wrong on purpose: exchanges nothing."""

    name: ClassVar[str] = "alone"

    def operation(self, dtype: torch.dtype, device: torch.device) -> Operation | None:
        del dtype, device
        return None


def features_that_notice_nothing(title: str) -> list[str]:
    like = next(row for row in ROWS if row.title == title)
    row = dataclasses.replace(like, algorithm=Alone())
    blind = []
    for feature in FEATURES:
        if (title, feature.title) in REFUSED:
            continue
        try:
            for found, expected in train_both(row, like, feature):
                assert_same_training(like, feature, found, expected)
        except AssertionError:
            continue
        blind.append(feature.title)
    return blind


@pytest.mark.parametrize("title", ["gradient_allreduce", "qadam, bits=1, warmup_steps=2"])
def test_every_feature_notices_an_algorithm_that_exchanges_nothing(title: str) -> None:
    """With the least and the greatest tolerance."""
    assert [blind for blind in run_ranks(features_that_notice_nothing, 3, title) if blind] == []


class Refusing(Alone):
    def check(self, env: WorkerEnv) -> None:
        del env
        raise UsageError("alone: cannot be")


def refusals_that_do_not_hold() -> list[str]:
    allowed = ROWS[0]
    refused = dataclasses.replace(allowed, algorithm=Refusing())
    check_refusal(refused, FEATURES[0], Refusal(message="cannot be", reason="on purpose"))
    errors = []
    for row, message in ((refused, "in other words"), (allowed, "cannot be")):
        with pytest.raises(AssertionError) as caught:
            check_refusal(row, FEATURES[0], Refusal(message=message, reason="on purpose"))
        errors.append(str(caught.value))
    dist.barrier()
    return errors


def test_a_cell_that_is_said_to_be_refused_has_to_be_and_with_these_words() -> None:
    for words, works in run_ranks(refusals_that_do_not_hold, 2):
        assert "refused with other words: alone: cannot be" in words
        assert "works, although" in works


def test_a_world_settles_the_cells_up_to_the_first_that_is_wrong() -> None:
    titles = ["a", "b", "c"]
    assert judge(titles, [(3, ""), (3, "")]) == {"a": "", "b": "", "c": ""}
    assert judge(titles, [(1, "off"), (1, "left alone")]) == {
        "a": "",
        "b": "rank 0: off\nrank 1: left alone",
    }
    assert judge(titles, [(3, ""), (2, "off")])["c"] == "rank 0: right\nrank 1: off"
    assert judge(titles, [None, (1, "left alone")])["b"] == "rank 0: died\nrank 1: left alone"
    assert judge(titles, [None, None]) == {"a": "rank 0: died\nrank 1: died"}
    assert judge(titles, [(3, ""), None])["c"] == "rank 0: right\nrank 1: died"


def test_every_algorithm_has_a_row() -> None:
    assert {type(row.algorithm) for row in ROWS} == set(ALGORITHMS.values())


def test_titles_are_unique_and_tables_name_what_is_there() -> None:
    rows, features = [row.title for row in ROWS], [feature.title for feature in FEATURES]
    assert len(set(rows)) == len(rows) and len(set(features)) == len(features)
    assert {note.feature for note in NOTES} <= set(features)
    assert {title for row in ROWS for title in row.tolerances} <= set(features)
    assert set(REFUSED) <= {(row, feature) for row in rows for feature in features}
    for note in NOTES:
        assert any(note.concerns(row) for row in ROWS), note.text


def test_at_most_one_cell_in_ten_is_refused() -> None:
    assert len(REFUSED) * 10 <= len(ROWS) * len(FEATURES)


def test_the_page_is_up_to_date() -> None:
    assert page.PATH.read_text(encoding="utf-8") == page.render(), "run python -m tests.composition --write"


def error_of_torchs_own() -> str:
    with pytest.raises(ValueError) as caught:
        nn.SyncBatchNorm(3)(torch.randn(4, 3))
    dist.barrier()
    return str(caught.value)


def test_torchs_sync_batch_norm_takes_no_cpu_tensors() -> None:
    """If it does one day, the matrix should train with it instead of its stand-in."""
    for message in run_ranks(error_of_torchs_own, 2):
        assert "SyncBatchNorm expected input tensor to be on GPU" in message
