"""What a node is told to do follows from what lies in the store, in whatever order it is read."""

from __future__ import annotations

from itertools import permutations

from baguarun.elastic.membership.events import Halted, MembershipEvent, Prepare, Start
from baguarun.elastic.membership.follower import Follower
from baguarun.elastic.membership.keys import JobKeys
from baguarun.elastic.membership.records import HaltRecord, Live, Process, Row, WorldRecord
from baguarun.elastic.membership.store import Entry
from tests.support.fake_cluster import a_spec

KEYS = JobKeys("job")
ROW = Row(generation=3, token="w3", node_rank=0, first_rank=0, slots=1, workers=(Process(0, 1),))
WORLD = WorldRecord(
    generation=3,
    token="w3",
    num_nodes=1,
    world_size=1,
    master_addr="addr",
    restart_count=0,
    charged=False,
    free_retries=0,
    reason="why",
    formed_s=0.0,
    net_secret="secret",
    in_place=True,
)


def read(*entries: tuple[str, bytes]) -> list[MembershipEvent]:
    events: list[MembershipEvent] = []
    follower = Follower(a_spec(1, 1), "a", events.append)
    for revision, (key, value) in enumerate(entries, 1):
        follower.read(Entry(key, value, revision, revision))
    return events


def test_a_world_that_is_halted_is_entered_first_and_halted_once() -> None:
    halt = f"{KEYS.halts}3", HaltRecord(token="w3", reason="all leave").to_json()
    entries = [
        (KEYS.row("a", 3), ROW.to_json()),
        (f"{KEYS.worlds}3", WORLD.to_json()),
        (f"{KEYS.lives}3", Live(token="w3", master_port=1).to_json()),
        halt,
    ]
    for order in permutations(entries):
        prepare, start, halted = read(*order, halt)
        assert isinstance(prepare, Prepare) and isinstance(start, Start)
        assert halted == Halted(4, "all leave")


def test_a_halt_of_another_world_is_not_ours() -> None:
    others = f"{KEYS.halts}3", HaltRecord(token="x3", reason="all leave").to_json()
    entries = [(KEYS.row("a", 3), ROW.to_json()), (f"{KEYS.worlds}3", WORLD.to_json())]
    live = f"{KEYS.lives}3", Live(token="w3", master_port=1).to_json()
    assert not any(isinstance(event, Halted) for event in read(others, *entries, live, others))
