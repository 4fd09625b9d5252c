"""`decide` for jobs whose workers go on in the next World: who is in it, process by process.

A World consists of workers that have entered `baguarun.elastic.run`. Its members are their nodes and, without
workers, the nodes that just have none and those that leave.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field, replace

from baguarun.elastic.membership.actions import (
    Decision,
    Finish,
    GoLive,
    Halt,
    InPlace,
    Invite,
    Publish,
    Tell,
    Wait,
)
from baguarun.elastic.membership.decide import (
    DATA_LOST,
    FREE_RETRIES,
    any_past,
    await_first_nodes,
    await_return,
    crowded,
    decide_first,
    dismiss,
    first_failure,
    holders_of,
    join_names,
    judge,
    newcomers_of,
    next_generation,
    rank_order,
    remembered,
    tell_here,
    tell_missing,
    too_few,
    why_full,
)
from baguarun.elastic.membership.records import BrokenLink, Member, Process
from baguarun.elastic.membership.settings import MembershipSettings
from baguarun.elastic.membership.streak import Streak
from baguarun.elastic.membership.view import CurrentWorld, Node, View
from baguarun.errors import NO_PROGRESS_EXIT_CODE


@dataclass
class _Muster:
    """Who would be in the next World."""

    working: list[Node] = field(default_factory=list)
    """Nodes with workers: survivors in rank order, then newcomers."""
    idle: list[Node] = field(default_factory=list)
    """Members without a worker at the moment."""
    leaving: list[Node] = field(default_factory=list)
    workers: dict[str, tuple[Process, ...]] = field(default_factory=dict)
    survivors: int = 0
    newcomers: list[str] = field(default_factory=list)
    """Names of nodes with workers that are taken in."""

    def leave_out(self, node_ids: Set[str]) -> None:
        self.working = [node for node in self.working if node.node_id not in node_ids]
        self.idle = [node for node in self.idle if node.node_id not in node_ids]

    @property
    def staying(self) -> list[Node]:
        return self.working + self.idle


def decide_in_place(now_s: float, view: View, settings: MembershipSettings) -> Decision:
    """As `decide`, for `JobSpec.in_place`."""
    first = decide_first(now_s, view, settings)
    if first is not None:
        return first
    if view.world is None:
        return _first_world(now_s, view, settings)
    return _next_step(now_s, view, view.world, settings)


def awaited_nodes(view: View) -> frozenset[str]:
    """Nodes that were asked to start workers and have yet to be taken in, if there is room for them."""
    if view.world is None:
        return frozenset()
    members = {member.node_id for member in view.world.members if member.workers}
    return view.invited - members if len(members) < view.places else frozenset()


def _first_world(now_s: float, view: View, settings: MembershipSettings) -> Decision:
    here = len(view.nodes) - len(view.strangers)
    waiting = await_first_nodes(now_s, view, here, settings)
    if waiting is not None:
        return waiting
    if not any_past(view):
        return _start_afresh(view, newcomers_of(view, ()), 0, tell_here(view, here))
    nodes, restart_count = remembered(view)
    muster = _Muster()
    for node in nodes[: view.places]:
        workers = node.record.state.workers
        muster.workers[node.node_id] = workers
        (muster.working if workers else muster.idle).append(node)
    if not muster.working:
        return _start_afresh(view, nodes, restart_count, DATA_LOST)
    return _go_on(view, muster, restart_count, DATA_LOST, polite=False)


def _next_step(now_s: float, view: View, world: CurrentWorld, settings: MembershipSettings) -> Decision:
    members = [member for member in world.members if member.workers]
    if world.live and all(member.node_id in view.done for member in members):
        return Decision(Finish(True, None, 0), "all workers have finished")
    holders = holders_of(view)
    accounted = {node.node_id for node in holders} | view.done
    missing = [member for member in members if member.node_id not in accounted]
    failed = _failed_workers(view, members)
    if missing or failed:
        return _go_on_without(now_s, view, missing, failed, settings)
    if view.complaints:
        return _meet_again(now_s, view, world, settings)
    if not world.live:
        ended = sum(member.node_id in view.done for member in members)
        if ended and world.acked + ended >= len(members):
            return _go_on_without_the_done(view, world, members)
        if world.acked >= len(members):
            return Decision(GoLive(world.generation), f"all nodes are ready for World {world.generation}")
        if world.polite and _is_broken(view, world):
            reason = "a leaving worker was lost before the others had switched"
            return _go_on(view, _muster(view, world), world.restart_count, reason, polite=False)
        return Decision(Wait(), f"waiting until all nodes are ready for World {world.generation}")
    staying = [n for n in holders if not n.record.state.leaving and n.node_id not in view.dismissed]
    if len(staying) > view.places:
        return dismiss(view, staying)
    return _change_politely(now_s, view, world, staying, settings)


def _go_on_without_the_done(view: View, world: CurrentWorld, members: list[Member]) -> Decision:
    """Training came to its end on some nodes while others were to form a World with them."""
    muster = _muster(view, world)
    muster.leave_out({member.node_id for member in members if member.node_id in view.done})
    states = [node.record.state for node in muster.working]
    if all(set(state.workers) <= set(state.waiting) for state in states):
        return Decision(Finish(True, None, 0), "all workers that have trained have finished")
    reason = "training has ended on some nodes; the others go on without them"
    return _go_on(view, muster, world.restart_count, reason, polite=False)


def _failed_workers(view: View, members: list[Member]) -> list[Process]:
    failed: list[Process] = []
    for member in members:
        node = view.nodes.get(member.node_id)
        if node is not None:
            failed += set(member.workers).intersection(node.record.state.lost)
    return failed


def _is_broken(view: View, world: CurrentWorld) -> bool:
    """Whether a worker that only had to reach the boundary has failed, or its node is gone."""
    leavers = [member.node_id for member in world.members if not member.workers]
    return bool(view.reports) or any(id_ not in view.nodes and id_ not in view.left for id_ in leavers)


def _muster(view: View, world: CurrentWorld) -> _Muster:
    muster = _Muster()
    old = {member.node_id: member.workers for member in world.members}
    holders = holders_of(view)
    comers: list[Node] = []
    for node in holders:
        state = node.record.state
        survivors = tuple(process for process in old[node.node_id] if process in state.workers)
        newcomers = tuple(process for process in state.workers if process not in old[node.node_id])
        muster.workers[node.node_id] = survivors + newcomers
        if state.leaving:
            muster.leaving.append(node)
            muster.workers[node.node_id] = ()
            continue
        if survivors:
            muster.working.append(node)
        else:
            (comers if newcomers else muster.idle).append(node)
        muster.survivors += len(survivors)
        if newcomers:
            muster.newcomers.append(node.record.name)
    room = view.places - len(muster.working) - len(comers) - len(muster.idle)
    ready = [node for node in newcomers_of(view, holders) if node.record.state.workers]
    joining = [node for node in ready if not node.record.state.leaving][: max(room, 0)]
    for node in joining:
        muster.workers[node.node_id] = node.record.state.workers
        muster.newcomers.append(node.record.name)
    muster.working += rank_order(comers) + joining
    return muster


def _go_on_without(
    now_s: float, view: View, missing: list[Member], failed: list[Process], settings: MembershipSettings
) -> Decision:
    """Workers or whole nodes are lost."""
    world = view.world
    assert world is not None
    muster = _muster(view, world)
    if missing:
        waiting = await_return(now_s, view, world, holders_of(view), missing, settings)
        if waiting is not None:
            return waiting
        until_s = view.loss_s + settings.loss_settle_s
        if now_s < until_s:
            return Decision(Wait(until_s), tell_missing(view, missing))
    nodes = muster.staying
    if not muster.working:
        nodes = nodes + [n for n in newcomers_of(view, nodes) if not n.record.state.leaving]
    if len(nodes) < view.spec.min_nodes:
        if muster.leaving and world.live and not world.halted:
            # There is no commit to come to any more, and no World that would let them go.
            what = tell_missing(view, missing) if missing else "a worker failed"
            return Decision(Halt(world.generation), f"{what}; others leave, too")
        return _ask_to_join(view, nodes) or too_few(now_s, view, len(nodes), settings)
    if not failed:
        return _publish(view, muster, world.restart_count, tell_missing(view, missing))
    return _charge(view, world, muster, failed)


def _meet_again(now_s: float, view: View, world: CurrentWorld, settings: MembershipSettings) -> Decision:
    """Communication broke, and all workers are there."""
    found = judge(now_s, view, world, settings)
    if isinstance(found, Decision):
        return found
    streak = world.streak.break_off(view.time_s, has_stepped=view.has_stepped)
    verdict = streak.broken_verdict(view.time_s, settings.broken_s)
    if verdict:
        reason = f"{verdict}; {_last_complaint(view, world)}"
        return Decision(Finish(False, None, NO_PROGRESS_EXIT_CODE), reason)
    muster = _muster(view, world)
    if len(muster.staying) < view.spec.min_nodes:
        reason = "communication broke while nodes leave, and too few are left to go on"
        can_halt = world.live and not world.halted
        return Decision(Halt(world.generation) if can_halt else Wait(), reason)
    if len(muster.staying) - len(found.leave_out) < view.spec.min_nodes:
        found = replace(found, leave_out=frozenset())
    muster.leave_out(found.leave_out)
    count, reason, broken = world.restart_count, found.reason, found.broken
    if not muster.working:
        return _start_afresh(view, muster.idle, count, reason, streak=streak, broken=broken)
    return _go_on(view, muster, count, reason, polite=False, streak=streak, broken=broken)


def _last_complaint(view: View, world: CurrentWorld) -> str:
    """What was said first when communication broke in this World, and what to do about it."""
    first = min(view.complaints, key=lambda complaint: complaint.seen_s)
    names = {member.node_id: member.name for member in world.members}
    return (
        f"the last time on node {names.get(first.node_id, first.node_id)}: {first.reason}. Look for a "
        "collective that not all ranks call, a group that the script made in an earlier World, or a network "
        "that lets nothing through"
    )


def _charge(view: View, world: CurrentWorld, muster: _Muster, failed: list[Process]) -> Decision:
    """Workers have failed: end the job if that leads nowhere, else go on without them."""
    real = [report for report in view.reports if not report.retry_free]
    fresh = not world.in_place and not muster.working
    if view.reports and not real and fresh and world.free_retries < FREE_RETRIES:
        reason = f"address in use on node {view.reports[0].failure.node}; trying another port"
        nodes = muster.staying
        retries = world.free_retries + 1
        return _start_afresh(view, nodes, world.restart_count, reason, free_retries=retries)
    failure = first_failure(real or view.reports).failure if view.reports else None
    summary = failure.summary() if failure else "a worker failed"
    # Who is lost while a World in place is still forming was not given the time for a step.
    had_time = world.live or not world.in_place
    streak = world.streak.fail(failure, has_stepped=view.has_stepped, had_time=had_time)
    if not muster.working:
        streak = streak.restart(view.steps)
    if streak.verdict:
        reason = f"{streak.verdict} (the last: {summary}; the first follows)"
        return Decision(Finish(False, streak.first_failure, NO_PROGRESS_EXIT_CODE), reason)
    count = world.restart_count + len(failed)
    if count > view.spec.max_restarts:
        reason = f"{summary}, after {world.restart_count} of {view.spec.max_restarts} restarts"
        return Decision(Finish(False, failure, failure.process_exit_code if failure else 1), reason)
    return _publish(view, muster, count, summary, streak)


def _change_politely(
    now_s: float, view: View, world: CurrentWorld, staying: list[Node], settings: MembershipSettings
) -> Decision:
    """A World that runs well: let go who leaves, take in who came."""
    muster = _muster(view, world)
    running = f"World {world.generation} runs with {sum(len(m.workers) for m in world.members)} workers"
    if view.done:
        return Decision(Wait(), "the job is about to finish")
    if _is_starting(view, world):
        running = f"{running}; not all of them have entered baguarun.elastic.run yet"
        return _refuse_or_wait(now_s, view, staying, running, settings)
    had_workers = {member.node_id for member in world.members if member.workers}
    leavers = [node for node in muster.leaving if node.node_id in had_workers]
    if leavers:
        names = join_names(node.record.name for node in leavers)
        if muster.survivors and len(muster.staying) >= view.spec.min_nodes:
            return _go_on(view, muster, world.restart_count, f"{names} leaves", polite=True)
        reason = f"{names} leaves; too few nodes are left to go on, the workers stop at their next commit"
        return Decision(Wait() if world.halted else Halt(world.generation), reason)
    if muster.newcomers:
        until_s = view.newcomer_s + settings.newcomers_settle_s
        if now_s < until_s and any(node.record.state.arriving for node in view.nodes.values()):
            return Decision(Wait(until_s), f"{running}; more are joining")
        reason = f"new workers on {join_names(muster.newcomers)}"
        return _go_on(view, muster, world.restart_count, reason, polite=True)
    return _invite(now_s, view, staying, running, settings)


def _is_starting(view: View, world: CurrentWorld) -> bool:
    """Whether workers that were started for this World have yet to enter `baguarun.elastic.run`."""
    if world.in_place:
        return False
    return any(
        member.node_id in view.nodes
        and not set(member.workers).issubset(view.nodes[member.node_id].record.state.workers)
        for member in world.members
    )


def _invite(
    now_s: float, view: View, staying: list[Node], running: str, settings: MembershipSettings
) -> Decision:
    return _ask_to_join(view, staying) or _refuse_or_wait(now_s, view, staying, running, settings)


def _ask_to_join(view: View, staying: list[Node]) -> Decision | None:
    """Have nodes without a place start workers, as far as there is room."""
    waiting = [node for node in newcomers_of(view, holders_of(view)) if not node.record.state.leaving]
    asked = sum(node.node_id in view.invited for node in waiting)
    room = view.places - len(staying) - asked
    chosen = [node for node in waiting if node.node_id not in view.invited][: max(room, 0)]
    if not chosen:
        return None
    names = join_names(node.record.name for node in chosen)
    return Decision(Invite(tuple(node.node_id for node in chosen)), f"{names} may join")


def _refuse_or_wait(
    now_s: float, view: View, staying: list[Node], running: str, settings: MembershipSettings
) -> Decision:
    """Tell nodes for which there is no room; nothing else is to be done."""
    waiting = newcomers_of(view, holders_of(view))
    told = view.invited | view.told
    untold = tuple(node.node_id for node in waiting if node.node_id not in told)
    if untold and len(staying) >= view.places:
        if view.spec.max_nodes == 1:
            return crowded(now_s, view, untold, settings)
        return Decision(Tell(untold, refused=False), f"{why_full(view)}; standing by")
    return Decision(Wait(), running if not waiting else f"{running}; {len(waiting)} nodes are not in it")


def _publish(
    view: View, muster: _Muster, restart_count: int, how: str, streak: Streak | None = None
) -> Decision:
    """The World after a loss."""
    if muster.working:
        how_on = f"with new workers on {join_names(muster.newcomers)}" if muster.newcomers else "without"
        reason = f"{how}; going on {how_on}"
        return _go_on(view, muster, restart_count, reason, polite=False, streak=streak)
    nodes = muster.idle + newcomers_of(view, muster.idle + muster.leaving)
    how = f"{how}; no worker is left, starting all anew"
    return _start_afresh(view, nodes, restart_count, how, streak=streak)


def _go_on(
    view: View,
    muster: _Muster,
    restart_count: int,
    reason: str,
    *,
    polite: bool,
    streak: Streak | None = None,
    broken: tuple[BrokenLink, ...] | None = None,
) -> Decision:
    """A World of the workers that are there."""
    details = InPlace(
        workers=muster.workers,
        fresh=False,
        polite=polite,
        leaving=frozenset(node.node_id for node in muster.leaving),
        streak=_streak(view) if streak is None else streak,
    )
    nodes = (*muster.working, *muster.idle, *muster.leaving)
    publish = Publish(
        next_generation(view),
        nodes,
        restart_count,
        broken=_links(view) if broken is None else broken,
        in_place=details,
    )
    return Decision(publish, reason)


def _start_afresh(
    view: View,
    nodes: list[Node],
    restart_count: int,
    reason: str,
    *,
    free_retries: int = 0,
    streak: Streak | None = None,
    broken: tuple[BrokenLink, ...] | None = None,
) -> Decision:
    """A World whose workers are all started for it."""
    generation = next_generation(view)
    chosen = tuple(nodes[: view.places])
    workers = {
        node.node_id: tuple(Process(local_rank, generation) for local_rank in range(node.record.slots))
        for node in chosen
    }
    streak = _streak(view) if streak is None else streak
    details = InPlace(workers=workers, fresh=True, polite=False, streak=streak)
    publish = Publish(
        generation,
        chosen,
        restart_count,
        free_retries=free_retries,
        broken=_links(view) if broken is None else broken,
        in_place=details,
    )
    return Decision(publish, reason)


def _links(view: View) -> tuple[BrokenLink, ...]:
    return view.world.broken if view.world else ()


def _streak(view: View) -> Streak:
    """Of a World that ends without a failure."""
    return view.world.streak.go_on(has_stepped=view.has_stepped) if view.world else Streak()
