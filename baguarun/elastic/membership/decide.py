"""What the leader does next: a pure function from what it knows to one action and the reason for it."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from dataclasses import replace

from baguarun.elastic.membership.actions import (
    Check,
    Decision,
    Dismiss,
    Finish,
    GoLive,
    Publish,
    Reset,
    Tell,
    Wait,
)
from baguarun.elastic.membership.records import BrokenLink, Member
from baguarun.elastic.membership.settings import MembershipSettings
from baguarun.elastic.membership.suspicion import HELD_OFF_S, Blame, blame, held_off
from baguarun.elastic.membership.view import CurrentWorld, Node, Report, View

FREE_RETRIES = 5
"""Times in a row that "address in use" is nobody's fault; after that it is a failure like any other."""
DATA_LOST = "the store lost the job's data; its nodes have registered again"
ROOT_CAUSE_WINDOW_S = 0.5
"""A worker killed by a signal takes its peers' connections with it; their reports may overtake its own."""


def decide(now_s: float, view: View, settings: MembershipSettings) -> Decision:
    """The one next step. Taken and asked again, it leads in the end to `Wait` or `Finish`."""
    first = decide_first(now_s, view, settings)
    if first is not None:
        return first
    if view.world is None:
        return _first_world(now_s, view, settings)
    return _next_step(now_s, view, view.world, settings)


def decide_first(now_s: float, view: View, settings: MembershipSettings) -> Decision | None:
    """What comes before all else: a job that is over, or another's; None if it is neither."""
    if view.ended_revision is not None:
        return _ended(view)
    if view.inherited and view.world is None:
        return Decision(Reset(), "the nodes that began this job are gone")
    if view.inherited and not holders_of(view):
        until_s = view.took_over_s + settings.reregister_s
        if now_s < until_s:
            reason = "an unfinished run of this job is in the store; waiting for its nodes"
            return Decision(Wait(until_s, True), reason)
        return Decision(Reset(), "all nodes of the run found in the store are gone")
    strangers = view.strangers - view.told
    if strangers:
        return Decision(Tell(tuple(sorted(strangers)), refused=True), "two jobs with one id")
    if view.stop is not None:
        return Decision(Finish(False, None, view.stop.exit_code, view.stop), view.stop.reason)
    return None


def rank_order(nodes: Iterable[Node]) -> list[Node]:
    """Order of nodes that come in together: requested rank, then natural order of names, then age."""
    return sorted(nodes, key=_rank_key)


def first_failure(reports: Iterable[Report]) -> Report:
    """The root cause: the oldest report, unless a worker was killed by a signal shortly after.

    SIGABRT does not count as such: it is how collective libraries end a worker whose peer is gone.
    """
    ordered = sorted(reports, key=lambda report: report.revision)
    first = ordered[0]
    if _was_killed(first):
        return first
    for report in ordered:
        if _was_killed(report) and report.seen_s <= first.seen_s + ROOT_CAUSE_WINDOW_S:
            return report
    return first


def _was_killed(report: Report) -> bool:
    return report.failure.signal not in (None, signal.SIGABRT)


def _rank_key(node: Node) -> tuple[bool, int, list[tuple[bool, int, str]], int]:
    wanted = node.record.node_rank
    parts = [
        (part.isdigit(), int(part) if part.isdigit() else 0, part)
        for part in re.split(r"([0-9]+)", node.record.name)
    ]
    return (wanted is None, wanted or 0, parts, node.create_revision)


def _ended(view: View) -> Decision:
    assert view.ended_revision is not None
    staying = sum(node.create_revision < view.ended_revision for node in view.nodes.values())
    if staying:
        return Decision(Wait(announce=True), f"the job has ended; {staying} of its nodes are still here")
    return Decision(Reset(), "the former run of this job has ended and its nodes are gone")


def _holds(view: View, node_id: str, create_revision: int) -> bool:
    """Whether that member is here: same registration, or registered again while its workers went on."""
    node = view.nodes.get(node_id)
    if node is None or view.world is None:
        return False
    past = node.record.past
    return node.create_revision == create_revision or (past is not None and past.token == view.world.token)


def holders_of(view: View) -> list[Node]:
    """Members of the current World that are here, in rank order."""
    if view.world is None:
        return []
    members = view.world.members
    return [view.nodes[m.node_id] for m in members if _holds(view, m.node_id, m.create_revision)]


