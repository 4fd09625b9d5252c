"""What the leader of a job that is resized in place does next: one frozen view per test."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from baguarun.elastic.membership.actions import (
    Action,
    Dismiss,
    Finish,
    GoLive,
    Halt,
    InPlace,
    Invite,
    Publish,
    Tell,
    Wait,
)
from baguarun.elastic.membership.decide_in_place import awaited_nodes, decide_in_place
from baguarun.elastic.membership.job import UNLIMITED_RESTARTS
from baguarun.elastic.membership.records import (
    BrokenLink,
    FailureReport,
    InPlaceState,
    Member,
    Past,
    Process,
    Witness,
)
from baguarun.elastic.membership.settings import MembershipSettings
from baguarun.elastic.membership.streak import ENOUGH_BREAKS, Streak
from baguarun.elastic.membership.suspicion import Complaint
from baguarun.elastic.membership.view import CurrentWorld, Node, View
from baguarun.errors import NO_PROGRESS_EXIT_CODE
from tests.support.fake_cluster import a_spec
from tests.support.views import a_node, a_report, nodes_of

SETTINGS = MembershipSettings(detect_timeout_s=5.0, join_timeout_s=60.0)
NOW_S = 1000.0
A0, A1, B0, B1 = Process(0, 1), Process(1, 1), Process(0, 1), Process(1, 1)
NEW = Process(1, 0, 1)
COMPLAINT = Complaint("a", ("b",), Witness.WORKER, "broke", 0.0, False)


def with_state(node: Node, *workers: Process, **rest: Any) -> Node:
    return replace(node, record=replace(node.record, state=InPlaceState(workers=workers, **rest)))


A = with_state(a_node("a", 1), A0, A1)
B = with_state(a_node("b", 2), B0, B1)
C = a_node("c", 3)


def a_member(node: Node, *workers: Process) -> Member:
    return Member(node.node_id, node.record.name, len(workers), node.create_revision, workers)


def a_world(*members: Member, live: bool = True, **rest: Any) -> CurrentWorld:
    settled = {"acked": 0, "checked": None, "restart_count": 0, "charged": False, "free_retries": 0}
    return CurrentWorld(
        **{"generation": 1, "token": "w1", "members": members, "live": live, **settled, **rest}
    )


FRESH = a_world(a_member(A, A0, A1), a_member(B, B0, B1))


def a_view(
    *nodes: Node,
    world: CurrentWorld | None = FRESH,
    nnodes: tuple[int, int] = (1, 3),
    max_restarts: int = UNLIMITED_RESTARTS,
    **rest: Any,
) -> View:
    spec = replace(a_spec(*nnodes, max_restarts=max_restarts), in_place=True)
    return View(spec=spec, nodes=nodes_of(*nodes), world=world, **rest)


def decided(*nodes: Node, **rest: Any) -> tuple[Action, str]:
    decision = decide_in_place(NOW_S, a_view(*nodes, **rest), SETTINGS)
    return decision.action, decision.reason


def published(*nodes: Node, **rest: Any) -> tuple[dict[str, tuple[Process, ...]], InPlace, Publish]:
    """Workers by name, in rank order, without the nodes that have none."""
    action, reason = decided(*nodes, **rest)
    assert isinstance(action, Publish), reason
    details = action.in_place
    assert details is not None
    workers = {node.node_id: details.workers[node.node_id] for node in action.nodes}
    return {name: found for name, found in workers.items() if found}, details, action


def test_a_first_world_is_of_all_slots_and_started_for_it() -> None:
    workers, details, _ = published(a_node("a", 1), a_node("b", 2), world=None, nnodes=(2, 2))
    assert workers == {"a": (A0, A1), "b": (B0, B1)}
    assert details.fresh and not details.polite


def test_a_world_that_runs_well_is_left_alone() -> None:
    assert isinstance(decided(A, B)[0], Wait)


def test_workers_that_survive_a_loss_go_on_in_their_order() -> None:
    lost = with_state(A, A1, lost=(A0,))
    workers, details, action = published(lost, B, reports=(a_report("a", 9, signal=9),))
    assert list(workers.items()) == [("a", (A1,)), ("b", (B0, B1))]
    assert (details.fresh, details.polite) == (False, False)
    assert action.restart_count == 1


def test_who_reads_of_a_loss_is_told_whether_others_took_the_place() -> None:
    assert decided(with_state(A, A1, lost=(A0,)), B)[1].endswith("; going on without")
    spare = Process(2, 0, 1)
    assert decided(with_state(A, A1, spare, lost=(A0,)), B)[1].endswith("; going on with new workers on a")


def test_a_node_without_a_worker_left_stays_a_member_and_comes_after_those_with_workers() -> None:
    lost = with_state(A, lost=(A0, A1))
    workers, _, action = published(lost, B)
    assert list(workers) == ["b"]
    assert [node.node_id for node in action.nodes] == ["b", "a"]


def test_workers_that_have_not_entered_are_not_in_a_world_in_place() -> None:
    slow = with_state(B, B1)
    workers, _, _ = published(with_state(A, A1, lost=(A0,)), slow)
    assert workers == {"a": (A1,), "b": (B1,)}


def test_when_nobody_is_left_all_slots_are_started_afresh() -> None:
    workers, details, action = published(
        with_state(A, lost=(A0, A1)), with_state(B, lost=(B0, B1)), C, reports=(a_report("a", 9, signal=9),)
    )
    generation = action.generation
    assert details.fresh
    assert workers == {name: (Process(0, generation), Process(1, generation)) for name in "abc"}


def test_a_lost_node_is_left_out_after_the_others_had_a_moment_to_be_lost_too() -> None:
    assert isinstance(decided(A, loss_s=NOW_S)[0], Wait)
    workers, details, action = published(A)
    assert list(workers) == ["a"]
    assert not details.polite
    assert action.restart_count == 0, "losing a node is no failure of the job's"


def test_too_few_nodes_wait_but_a_node_whose_worker_is_replaced_counts() -> None:
    action, reason = decided(A, nnodes=(2, 2), short_s=NOW_S)
    assert isinstance(action, Wait) and "1 of 2 nodes" in reason
    published(A, with_state(B, lost=(B0, B1)), nnodes=(2, 2))


def test_a_node_that_comes_where_too_few_are_left_is_asked_in() -> None:
    assert decided(A, C, nnodes=(2, 2), short_s=NOW_S)[0] == Invite(("c",))
    asked = {"nnodes": (2, 2), "short_s": NOW_S, "invited": frozenset("c")}
    assert isinstance(decided(A, C, **asked)[0], Wait)
    workers, _, _ = published(A, with_state(C, NEW, waiting=(NEW,)), **asked)
    assert workers == {"a": (A0, A1), "c": (NEW,)}


def test_a_replacement_comes_in_politely_and_after_the_survivors_of_its_node() -> None:
    world = a_world(a_member(A, A1), a_member(B, B0, B1), generation=2, in_place=True)
    back = with_state(A, NEW, A1, waiting=(NEW,))
    workers, details, _ = published(back, B, world=world)
    assert list(workers.items()) == [("a", (A1, NEW)), ("b", (B0, B1))]
    assert details.polite


def test_nobody_comes_in_before_all_workers_have_entered() -> None:
    joining = with_state(C, Process(0, 0, 1))
    action, reason = decided(A, with_state(B, B0), joining)
    assert isinstance(action, Wait) and "not all of them have entered" in reason
    workers, _, _ = published(A, B, joining)
    assert workers["c"] == (Process(0, 0, 1),)


def test_the_workers_of_a_node_come_in_together_if_they_are_ready_within_a_moment() -> None:
    """The others stand once for both; a worker that takes longer does not keep the first one out."""
    first, second = Process(0, 0, 1), Process(1, 0, 1)
    one = with_state(C, first, arriving=1)
    action, reason = decided(A, B, one, newcomer_s=NOW_S - 0.1)
    assert action == Wait(NOW_S - 0.1 + SETTINGS.newcomers_settle_s) and "more are joining" in reason
    assert published(A, B, one, newcomer_s=NOW_S - 0.5)[0]["c"] == (first,)
    # Nor one that has not even arrived.
    assert published(A, B, with_state(C, first), newcomer_s=NOW_S)[0]["c"] == (first,)
    both = with_state(C, first, second)
    assert published(A, B, both, newcomer_s=NOW_S)[0]["c"] == (first, second)


def test_a_node_is_asked_to_start_newcomers_only_if_there_is_room() -> None:
    assert decided(A, B, C)[0] == Invite(("c",))
    assert isinstance(decided(A, B, C, invited=frozenset("c"))[0], Wait)
    assert decided(A, B, C, nnodes=(1, 2))[0] == Tell(("c",), refused=False)


def test_nodes_that_were_asked_for_newcomers_are_awaited_until_they_are_in() -> None:
    def expected(*nodes: Node, **rest: Any) -> bool:
        return awaited_nodes(a_view(*nodes, **rest)) == frozenset("c")

    asked = {"invited": frozenset("c")}
    assert expected(A, B, C, **asked)
    assert not expected(A, B, C)
    joined = a_world(a_member(A, A0, A1), a_member(B, B0, B1), a_member(C, Process(0, 0, 1)))
    assert not expected(A, B, C, world=joined, **asked)
    # It leaves again, and is a member without workers until it has gone; or the job was scaled down.
    without = a_world(a_member(A, A0, A1), a_member(B, B0, B1), a_member(C))
    assert expected(A, B, C, world=without, **asked)
    assert not expected(A, B, C, desired=2, **asked)
    assert not expected(A, B, C, world=None, **asked)


def test_a_leaving_node_goes_politely_if_enough_stay() -> None:
    leaving = with_state(B, B0, B1, leaving=True)
    workers, details, action = published(A, leaving)
    assert list(workers) == ["a"] and details.polite
    assert details.leaving == frozenset("b") and action.nodes[-1].node_id == "b"


def test_where_too_few_would_be_left_all_stop_at_one_commit() -> None:
    leaving = with_state(B, B0, B1, leaving=True)
    both = with_state(A, A0, A1, leaving=True), leaving
    for nodes, nnodes in (((A, leaving), (2, 2)), (both, (1, 2)), (both, (1, 3))):
        action, reason = decided(*nodes, nnodes=nnodes)
        assert action == Halt(1) and "too few" in reason
        action, again = decided(*nodes, nnodes=nnodes, world=replace(FRESH, halted=True))
        assert isinstance(action, Wait) and again == reason
    # One has gone, and the other's workers are writing: nobody is to begin anew beside them.
    gone = {"world": replace(FRESH, halted=True), "left": frozenset("a"), "short_s": NOW_S}
    assert isinstance(decided(leaving, **gone)[0], Wait)


def test_where_communication_breaks_and_too_few_stay_nobody_goes_on() -> None:
    leaving = with_state(B, B0, B1, leaving=True)
    both = with_state(A, A0, A1, leaving=True), leaving
    for nodes, nnodes in (((A, leaving), (2, 2)), (both, (1, 2))):
        broken = {"nnodes": nnodes, "complaints": (COMPLAINT,)}
        action, reason = decided(*nodes, **broken)
        assert action == Halt(1) and reason.startswith("communication broke")
        halted = replace(FRESH, halted=True)
        assert isinstance(decided(*nodes, **broken, world=halted)[0], Wait)


def test_who_leaves_while_too_few_are_there_is_let_go() -> None:
    leaving = with_state(A, A0, A1, leaving=True)
    action, reason = decided(leaving, nnodes=(2, 2), short_s=NOW_S)
    assert action == Halt(1) and reason == "b lost; others leave, too"
    for world in (replace(FRESH, halted=True), replace(FRESH, live=False)):
        assert isinstance(decided(leaving, nnodes=(2, 2), short_s=NOW_S, world=world)[0], Wait)


def test_workers_that_have_not_all_entered_do_not_stop_at_a_commit() -> None:
    assert isinstance(decided(A, with_state(B, leaving=True), nnodes=(2, 2))[0], Wait)


def test_scaled_down_the_youngest_are_asked_to_leave() -> None:
    assert decided(A, B, desired=1)[0] == Dismiss(("b",))
    assert isinstance(decided(A, B, desired=1, dismissed=frozenset("b"))[0], Wait)


def test_a_world_goes_live_when_the_nodes_with_workers_are_ready() -> None:
    world = a_world(a_member(B, B0, B1), a_member(A), live=False, in_place=True)
    idle = with_state(A)
    assert isinstance(decided(idle, B, world=world)[0], Wait)
    assert isinstance(decided(idle, B, world=replace(world, acked=1))[0], GoLive)


def test_a_leaver_that_is_lost_on_the_way_is_not_waited_for() -> None:
    world = a_world(a_member(A, A0, A1), a_member(B), live=False, in_place=True, polite=True)
    leaving = with_state(B, B0, leaving=True)
    assert isinstance(decided(A, leaving, world=world)[0], Wait)
    for nodes, rest in (((A,), {}), ((A, leaving), {"reports": (a_report("b", 9, signal=9),)})):
        _, details, _ = published(*nodes, world=world, **rest)
        assert not details.polite
    assert isinstance(decided(A, world=world, left=frozenset("b"))[0], Wait)


def test_three_failures_in_a_row_without_a_committed_step_end_the_job_with_the_first_of_them() -> None:
    first = a_report("b", 1).failure
    failing = with_state(A, A1, lost=(A0,), steps=7)
    reports = (a_report("a", 9),)
    world = replace(FRESH, streak=Streak(failures=2, first_failure=first))
    action, reason = decided(failing, B, world=world, reports=reports)
    assert isinstance(action, Finish) and action.exit_code == NO_PROGRESS_EXIT_CODE
    assert action.failure is first and "3 times in a row" in reason
    stepping = with_state(B, B0, B1, stepped=1)
    _, details, _ = published(failing, stepping, world=world, reports=reports)
    assert (details.streak.failures, details.streak.first_failure) == (1, reports[0].failure)
    _, details, _ = published(A, world=world)
    assert details.streak.failures == 2, "a lost node neither counts nor helps"


def test_starting_anew_again_and_again_without_getting_further_ends_the_job() -> None:
    reports = (a_report("a", 9), a_report("b", 10))
    world, restarts = FRESH, []
    for steps in (107, 104, 109, 109):
        dead = [
            with_state(node, lost=(Process(0, 1), Process(1, 1)), steps=steps, stepped=1) for node in (A, B)
        ]
        _, details, _ = published(*dead, world=world, reports=reports)
        restarts.append((details.streak.restarts, details.streak.steps))
        world = replace(FRESH, streak=details.streak)
    assert restarts == [(1, 107), (2, 107), (1, 109), (2, 109)]
    action, reason = decided(*dead, world=world, reports=reports)
    assert isinstance(action, Finish) and action.exit_code == NO_PROGRESS_EXIT_CODE
    assert "without passing step 109" in reason


def complaint(node_id: str, *blamed: str, reason: str = "calls differ", seen_s: float = 0.0) -> Complaint:
    return Complaint(node_id, blamed, Witness.WORKER, reason, seen_s)


def test_communication_that_breaks_again_and_again_without_a_committed_step_ends_the_job() -> None:
    """Sixty seconds are what a network has to be mended here: the time that nodes are waited for."""
    world, ended = FRESH, []
    for number in range(20):
        complaints = (complaint("b", reason="all_reduce met broadcast"), complaint("a", seen_s=1.0))
        at = {"world": world, "complaints": complaints, "time_s": 100.0 + 7 * number}
        action, reason = decided(A, B, **at)
        if isinstance(action, Finish):
            ended.append((action.exit_code, number + 1))
            break
        _, details, _ = published(A, B, **at)
        assert details.streak.breaks == number + 1
        world = replace(FRESH, streak=details.streak)
    assert ended == [(NO_PROGRESS_EXIT_CODE, 10)]
    assert reason.startswith("no progress: communication broke 10 times in 63 s before a step was committed")
    assert "the last time on node b: all_reduce met broadcast. Look for " in reason


def test_a_network_that_is_cut_off_for_a_while_ends_no_job_however_often_workers_meet_meanwhile() -> None:
    long_ago = Streak(breaks=ENOUGH_BREAKS - 2, broken_since_s=100.0)
    just_now = Streak(breaks=50, broken_since_s=1000.0)
    for streak in (long_ago, just_now):
        world = replace(FRESH, streak=streak)
        at = {"world": world, "complaints": (complaint("a", "b"),), "time_s": 1059.0, "nnodes": (2, 2)}
        workers, details, _ = published(A, B, **at)
        assert list(workers) == ["a", "b"], "nobody can be left out"
        assert (details.streak.breaks, details.streak.broken_since_s) == (
            streak.breaks + 1,
            streak.broken_since_s,
        )


def test_a_step_that_all_commit_forgives_what_broke_before() -> None:
    world = replace(FRESH, streak=Streak(breaks=50, broken_since_s=100.0))
    stepping = with_state(B, B0, B1, stepped=1)
    at = {"world": world, "complaints": (complaint("a", "b"),), "time_s": 1000.0}
    _, details, _ = published(A, stepping, **at)
    assert (details.streak.breaks, details.streak.broken_since_s) == (1, 1000.0)
    _, details, _ = published(A, world=world)
    assert details.streak.breaks == 50, "a lost node neither counts nor helps"
    _, details, _ = published(with_state(A, A1, lost=(A0,)), B, world=world, reports=(a_report("a", 9),))
    assert (details.streak.breaks, details.streak.failures) == (50, 1)


def test_a_job_that_left_somebody_out_and_still_gets_nowhere_counts_on() -> None:
    broken = (BrokenLink("a", "b", 990.0),)
    world = replace(FRESH, streak=Streak(breaks=2, broken_since_s=990.0), broken=broken)
    workers, details, _ = published(A, B, world=world, complaints=(complaint("a", "b"),), time_s=1000.0)
    assert (list(workers), details.streak.breaks) == (["a"], 3)


def test_nobody_reads_of_a_node_that_is_left_out_where_the_job_needs_it() -> None:
    world = replace(FRESH, broken=(BrokenLink("a", "b", 990.0),))
    at = {"world": world, "complaints": (complaint("a", "b"),), "time_s": 1000.0}
    what = "the connection between a and b broke"
    assert decided(A, B, **at)[1] == f"{what}; going on without b"
    assert decided(A, B, nnodes=(2, 2), **at)[1] == f"{what}; all nodes meet again"


def test_who_fails_while_a_world_in_place_forms_was_given_no_time_for_a_step() -> None:
    world = replace(FRESH, live=False, in_place=True, streak=Streak(failures=2))
    _, details, _ = published(with_state(A, A1, lost=(A0,)), B, world=world)
    assert details.streak.failures == 2


def test_a_restart_budget_ends_the_job_when_it_is_used_up() -> None:
    failing = with_state(A, A1, lost=(A0,))
    reports = (a_report("a", 9, signal=9),)
    world = replace(FRESH, restart_count=1)
    published(failing, B, world=FRESH, reports=reports, max_restarts=1)
    action, reason = decided(failing, B, world=world, reports=reports, max_restarts=1)
    assert isinstance(action, Finish) and action.exit_code == 128 + 9
    assert reason.endswith("after 1 of 1 restarts")


def test_who_has_finished_is_not_waited_for() -> None:
    world = replace(FRESH, live=False, in_place=True, polite=True, generation=2, acked=1)
    finished = with_state(A)
    workers, _, _ = published(finished, B, world=world, done=frozenset("a"))
    assert list(workers) == ["b"]
    newcomers = with_state(B, B0, B1, waiting=(B0, B1))
    action, _ = decided(finished, newcomers, world=world, done=frozenset("a"))
    assert action == Finish(True, None, 0), "training has ended; nobody is to begin it again"


def test_after_the_store_lost_its_data_the_workers_go_on() -> None:
    def remembering(node: Node, rank: int) -> Node:
        past = Past(generation=4, token="w4", node_rank=rank, num_nodes=2, restart_count=1, net_secret="s")
        return replace(node, record=replace(node.record, past=past, seen=4))

    workers, details, action = published(remembering(B, 0), remembering(A, 1), world=None)
    assert list(workers) == ["b", "a"]
    assert (details.fresh, action.generation, action.restart_count) == (False, 5, 1)


def test_states_come_back_from_the_store_as_they_were_written() -> None:
    failure = FailureReport(failure=a_report("a", 1).failure, retry_free=True)
    node = with_state(A, NEW, A1, waiting=(NEW,), lost=(A0,), failure=failure, steps=3, leaving=True)
    assert type(node.record).from_json(node.record.to_json()) == node.record
    streak = Streak(failures=1, first_failure=failure.failure, breaks=2, broken_since_s=3.5)
    assert Streak.of(asdict(streak)) == streak
