"""The leader's choices, one by one: a view and a clock go in, an action and its reason come out."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from baguarun.elastic.membership.actions import (
    Action,
    Check,
    Dismiss,
    Finish,
    GoLive,
    Publish,
    Reset,
    Tell,
    Wait,
)
from baguarun.elastic.membership.decide import FREE_RETRIES, decide, first_failure
from baguarun.elastic.membership.job import JobSpec
from baguarun.elastic.membership.records import Past, StopRequest
from baguarun.elastic.membership.settings import MembershipSettings
from baguarun.elastic.membership.view import View
from tests.support.views import a_node, a_report, a_world, nodes_of

SETTINGS = MembershipSettings(detect_timeout_s=5.0, join_timeout_s=600.0)
A, B, C, D = (a_node(name, revision) for revision, name in enumerate("abcd", 10))
NOW = 100.0
LONG_AGO = 0.0


def a_spec(min_nodes: int, max_nodes: int, max_restarts: int = 0) -> JobSpec:
    return JobSpec(
        job_id="j",
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        max_restarts=max_restarts,
        digest="same",
        summary="train.py",
    )


def a_view(spec: JobSpec, *nodes: object, **rest: object) -> View:
    settled = {"newcomer_s": LONG_AGO, "loss_s": LONG_AGO, "first_loss_s": LONG_AGO, "short_s": NOW}
    return View(spec=spec, nodes=nodes_of(*nodes), **{**settled, **rest})  # type: ignore[arg-type]


def act(view: View, now_s: float = NOW) -> Action:
    return decide(now_s, view, SETTINGS).action


def names(action: Action) -> str:
    assert isinstance(action, Publish), action
    return "".join(node.node_id for node in action.nodes)


# -- the first World


def test_a_full_job_starts_at_once() -> None:
    action = act(a_view(a_spec(2, 2), A, B, newcomer_s=NOW))
    assert names(action) == "ab"
    assert isinstance(action, Publish) and (action.generation, action.restart_count) == (1, 0)


def test_a_job_that_could_grow_waits_for_a_quiet_second() -> None:
    view = a_view(a_spec(2, 4), A, B, newcomer_s=NOW)
    assert act(view) == Wait(NOW + 1.0, True)
    assert names(act(view, NOW + 1.0)) == "ab"


def test_too_few_nodes_wait_until_the_join_timeout_and_then_fail() -> None:
    view = a_view(a_spec(2, 2), A)
    decision = decide(NOW, view, SETTINGS)
    assert decision.reason == "1 of 2 nodes are here"
    assert decision.action == Wait(NOW + 600.0, True)
    late = decide(NOW + 600.0, view, SETTINGS)
    assert late.action == Finish(False, None, 1)
    assert "after waiting 600 s" in late.reason


def test_more_nodes_than_places_leave_the_last_in_rank_order_out() -> None:
    assert names(act(a_view(a_spec(1, 2), C, A, B))) == "ab"


def test_ranks_follow_the_request_then_the_natural_order_of_names_then_age() -> None:
    nodes = [a_node("n10", 1), a_node("n2", 2), a_node("x", 3, wanted=1), a_node("y", 4, wanted=0)]
    action = act(a_view(a_spec(4, 4), *nodes))
    assert isinstance(action, Publish)
    assert [node.node_id for node in action.nodes] == ["y", "x", "n2", "n10"]


def test_strangers_are_sent_away_and_do_not_count() -> None:
    view = a_view(a_spec(2, 2), A, B, strangers=frozenset("b"))
    assert act(view) == Tell(("b",), refused=True)
    assert isinstance(act(replace(view, told=frozenset("b"))), Wait)


# -- a World that runs


def test_a_world_goes_live_when_all_have_acknowledged() -> None:
    view = a_view(a_spec(2, 2), A, B, world=a_world(A, B, live=False, acked=1))
    assert act(view) == Wait()
    assert act(replace(view, world=a_world(A, B, live=False, acked=2))) == GoLive(1)


def test_nothing_happens_while_it_runs() -> None:
    assert act(a_view(a_spec(2, 2), A, B, world=a_world(A, B))) == Wait()


def test_it_succeeds_when_all_members_are_done() -> None:
    view = a_view(a_spec(2, 2), A, B, world=a_world(A, B), done=frozenset("a"))
    assert act(view) == Wait()
    assert act(replace(view, done=frozenset("ab"))) == Finish(True, None, 0)


def test_a_done_member_that_vanishes_is_not_missed() -> None:
    view = a_view(a_spec(1, 2), B, world=a_world(A, B), done=frozenset("a"))
    assert act(view) == Wait()
    assert act(replace(view, done=frozenset("ab"))) == Finish(True, None, 0)


def test_a_stop_request_ends_it() -> None:
    stop = StopRequest(reason="Ctrl-C", exit_code=130)
    view = a_view(a_spec(1, 1), A, world=a_world(A), stop=stop)
    assert decide(NOW, view, SETTINGS).action == Finish(False, None, 130, stop)


# -- newcomers


def test_newcomers_are_taken_in_behind_the_old_after_a_short_quiet() -> None:
    view = a_view(a_spec(1, 4), D, A, B, world=a_world(D), newcomer_s=NOW)
    assert act(view) == Wait(NOW + SETTINGS.join_settle_s)
    action = act(view, NOW + 0.3)
    assert names(action) == "dab"
    assert isinstance(action, Publish) and action.generation == 2 and not action.charged


def test_newcomers_that_fill_the_job_are_taken_in_at_once() -> None:
    assert names(act(a_view(a_spec(1, 2), A, B, world=a_world(A), newcomer_s=NOW))) == "ab"


def test_newcomers_wait_until_the_world_is_live() -> None:
    assert act(a_view(a_spec(1, 2), A, B, world=a_world(A, live=False))) == Wait()


@pytest.mark.parametrize("view", [
    a_view(a_spec(1, 2), A, B, C, world=a_world(A, B)),
    a_view(a_spec(1, 4), A, B, C, world=a_world(A, B), done=frozenset("b")),
])  # fmt: skip
def test_newcomers_without_a_place_are_told_once(view: View) -> None:
    assert act(view) == Tell(("c",), refused=False)
    assert act(replace(view, told=frozenset("c"))) == Wait()


def test_a_second_node_in_a_job_of_one_is_sent_away_once_the_first_has_had_time_to_prove_dead() -> None:
    view = a_view(a_spec(1, 1), A, B, world=a_world(A), newcomer_s=NOW)
    patience_s = 2 * SETTINGS.detect_timeout_s
    assert act(view) == Wait(NOW + patience_s)
    assert act(view, NOW + patience_s) == Tell(("b",), refused=True)
    assert act(replace(view, told=frozenset("b")), NOW + patience_s) == Wait()


# -- losses


def test_a_lost_member_is_left_out_after_50_ms_and_not_charged() -> None:
    view = a_view(a_spec(1, 3, 5), A, C, world=a_world(A, B, C, restart_count=2), loss_s=NOW)
    assert act(view) == Wait(NOW + SETTINGS.loss_settle_s)
    action = act(view, NOW + 0.05)
    assert names(action) == "ac"
    assert isinstance(action, Publish) and (action.restart_count, action.charged) == (2, False)


def test_survivors_keep_their_order_whatever_their_names() -> None:
    assert names(act(a_view(a_spec(1, 4), A, B, C, D, world=a_world(D, C, a_node("x", 5), B)))) == "dcba"


def test_a_node_that_registered_anew_under_its_id_is_a_newcomer() -> None:
    again = a_node("a", 50)
    assert names(act(a_view(a_spec(2, 2), B, again, world=a_world(A, B)))) == "ba"


def test_a_node_that_only_lost_its_lease_is_still_a_member() -> None:
    past = Past(generation=1, token="w1", node_rank=0, num_nodes=2, restart_count=0, net_secret="")
    again = a_node("a", 50, past=past)
    assert act(a_view(a_spec(2, 2), B, again, world=a_world(A, B))) == Wait()


def test_too_few_survivors_wait_for_others() -> None:
    view = a_view(a_spec(2, 2), A, world=a_world(A, B))
    assert decide(NOW, view, SETTINGS).reason == "1 of 2 nodes are here"
    assert names(act(replace(view, nodes=nodes_of(A, C)))) == "ac"


def test_after_a_gap_lost_members_may_register_again_but_those_who_left_are_not_waited_for() -> None:
    view = a_view(a_spec(1, 3), A, B, world=a_world(A, B, C), gap_s=NOW - 1)
    assert act(view) == Wait(NOW + 4, True)
    assert names(act(view, NOW + 4)) == "ab"
    assert names(act(replace(view, left=frozenset("c")))) == "ab"


def test_when_most_members_vanish_at_once_they_may_register_again() -> None:
    view = a_view(a_spec(1, 4), A, world=a_world(A, B, C), first_loss_s=NOW)
    assert act(view) == Wait(NOW + 5, True)
    assert names(act(view, NOW + 5)) == "a"


# -- failures


def test_a_failure_is_charged_while_the_budget_lasts() -> None:
    view = a_view(a_spec(2, 2, 3), A, B, world=a_world(A, B, restart_count=2), reports=(a_report("a", 20),))
    decision = decide(NOW, view, SETTINGS)
    assert isinstance(decision.action, Publish)
    assert (decision.action.restart_count, decision.action.charged) == (3, True)
    assert decision.reason.endswith("; restart 3 of 3")


def test_the_charge_is_refunded_if_a_member_is_lost_before_the_new_world_was_live() -> None:
    world = a_world(A, B, C, generation=2, live=False, restart_count=1, charged=True)
    action = act(a_view(a_spec(2, 3, 3), A, B, world=world))
    assert isinstance(action, Publish) and (action.restart_count, action.charged) == (0, False)
    live = act(a_view(a_spec(2, 3, 3), A, B, world=replace(world, live=True)))
    assert isinstance(live, Publish) and live.restart_count == 1


def test_a_loss_explains_a_failure() -> None:
    action = act(a_view(a_spec(1, 2, 3), A, world=a_world(A, B), reports=(a_report("a", 20),)))
    assert isinstance(action, Publish) and (action.restart_count, action.charged) == (0, False)


def test_without_budget_a_job_of_one_fails_at_once() -> None:
    report = a_report("a", 20, seen_s=NOW)
    view = a_view(a_spec(1, 1), A, world=a_world(A), reports=(report,))
    assert act(view) == Finish(False, report.failure, 3)


def test_without_budget_it_fails_at_once_when_every_member_has_reported() -> None:
    first, second = a_report("a", 21, seen_s=NOW), a_report("b", 20, seen_s=NOW)
    view = a_view(a_spec(2, 2), A, B, world=a_world(A, B), reports=(first, second))
    assert act(view) == Finish(False, second.failure, 3)
    done = a_view(a_spec(2, 2), A, B, world=a_world(A, B), reports=(first,), done=frozenset("b"))
    assert act(done) == Finish(False, first.failure, 3)


def test_without_budget_the_silent_are_asked_and_their_answers_settle_it() -> None:
    report = a_report("a", 20, seen_s=NOW)
    view = a_view(a_spec(2, 2), A, B, world=a_world(A, B), reports=(report,))
    assert act(view) == Check(1)
    asked = replace(view, world=a_world(A, B, checked=1))
    assert act(asked) == Wait(NOW + SETTINGS.verdict_s)
    assert act(asked, NOW + SETTINGS.verdict_s) == Finish(False, report.failure, 3)
    answered = replace(view, world=a_world(A, B, checked=2))
    assert act(answered) == Wait(NOW + 0.5), "another report may be the root cause"
    assert act(answered, NOW + 0.5) == Finish(False, report.failure, 3)


def test_an_address_in_use_is_free_five_times_and_then_a_failure() -> None:
    reports = (a_report("a", 20, retry_free=True),)
    view = a_view(a_spec(1, 1, 1), A, world=a_world(A), reports=reports)
    action = act(view)
    assert isinstance(action, Publish)
    assert (action.restart_count, action.charged, action.free_retries) == (0, False, 1)
    last = act(replace(view, world=a_world(A, free_retries=FREE_RETRIES)))
    assert isinstance(last, Publish) and (last.restart_count, last.charged) == (1, True)


def test_the_oldest_report_is_the_cause_unless_a_signal_follows_within_half_a_second() -> None:
    exit_first = a_report("a", 20, seen_s=1.0)
    killed = a_report("b", 21, seen_s=1.4, signal=signal.SIGKILL)
    killed_later = a_report("b", 21, seen_s=1.6, signal=signal.SIGKILL)
    aborted = a_report("b", 21, seen_s=1.1, signal=signal.SIGABRT)
    assert first_failure([killed, exit_first]) is killed
    assert first_failure([killed_later, exit_first]) is exit_first
    assert first_failure([aborted, exit_first]) is exit_first


# -- other runs of the job


def test_the_next_generation_is_above_all_that_any_node_has_seen() -> None:
    action = act(a_view(a_spec(1, 1), a_node("a", 9, seen=7)))
    assert isinstance(action, Publish) and action.generation == 8


def test_a_world_is_restored_from_what_the_nodes_know() -> None:
    def survivor(name: str, revision: int, node_rank: int) -> object:
        past = Past(
            generation=4, token="w4", node_rank=node_rank, num_nodes=3, restart_count=2, net_secret=""
        )
        return a_node(name, revision, seen=4, past=past)

    view = a_view(a_spec(1, 4, 5), survivor("a", 2, 1), survivor("b", 3, 0), newcomer_s=NOW)
    assert act(view) == Wait(NOW + 5, True), "a third node was there"
    action = act(view, NOW + 5)
    assert names(action) == "ba"
    assert isinstance(action, Publish) and (action.generation, action.restart_count) == (5, 2)


def test_an_ended_job_is_cleared_when_its_nodes_are_gone() -> None:
    view = a_view(a_spec(1, 2), A, D, world=a_world(A), ended_revision=12)
    assert act(view) == Wait(announce=True)
    assert act(replace(view, nodes=nodes_of(D))) == Reset()


def test_an_unfinished_run_without_nodes_is_given_time_and_then_cleared() -> None:
    view = a_view(a_spec(1, 2), D, world=a_world(A), inherited=True, took_over_s=NOW)
    assert act(view) == Wait(NOW + 5, True)
    assert act(view, NOW + 5) == Reset()
    past = Past(generation=1, token="w1", node_rank=0, num_nodes=1, restart_count=0, net_secret="")
    returned = replace(view, nodes=nodes_of(D, a_node("a", 40, past=past)))
    assert isinstance(act(returned), Publish), "the old node came back, so the job goes on"


# -- scaling


def test_a_job_scaled_down_asks_its_youngest_members_to_go() -> None:
    # Ranks follow names, not age: the young ones are a and c.
    young_a, young_c = a_node("a", 20), a_node("c", 21)
    view = a_view(a_spec(1, 4), young_a, B, young_c, D, world=a_world(young_a, B, young_c, D), desired=2)
    decision = decide(NOW, view, SETTINGS)
    assert decision.action == Dismiss(("a", "c"))
    assert decision.reason == "the job is scaled to 2 of at most 4 nodes; a, c must go"


def test_whoever_was_asked_to_go_is_not_asked_again_and_gets_no_place() -> None:
    world = a_world(A, B, C)
    view = a_view(a_spec(1, 3), A, B, C, world=world, desired=2, dismissed=frozenset("c"))
    assert act(view) == Wait()
    failed = replace(view, spec=a_spec(1, 3, max_restarts=1), reports=(a_report("b", 30),))
    assert names(act(failed)) == "ab"
    assert names(act(replace(view, desired=3, nodes=nodes_of(A, B, C, D)))) == "abd"


def test_after_a_dismissed_node_has_left_the_others_go_on_without_a_charge() -> None:
    view = a_view(a_spec(1, 3), A, B, world=a_world(A, B, C), desired=2, left=frozenset("c"))
    action = act(view)
    assert names(action) == "ab"
    assert isinstance(action, Publish) and not action.charged


def test_members_are_asked_to_go_even_while_another_one_is_lost() -> None:
    view = a_view(a_spec(1, 4), A, B, C, world=a_world(A, B, C, D), desired=2)
    assert act(view) == Dismiss(("c",))
    assert names(act(replace(view, dismissed=frozenset("c")))) == "ab"


def test_a_job_that_is_scaled_down_has_newcomers_stand_by_until_it_is_scaled_up() -> None:
    view = a_view(a_spec(1, 3), A, B, C, world=a_world(A, B), desired=2)
    decision = decide(NOW, view, SETTINGS)
    assert decision.action == Tell(("c",), refused=False)
    assert decision.reason == "the job is scaled to 2 of at most 3 nodes; standing by"
    told = replace(view, told=frozenset("c"))
    assert act(told) == Wait()
    assert names(act(replace(told, desired=3))) == "abc"


def test_a_job_that_is_scaled_up_takes_who_is_there_and_goes_on_without_the_rest() -> None:
    view = a_view(a_spec(1, 4), A, B, world=a_world(A, B), desired=4)
    assert act(view) == Wait()


@pytest.mark.parametrize(("desired", "places"), [(None, 3), (1, 2), (2, 2), (3, 3), (9, 3)])
def test_a_wish_outside_the_jobs_range_counts_as_its_end(desired: int | None, places: int) -> None:
    assert a_view(a_spec(2, 3), desired=desired).places == places


def test_a_first_world_has_no_more_nodes_than_the_job_is_scaled_to() -> None:
    assert names(act(a_view(a_spec(1, 4), A, B, C, desired=2, newcomer_s=NOW))) == "ab"


def test_what_a_job_left_that_never_formed_a_world_is_cleared_at_once() -> None:
    assert act(a_view(a_spec(1, 2), A, inherited=True, newcomer_s=NOW)) == Reset()
