"""What the leader makes of complaints: whom it asks, acquits, expels or leaves out."""

from __future__ import annotations

from dataclasses import replace

from baguarun.elastic.membership.actions import Publish, Wait
from baguarun.elastic.membership.decide import decide
from baguarun.elastic.membership.records import BrokenLink, Suspicion, Witness, WorldRecord
from baguarun.elastic.membership.settings import MembershipSettings
from baguarun.elastic.membership.suspicion import (
    FIRST_HELD_OFF_S,
    FORGIVEN_AFTER_S,
    HELD_OFF_S,
    Complaint,
    Examination,
    blame,
    examine,
    held_off,
)
from baguarun.elastic.membership.view import View
from tests.support.fake_cluster import a_spec
from tests.support.views import a_node, a_world, nodes_of

SETTINGS = MembershipSettings(detect_timeout_s=1.0)
MEMBERS = ("a", "b", "c", "d")


def a_complaint(by: str, *blamed: str, seen_s: float = 0.0, silence: bool = False) -> Complaint:
    return Complaint(by, blamed, Witness.WORKER, "broke", seen_s, silence)


def _out(*complaints: Complaint, broken: tuple[BrokenLink, ...] = (), silent: str = "") -> str:
    found = blame(complaints, MEMBERS, broken, frozenset(silent), time_s=100.0)
    return "".join(sorted(found.leave_out))


def test_a_suspect_is_asked_then_acquitted_if_it_answers_or_expelled_if_it_does_not() -> None:
    suspects = frozenset("ab")
    assert examine(suspects, "me", {}, frozenset(), 5.0, 0.2) == Examination(ask=suspects)
    asked = {"a": 5.0, "b": 5.0}
    assert examine(suspects, "me", asked, frozenset("a"), 5.1, 0.2) == Examination(acquit=frozenset("a"))
    assert examine(suspects, "me", asked, frozenset("a"), 5.2, 0.2) == Examination(
        acquit=frozenset("a"), expel=frozenset("b")
    )


def test_the_leader_acquits_itself() -> None:
    found = examine(frozenset(("me",)), "me", {"me": 0.0}, frozenset(), 100.0, 0.2)
    assert found == Examination(acquit=frozenset(("me",)))


def test_the_first_time_that_a_link_breaks_nobody_goes_and_it_is_remembered() -> None:
    found = blame([a_complaint("b", "a"), a_complaint("a", "b")], MEMBERS, time_s=100.0)
    assert found.leave_out == frozenset()
    assert found.broken == (BrokenLink("a", "b", 100.0),)


def test_the_second_time_the_end_with_more_complaints_goes() -> None:
    before = (BrokenLink("a", "b", 90.0),)
    assert _out(a_complaint("b", "a"), a_complaint("c", "a"), a_complaint("a", "b"), broken=before) == "a"
    assert _out(a_complaint("b", "a"), a_complaint("a", "b"), a_complaint("d", "b"), broken=before) == "b"


def test_with_as_many_complaints_the_silent_end_goes_else_the_later_one() -> None:
    before = (BrokenLink("b", "a", 90.0),)
    both = (a_complaint("b", "a"), a_complaint("a", "b"))
    assert _out(*both, broken=before) == "b"
    assert _out(*both, broken=before, silent="a") == "a"


def test_another_link_has_its_own_first_time() -> None:
    assert _out(a_complaint("c", "d"), broken=(BrokenLink("a", "b", 90.0),)) == ""


def test_an_end_that_does_not_answer_probes_either_goes_the_first_time() -> None:
    assert _out(a_complaint("b", "c"), silent="c") == "c"


def test_who_is_silent_to_several_goes_the_first_time() -> None:
    mute = [a_complaint(by, "b", silence=True) for by in "ac"]
    assert _out(*mute, a_complaint("b", "a", silence=True)) == "b"
    assert _out(*mute, a_complaint("b", "a")) == "b"


def test_a_connection_that_broke_for_several_or_one_witness_of_silence_costs_nobody_a_place() -> None:
    assert _out(a_complaint("a", "b"), a_complaint("c", "b")) == ""
    assert _out(a_complaint("a", "b", silence=True), a_complaint("c", "b")) == ""
    assert _out(a_complaint("a", "b", silence=True), a_complaint("b", "a", silence=True)) == ""


def test_halves_that_do_not_hear_each_other_meet_again_first() -> None:
    assert _out(*(a_complaint(by, of, silence=True) for by, of in ("ac", "bc", "ca", "da"))) == ""


def test_one_node_whose_links_all_broke_goes_alone() -> None:
    before = tuple(BrokenLink("c", other, 90.0) for other in "abd")
    complaints = [a_complaint(other, "c") for other in "abd"] + [a_complaint("c", "a")]
    assert _out(*complaints, broken=before) == "c"


def test_a_link_that_broke_long_ago_is_forgiven_and_forgotten() -> None:
    old = (BrokenLink("a", "b", 100.0 - FORGIVEN_AFTER_S),)
    assert _out(a_complaint("a", "b"), broken=old) == ""
    assert blame([], MEMBERS, old, time_s=100.0).broken == ()


