"""What the leader does next: a pure function from what it knows to one action and the reason for it."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from baguarun.contract import Failure
from baguarun.elastic.membership.records import Member, StopRequest
from baguarun.elastic.membership.settings import MembershipSettings
from baguarun.elastic.membership.view import CurrentWorld, Node, Report, View

FREE_RETRIES = 5
"""Times in a row that "address in use" is nobody's fault; after that it is a failure like any other."""
ROOT_CAUSE_WINDOW_S = 0.5
"""A worker killed by a signal takes its peers' connections with it; their reports may overtake its own."""


@dataclass(frozen=True)
class Wait:
    """Nothing, until something changes or the clock reads `until_s`."""

    until_s: float | None = None
    announce: bool = False
    """People on all nodes should know why."""


@dataclass(frozen=True)
class Publish:
    """A new World of these nodes, in this order."""

    generation: int
    nodes: tuple[Node, ...]
    restart_count: int
    charged: bool = False
    free_retries: int = 0


@dataclass(frozen=True)
class GoLive:
    """All members have acknowledged: workers may start."""

    generation: int


@dataclass(frozen=True)
class Check:
    """Ask every member for a sign of life: was a lost node the cause of the failure?"""

    generation: int


@dataclass(frozen=True)
class Tell:
    """Let nodes without a place know why; the `refused` must go."""

    node_ids: tuple[str, ...]
    refused: bool


@dataclass(frozen=True)
class Dismiss:
    """Ask members to leave politely: the job shall have fewer nodes."""

    node_ids: tuple[str, ...]


@dataclass(frozen=True)
class Reset:
    """What lies in the store belongs to nodes that are all gone: clear it and begin afresh."""


@dataclass(frozen=True)
class Finish:
    """The job is over."""

    success: bool
    failure: Failure | None
    exit_code: int
    stop: StopRequest | None = None
    """Whose wish that was, if somebody's."""


Action: TypeAlias = Wait | Publish | GoLive | Check | Tell | Dismiss | Reset | Finish


@dataclass(frozen=True)
class Decision:
    action: Action
    reason: str


def decide(now_s: float, view: View, settings: MembershipSettings) -> Decision:
    """The one next step. Taken and asked again, it leads in the end to `Wait` or `Finish`."""
    if view.ended_revision is not None:
        return _ended(view)
    if view.inherited and view.world is None:
        return Decision(Reset(), "the nodes that began this job are gone")
    if view.inherited and not _holders(view):
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
    if view.world is None:
        return _first_world(now_s, view, settings)
    return _next_step(now_s, view, view.world, settings)


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


def _holders(view: View) -> list[Node]:
    """Members of the current World that are here, in rank order."""
    if view.world is None:
        return []
    members = view.world.members
    return [view.nodes[m.node_id] for m in members if _holds(view, m.node_id, m.create_revision)]


def _newcomers(view: View, holders: Iterable[Node]) -> list[Node]:
    known = {node.node_id for node in holders} | view.strangers | view.dismissed
    return rank_order(node for node_id, node in view.nodes.items() if node_id not in known)


def _publish(
    view: View,
    nodes: list[Node],
    restart_count: int,
    reason: str,
    *,
    charged: bool = False,
    free_retries: int = 0,
) -> Decision:
    seen = max((node.record.seen for node in view.nodes.values()), default=0)
    generation = max(seen, view.world.generation if view.world else 0) + 1
    chosen = tuple(nodes[: view.places])
    return Decision(Publish(generation, chosen, restart_count, charged, free_retries), reason)


def _first_world(now_s: float, view: View, settings: MembershipSettings) -> Decision:
    here = len(view.nodes) - len(view.strangers)
    if here < view.spec.min_nodes:
        return _too_few(now_s, view, here, settings)
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
    if _any_past(view):
        return _restore(view)
    return _publish(
        view,
        _newcomers(view, ()),
        0,
        "all nodes are here" if here >= view.places else f"{here} nodes are here",
    )


def _any_past(view: View) -> bool:
    return any(node.record.past is not None for node in view.nodes.values())


def _restore(view: View) -> Decision:
    """A World out of what the agents remember, after the store lost its data."""
    old: list[tuple[int, int, Node]] = []
    restart_count = 0
    for node_id, node in view.nodes.items():
        past = node.record.past
        if past is not None and node_id not in view.strangers:
            old.append((-past.generation, past.node_rank, node))
            restart_count = max(restart_count, past.restart_count)
    survivors = [node for _, _, node in sorted(old, key=lambda item: item[:2])]
    nodes = survivors + _newcomers(view, survivors)
    reason = "the store lost the job's data; its nodes have registered again"
    return _publish(view, nodes, restart_count, reason)


def _too_few(now_s: float, view: View, here: int, settings: MembershipSettings) -> Decision:
    until_s = view.short_s + settings.join_timeout_s
    state = f"{here} of {view.spec.min_nodes} nodes are here"
    if now_s < until_s:
        return Decision(Wait(until_s, True), state)
    return Decision(Finish(False, None, 1), f"{state} after waiting {settings.join_timeout_s:g} s")