def newcomers_of(view: View, holders: Iterable[Node]) -> list[Node]:
    """Nodes that may come in besides the `holders`, in the order in which they would."""
    here = {node.node_id for node in holders}
    known = here | view.strangers | view.dismissed
    if view.world is not None and view.world.broken:
        known |= held_off(view.nodes, here, view.world.broken, view.time_s)
    return rank_order(node for node_id, node in view.nodes.items() if node_id not in known)


def _publish(
    view: View,
    nodes: list[Node],
    restart_count: int,
    reason: str,
    *,
    charged: bool = False,
    free_retries: int = 0,
    broken: tuple[BrokenLink, ...] | None = None,
) -> Decision:
    if broken is None:
        broken = view.world.broken if view.world else ()
    chosen = tuple(nodes[: view.places])
    generation = next_generation(view)
    return Decision(Publish(generation, chosen, restart_count, charged, free_retries, broken), reason)


def next_generation(view: View) -> int:
    """Above all that any node has seen, even if the store lost its data."""
    seen = max((node.record.seen for node in view.nodes.values()), default=0)
    return max(seen, view.world.generation if view.world else 0) + 1


def _first_world(now_s: float, view: View, settings: MembershipSettings) -> Decision:
    here = len(view.nodes) - len(view.strangers)
    waiting = await_first_nodes(now_s, view, here, settings)
    if waiting is not None:
        return waiting
    if any_past(view):
        nodes, restart_count = remembered(view)
        return _publish(view, nodes, restart_count, DATA_LOST)
    return _publish(view, newcomers_of(view, ()), 0, tell_here(view, here))


def tell_here(view: View, here: int) -> str:
    return "all nodes are here" if here >= view.places else f"{here} nodes are here"


def await_first_nodes(now_s: float, view: View, here: int, settings: MembershipSettings) -> Decision | None:
    """Whether a first World has to wait for more nodes than the `here` that have come; None if not."""
    if here < view.spec.min_nodes:
        return too_few(now_s, view, here, settings)
    if here < view.places:
        pasts = [node.record.past for node in view.nodes.values() if node.record.past is not None]
        if pasts:
            # The store lost its data under a running job: its nodes find out one by one.
            complete = here >= max(past.num_nodes for past in pasts)
            until_s = view.newcomer_s + settings.reregister_s
        else:
            complete = False
            until_s = view.newcomer_s + settings.first_settle_s
        if not complete and now_s < until_s:
            room = f"{view.spec.min_nodes} to {view.places}"
            return Decision(
                Wait(until_s, True), f"{here} of {room} nodes are here; waiting a moment for more"
            )
    return None


def any_past(view: View) -> bool:
    """Whether a node has run in a World that the store has no data of."""
    return any(node.record.past is not None for node in view.nodes.values())


def remembered(view: View) -> tuple[list[Node], int]:
    """After the store lost its data: nodes of the last World in rank order, then others; restarts so far."""
    old: list[tuple[int, int, Node]] = []
    restart_count = 0
    for node_id, node in view.nodes.items():
        past = node.record.past
        if past is not None and node_id not in view.strangers:
            old.append((-past.generation, past.node_rank, node))
            restart_count = max(restart_count, past.restart_count)
    survivors = [node for _, _, node in sorted(old, key=lambda item: item[:2])]
    return survivors + newcomers_of(view, survivors), restart_count


def too_few(now_s: float, view: View, here: int, settings: MembershipSettings) -> Decision:
    until_s = view.short_s + settings.join_timeout_s
    state = f"{here} of {view.spec.min_nodes} nodes are here"
    if now_s < until_s:
        return Decision(Wait(until_s, True), state)
    return Decision(Finish(False, None, 1), f"{state} after waiting {settings.join_timeout_s:g} s")


def _next_step(now_s: float, view: View, world: CurrentWorld, settings: MembershipSettings) -> Decision:
    if world.live and all(member.node_id in view.done for member in world.members):
        return Decision(Finish(True, None, 0), "all workers have finished")
    holders = holders_of(view)
    accounted = {node.node_id for node in holders} | view.done
    missing = [member for member in world.members if member.node_id not in accounted]
    staying = [node for node in holders if node.node_id not in view.dismissed]
    if len(staying) > view.places:
        return dismiss(view, staying)
    if missing:
        return _reform(now_s, view, staying, missing, settings)
    if view.reports:
        return _failed(now_s, view, staying, settings)
    if view.complaints:
        return _suspected(now_s, view, world, staying, settings)
    if not world.live:
        if world.acked >= len(world.members):
            return Decision(GoLive(world.generation), f"all nodes are ready for World {world.generation}")
        # No count here: the reason would change, and be logged, with every node.
        return Decision(Wait(), f"waiting until all nodes are ready for World {world.generation}")
    return _welcome(now_s, view, staying, settings)