def test_complaints_of_and_about_strangers_or_nobody_leave_everybody_in() -> None:
    before = (BrokenLink("a", "x", 90.0),)
    assert _out(a_complaint("x", "a"), a_complaint("a", "x"), a_complaint("b"), broken=before) == ""


def test_who_was_left_out_stays_out_for_a_while_as_long_as_the_other_end_is_here() -> None:
    broken = (BrokenLink("a", "b", 100.0),)
    assert held_off("bx", "ac", broken, 101.0) == {"b"}
    assert held_off("bx", "cd", broken, 101.0) == frozenset()
    assert held_off("bx", "ac", broken, 100.0 + HELD_OFF_S) == frozenset()


def test_who_was_only_silent_once_may_come_back_sooner() -> None:
    mute = [a_complaint(by, "b", silence=True) for by in "ac"]
    once = blame(mute, MEMBERS, time_s=100.0).broken
    assert held_off("b", "ac", once, 99.0 + FIRST_HELD_OFF_S) == {"b"}
    assert held_off("b", "ac", once, 100.0 + FIRST_HELD_OFF_S) == frozenset()
    twice = blame(mute, MEMBERS, once, time_s=200.0).broken
    assert held_off("b", "ac", twice, 199.0 + HELD_OFF_S) == {"b"}


def test_records_of_suspicions_and_broken_links_come_back_from_json() -> None:
    suspicion = Suspicion(blamed=("a", "b"), by=Witness.PROBE, reason="silent")
    assert Suspicion.from_json(suspicion.to_json()) == suspicion
    mute = Suspicion(blamed=("a",), by=Witness.WORKER, reason="no sign of life", silence=True)
    assert Suspicion.from_json(mute.to_json()) == mute
    world = WorldRecord(
        generation=1,
        token="t",
        num_nodes=1,
        world_size=1,
        master_addr="a",
        restart_count=0,
        charged=False,
        free_retries=0,
        reason="",
        formed_s=0.0,
        net_secret="s",
        broken=(BrokenLink("a", "b", 1.5),),
    )
    assert WorldRecord.from_json(world.to_json()) == world


# -- as decisions

A, B, C = a_node("a", 1), a_node("b", 2), a_node("c", 3)
RUNNING = View(spec=a_spec(1, 3), nodes=nodes_of(A, B, C), world=a_world(A, B, C), time_s=100.0)


def test_complaints_are_gathered_for_a_moment_then_all_meet_again_at_no_charge() -> None:
    view = replace(RUNNING, complaints=(a_complaint("a", "b", seen_s=10.0),))
    until_s = 10.0 + SETTINGS.complaints_settle_s
    assert decide(10.0, view, SETTINGS).action == Wait(until_s)
    action = decide(until_s, view, SETTINGS).action
    assert isinstance(action, Publish)
    assert action.nodes == (A, B, C) and (action.generation, action.restart_count) == (2, 0)
    assert action.broken == (BrokenLink("a", "b", 100.0),)


def test_after_a_silence_frozen_workers_are_waited_for_before_the_silent_node_loses_its_place() -> None:
    mute = tuple(a_complaint(by, "c", seen_s=10.0, silence=True) for by in "ab")
    view = replace(RUNNING, complaints=mute)
    until_s = 10.0 + SETTINGS.silence_settle_s
    assert decide(10.5, view, SETTINGS).action == Wait(until_s)
    action = decide(until_s, view, SETTINGS).action
    assert isinstance(action, Publish) and action.nodes == (A, B)
    after = replace(RUNNING, world=replace(a_world(A, B, generation=2), broken=action.broken))
    assert isinstance(decide(11.0, after, SETTINGS).action, Wait)


def test_at_the_second_time_the_world_goes_on_without_one_end_which_does_not_come_back_at_once() -> None:
    world = replace(a_world(A, B, C, generation=2), broken=(BrokenLink("a", "b", 90.0),))
    complaints = (a_complaint("a", "b"), a_complaint("c", "b"))
    view = replace(RUNNING, world=world, complaints=complaints)
    action = decide(100.0, view, SETTINGS).action
    assert isinstance(action, Publish) and action.nodes == (A, C)
    after = replace(a_world(A, C, generation=3), broken=action.broken)
    assert isinstance(decide(101.0, replace(RUNNING, world=after), SETTINGS).action, Wait)
    later = replace(RUNNING, world=after, time_s=100.0 + HELD_OFF_S)
    action = decide(101.0, later, SETTINGS).action
    assert isinstance(action, Publish) and action.nodes == (A, C, B)


def test_nobody_is_left_out_of_a_job_that_would_be_too_small_without() -> None:
    world = replace(a_world(A, B, C), broken=(BrokenLink("a", "b", 90.0),))
    view = replace(RUNNING, spec=a_spec(3, 3), world=world, complaints=(a_complaint("a", "b"),))
    action = decide(100.0, view, SETTINGS).action
    assert isinstance(action, Publish) and action.nodes == (A, B, C)