def _next_step(now_s: float, view: View, world: CurrentWorld, settings: MembershipSettings) -> Decision:
    if world.live and all(member.node_id in view.done for member in world.members):
        return Decision(Finish(True, None, 0), "all workers have finished")
    holders = _holders(view)
    accounted = {node.node_id for node in holders} | view.done
    missing = [member for member in world.members if member.node_id not in accounted]
    staying = [node for node in holders if node.node_id not in view.dismissed]
    if len(staying) > view.places:
        return _dismiss(view, staying)
    if missing:
        return _reform(now_s, view, staying, missing, settings)
    if view.reports:
        return _failed(now_s, view, staying, settings)
    if not world.live:
        if world.acked >= len(world.members):
            return Decision(GoLive(world.generation), f"all nodes are ready for World {world.generation}")
        # No count here: the reason would change, and be logged, with every node.
        return Decision(Wait(), f"waiting until all nodes are ready for World {world.generation}")
    return _welcome(now_s, view, staying, settings)


def _dismiss(view: View, staying: list[Node]) -> Decision:
    """More members than the job shall have: the youngest go."""
    by_age = sorted(staying, key=lambda node: node.create_revision)
    going = by_age[view.places :]
    names = _names(node.record.name for node in going)
    reason = f"the job is scaled to {view.places} of at most {view.spec.max_nodes} nodes; {names} must go"
    return Decision(Dismiss(tuple(node.node_id for node in going)), reason)


def _welcome(now_s: float, view: View, holders: list[Node], settings: MembershipSettings) -> Decision:
    """A World that runs well: take newcomers in if there is room."""
    assert view.world is not None
    running = f"World {view.world.generation} runs on {len(view.world.members)} nodes"
    if len(view.nodes) - len(view.strangers) - len(view.dismissed) <= len(holders):
        return Decision(Wait(), running)
    newcomers = _newcomers(view, holders)
    full = len(holders) >= view.places
    if full or view.done:
        untold = tuple(node.node_id for node in newcomers if node.node_id not in view.told)
        if untold and full and view.spec.max_nodes == 1:
            return _crowded(now_s, view, untold, settings)
        if untold:
            why = _why_full(view) if full else "the job is about to finish"
            return Decision(Tell(untold, refused=False), f"{why}; standing by")
        return Decision(Wait(), f"{running}; {len(newcomers)} stand by")
    until_s = view.newcomer_s + settings.join_settle_s
    if now_s < until_s and len(holders) + len(newcomers) < view.places:
        return Decision(Wait(until_s), f"{running}; more nodes are joining")
    names = _names(node.record.name for node in newcomers)
    return _publish(view, holders + newcomers, view.world.restart_count, f"{names} joined")


def _why_full(view: View) -> str:
    if view.places < view.spec.max_nodes:
        return f"the job is scaled to {view.places} of at most {view.spec.max_nodes} nodes"
    return f"all {view.places} places are taken (another job wants another --job-id)"


def _crowded(now_s: float, view: View, newcomers: tuple[str, ...], settings: MembershipSettings) -> Decision:
    """A job of one node has met another one: its successor, if the first is dead, else a second job."""
    until_s = view.newcomer_s + 2 * settings.detect_timeout_s
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
    lost = [member.name for member in missing if member.node_id not in view.left]
    if lost:
        until_s = view.gap_s + settings.reregister_s
        if len(lost) >= 2 and 2 * len(lost) > len(world.members):
            until_s = max(until_s, view.first_loss_s + settings.reregister_s)
        if now_s < until_s:
            gone = f"the leases of {_names(lost)} have ended"
            return Decision(Wait(until_s, True), f"{gone}; waiting for them to register again")
    nodes = holders + _newcomers(view, holders)
    if len(nodes) < view.spec.min_nodes:
        return _too_few(now_s, view, len(nodes), settings)
    until_s = view.loss_s + settings.loss_settle_s
    if len(nodes) > len(holders) and len(nodes) < view.places:
        until_s = max(until_s, view.newcomer_s + settings.join_settle_s)
    how = f"{_names(lost)} lost" if lost else f"{_names(member.name for member in missing)} left"
    if now_s < until_s:
        return Decision(Wait(until_s), how)
    refund = int(world.charged and not world.live)
    return _publish(view, nodes, world.restart_count - refund, how)


def _failed(now_s: float, view: View, holders: list[Node], settings: MembershipSettings) -> Decision:
    """A worker failed and nobody is missing (yet)."""
    world = view.world
    assert world is not None
    nodes = holders + _newcomers(view, holders)
    real = [report for report in view.reports if not report.retry_free]
    if not real and world.free_retries < FREE_RETRIES:
        retries = world.free_retries + 1
        reason = f"address in use on node {view.reports[0].failure.node}; trying another port"
        return _publish(view, nodes, world.restart_count, reason, free_retries=retries)
    first = first_failure(real or view.reports)
    summary = first.failure.summary()
    if world.restart_count < view.spec.max_restarts:
        if len(nodes) < view.spec.min_nodes:
            return _too_few(now_s, view, len(nodes), settings)
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


def _names(names: Iterable[str]) -> str:
    ordered = sorted(names)
    if len(ordered) <= 3:
        return ", ".join(ordered)
    return f"{', '.join(ordered[:2])} and {len(ordered) - 2} more"
