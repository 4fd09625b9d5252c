"""What is published of a World, and what the leader remembers then."""

from __future__ import annotations

import pytest

from baguarun.elastic.membership.actions import InPlace, Publish
from baguarun.elastic.membership.keys import JobKeys
from baguarun.elastic.membership.ledger import Ledger
from baguarun.elastic.membership.new_world import members_of, record_of, rows_of
from baguarun.elastic.membership.records import Process
from baguarun.elastic.membership.store import Snapshot
from tests.support.fake_cluster import a_spec
from tests.support.views import a_node

A, B = a_node("a", 1), a_node("b", 2)
BOTH = (Process(0, 1), Process(1, 1))


@pytest.mark.parametrize(
    ("workers_of_b", "leaving", "is_short"),
    [(BOTH, False, False), (BOTH[:1], False, True), ((), False, True), ((), True, False)],
)
def test_a_world_is_short_if_a_node_that_stays_has_fewer_workers_than_places(
    workers_of_b: tuple[Process, ...], leaving: bool, is_short: bool
) -> None:
    details = InPlace(
        workers={"a": BOTH, "b": workers_of_b},
        fresh=False,
        polite=False,
        leaving=frozenset("b" if leaving else ""),
    )
    action = Publish(3, (A, B), 0, in_place=details)
    record = record_of(action, rows_of(action, "t"), "t", reason="", formed_s=0.0, net_secret="")
    assert record.is_short == is_short


def test_a_node_that_was_invited_is_invited_again_once_it_has_had_a_place_and_lost_it() -> None:
    ledger = Ledger(JobKeys("j"), a_spec(1, 3), Snapshot((), 1), 0.0)
    ledger.invited(["a", "c"])
    details = InPlace(workers={"a": BOTH, "b": BOTH}, fresh=False, polite=True)
    action = Publish(3, (A, B), 0, in_place=details)
    rows = rows_of(action, "t")
    record = record_of(action, rows, "t", reason="", formed_s=0.0, net_secret="")
    ledger.published(record, members_of(action, rows))
    assert not ledger.is_invited("a") and ledger.is_invited("c")