def dismiss(view: View, staying: list[Node]) -> Decision:
    """More members than the job shall have: the youngest go."""
    by_age = sorted(staying, key=lambda node: node.create_revision)
    going = by_age[view.places :]
    names = join_names(node.record.name for node in going)
    reason = f"the job is scaled to {view.places} of at most {view.spec.max_nodes} nodes; {names} must go"
    return Decision(Dismiss(tuple(node.node_id for node in going)), reason)


def _welcome(now_s: float, view: View, holders: list[Node], settings: MembershipSettings) -> Decision:
    """A World that runs well: take newcomers in if there is room."""
    assert view.world is not None
    running = f"World {view.world.generation} runs on {len(view.world.members)} nodes"
    if len(view.nodes) - len(view.strangers) - len(view.dismissed) <= len(holders):
        return Decision(Wait(), running)
    newcomers = newcomers_of(view, holders)
    if not newcomers:
        return Decision(Wait(now_s + HELD_OFF_S / 10), f"{running}; others cannot reach all of them")
    full = len(holders) >= view.places
    if full or view.done:
        untold = tuple(node.node_id for node in newcomers if node.node_id not in view.told)
        if untold and full and view.spec.max_nodes == 1:
            return crowded(now_s, view, untold, settings)
        if untold:
            why = why_full(view) if full else "the job is about to finish"
            return Decision(Tell(untold, refused=False), f"{why}; standing by")
        return Decision(Wait(), f"{running}; {len(newcomers)} stand by")
    until_s = view.newcomer_s + settings.join_settle_s
    if now_s < until_s and len(holders) + len(newcomers) < view.places:
        return Decision(Wait(until_s), f"{running}; more nodes are joining")
    names = join_names(node.record.name for node in newcomers)
    return _publish(view, holders + newcomers, view.world.restart_count, f"{names} joined")


def why_full(view: View) -> str:
    if view.places < view.spec.max_nodes:
        return f"the job is scaled to {view.places} of at most {view.spec.max_nodes} nodes"
    return f"all {view.places} places are taken (another job wants another --job-id)"


def crowded(now_s: float, view: View, newcomers: tuple[str, ...], settings: MembershipSettings) -> Decision:
    """A job of one node has met another one: its successor, if the first is dead, else a second job."""
    until_s = view.newcomer_s + settings.crowded_s
    if now_s < until_s:
        return Decision(Wait(until_s), "another node wants the job's one place; is its holder alive?")
    why = "runs already on the one node that --nnodes 1 allows"
    remedy = "choose another --job-id, or --nnodes 1:2 for a second node"
    return Decision(Tell(newcomers, refused=True), f"job {view.spec.job_id!r} {why}; {remedy}")


def _reform(
    now_s: float, view: View, holders: list[Node], missing: list[Member], settings: MembershipSettings
) -> Decision:
    """Members are gone: go on without them, unless they may only have lost their lease."""
    world = view.world
    assert world is not None
    waiting = await_return(now_s, view, world, holders, missing, settings)
    if waiting is not None:
        return waiting
    nodes = holders + newcomers_of(view, holders)
    if len(nodes) < view.spec.min_nodes:
        return too_few(now_s, view, len(nodes), settings)
    until_s = view.loss_s + settings.loss_settle_s
    if len(nodes) > len(holders) and len(nodes) < view.places:
        until_s = max(until_s, view.newcomer_s + settings.join_settle_s)
    how = tell_missing(view, missing)
    if now_s < until_s:
        return Decision(Wait(until_s), how)
    refund = int(world.charged and not world.live)
    return _publish(view, nodes, world.restart_count - refund, how)


