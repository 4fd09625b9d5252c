"""Whom a worker blames when its communication breaks."""

from __future__ import annotations

import pytest

from baguarun.elastic.training.in_place import blamed, is_silence


@pytest.mark.parametrize(
    ("reason", "rank"),
    [
        (
            "CommunicationError: bucket 0 of 1: baguanet: all_reduce (collective 28) in group 3b64: "
            "rank 12 (10.0.0.3:33055): no sign of life for 600 ms (found by rank 0 (10.0.0.1:33633))",
            12,
        ),
        ("baguanet: barrier in group x: the communicator was aborted: a worker is lost", None),
        (
            "CommunicationError: exchange of weights failed: baguanet: receive from rank 1 in group 3b64 "
            "(its ranks are the World's 4, 12): rank 1 (10.0.0.3:33055): its connection was reset",
            12,
        ),
        (
            "CommunicationError: baguanet: joining in group 3b64 (its ranks are the World's 4, 12): of 2 "
            "ranks, these did not come within 5000 ms: 0",
            4,
        ),
        ("CommunicationError: of 4 ranks, these did not come within 5000 ms: 2, 3", 2),
        ("CommunicationError: rank 1 of 2 could not enter: rank 0 (a:1): its store is not reached: x", 0),
        ("DistBackendError: NCCL error in rank 3", None),
        ("", None),
    ],
)
def test_the_rank_that_the_transport_names_first_is_blamed(reason: str, rank: int | None) -> None:
    assert blamed(reason) == rank


def test_a_silent_rank_is_told_from_a_connection_that_ended() -> None:
    silent = "baguanet: rank 1 (a:1): has given no sign of life for 500 ms: is it stopped?"
    assert is_silence(silent)
    assert not is_silence("baguanet: rank 1 (a:1): its connection was reset")