def await_return(
    now_s: float,
    view: View,
    world: CurrentWorld,
    holders: list[Node],
    missing: list[Member],
    settings: MembershipSettings,
) -> Decision | None:
    """Whether it is not certain yet who is lost, and that is waited for; None if it is."""
    lost = [member.name for member in missing if member.node_id not in view.left]
    # Those that nobody hears are gone; the store's own troubles end leases only.
    if any(member.node_id not in view.left | view.silent for member in missing):
        until_s = view.gap_s + settings.reregister_s
        if len(lost) >= 2 and 2 * len(lost) > len(world.members):
            until_s = max(until_s, view.first_loss_s + settings.reregister_s)
        if now_s < until_s:
            gone = f"the leases of {join_names(lost)} have ended"
            return Decision(Wait(until_s, True), f"{gone}; waiting for them to register again")
    doubtful = [node.record.name for node in holders if node.node_id in view.silent]
    if doubtful and any(member.node_id in view.silent for member in missing):
        reason = f"{join_names(lost)} lost; making sure that {join_names(doubtful)} are not"
        return Decision(Wait(), reason)
    return None


def tell_missing(view: View, missing: list[Member]) -> str:
    """`n1, n2 lost` or `n3 left`"""
    lost = [member.name for member in missing if member.node_id not in view.left]
    if lost:
        return f"{join_names(lost)} lost"
    return f"{join_names(member.name for member in missing)} left"


def _suspected(
    now_s: float, view: View, world: CurrentWorld, staying: list[Node], settings: MembershipSettings
) -> Decision:
    """Workers' communication broke, and all nodes are here: meet again, at the second time without one."""
    found = judge(now_s, view, world, settings)
    if isinstance(found, Decision):
        return found
    nodes = [node for node in staying if node.node_id not in found.leave_out]
    if len(nodes) < view.spec.min_nodes:
        nodes, found = staying, replace(found, leave_out=frozenset())
    return _publish(view, nodes, world.restart_count, found.reason, broken=found.broken)


def judge(now_s: float, view: View, world: CurrentWorld, settings: MembershipSettings) -> Decision | Blame:
    """Whom the complaints of workers leave out of the next World, or that more of them are waited for."""
    until_s = min(
        complaint.seen_s + (settings.silence_settle_s if complaint.silence else settings.complaints_settle_s)
        for complaint in view.complaints
    )
    if now_s < until_s:
        return Decision(Wait(until_s), "communication broke; waiting a moment for who else complains")
    members = [member.node_id for member in world.members]
    return blame(view.complaints, members, world.broken, view.silent | view.unheard, view.time_s)


def _failed(now_s: float, view: View, holders: list[Node], settings: MembershipSettings) -> Decision:
    """A worker failed and nobody is missing (yet)."""
    world = view.world
    assert world is not None
    nodes = holders + newcomers_of(view, holders)
    real = [report for report in view.reports if not report.retry_free]
    if not real and world.free_retries < FREE_RETRIES:
        retries = world.free_retries + 1
        reason = f"address in use on node {view.reports[0].failure.node}; trying another port"
        return _publish(view, nodes, world.restart_count, reason, free_retries=retries)
    first = first_failure(real or view.reports)
    summary = first.failure.summary()
    if world.restart_count < view.spec.max_restarts:
        if len(nodes) < view.spec.min_nodes:
            return too_few(now_s, view, len(nodes), settings)
        count = world.restart_count + 1
        reason = f"{summary}; restart {count} of {view.spec.max_restarts}"
        return _publish(view, nodes, count, reason, charged=True)
    return _verdict(now_s, view, first, len(holders), settings)


def _verdict(now_s: float, view: View, first: Report, here: int, settings: MembershipSettings) -> Decision:
    """No restart is left: the job has failed, unless a lost node turns out to be the cause."""
    world = view.world
    assert world is not None
    finish = Decision(
        Finish(False, first.failure, first.failure.process_exit_code),
        f"{first.failure.summary()}, after {world.restart_count} of {view.spec.max_restarts} restarts",
    )
    reported = {report.node_id for report in view.reports} | view.done
    until_s = first.seen_s + settings.verdict_s
    if now_s >= until_s or all(member.node_id in reported for member in world.members):
        return finish
    waiting = f"{first.failure.summary()}; making sure that no node is lost"
    if world.checked is None:
        return Decision(Check(world.generation), waiting)
    if world.checked >= here:
        until_s = min(until_s, first.seen_s + ROOT_CAUSE_WINDOW_S)
        if now_s >= until_s:
            return finish
    return Decision(Wait(until_s), waiting)


def join_names(names: Iterable[str]) -> str:
    ordered = sorted(names)
    if len(ordered) <= 3:
        return ", ".join(ordered)
    return f"{', '.join(ordered[:2])} and {len(ordered) - 2} more"
