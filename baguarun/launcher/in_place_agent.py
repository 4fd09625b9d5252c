"""One node of a job whose workers go on in the next World: what each of them is told, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from baguarun.contract import ControlMessage, Topic, World
from baguarun.elastic.membership.events import Finished, Halted, Invited, Prepare
from baguarun.elastic.membership.records import FailureReport, InPlaceState, Process
from baguarun.elastic.membership.session import Session
from baguarun.launcher.addresses import free_port
from baguarun.launcher.agent import NodeAgent
from baguarun.launcher.crew import Crew, Worker
from baguarun.launcher.hang_watch import HangSettings, HangWatch
from baguarun.launcher.meeting import Meeting
from baguarun.launcher.metrics import AgentStatus
from baguarun.launcher.newcomers import Newcomers
from baguarun.launcher.paces import Paces
from baguarun.launcher.pings import Pings
from baguarun.launcher.workers import says_port_in_use

_NO_SURVIVOR_S = 1.0
"""Where no local worker can say that the World makes progress: after this a lost one is replaced."""
_PACES_EVERY_S = 10.0
"""Between two words to the store about how steps go."""
_COMMIT_PART = 2 / 3
"""Of the time to stop: for coming to a commit and writing a checkpoint there. The rest is for SIGTERM."""
_QUIET_S = 2.0
"""A leave that takes longer is explained."""


@dataclass(frozen=True, kw_only=True)
class InPlaceSettings:
    slots: int
    spares: int
    """Workers beyond `slots` that wait to take the place of a lost one."""
    detect_timeout_s: float
    """A worker whose control thread is silent for so long is killed."""
    shutdown_timeout_s: float
    node: str
    """Its name."""
    hangs: HangSettings


class InPlaceAgent(NodeAgent):
    """Threads: one event loop."""

    def __init__(
        self, crew: Crew, status: AgentStatus, say: Callable[[str], None], settings: InPlaceSettings
    ) -> None:
        super().__init__(crew, status, say, shutdown_timeout_s=settings.shutdown_timeout_s)
        self._crew = crew
        self._settings = settings
        self._hangs = HangWatch(crew, settings.node, say, settings.hangs)
        self._paces = Paces()
        self._session: Session
        self._place_in: Prepare | None = None
        """The newest World that we are a member of, live or not."""
        self._world: World | None = None
        """The same, once it is live."""
        self._acknowledged = 0
        self._secret = ""
        self._may_start_newcomers = False
        self._newcomers = Newcomers(
            crew,
            settings.slots + settings.spares,
            may_start=lambda: not (self._done or self._going or self._leaving),
            place=lambda: (self._place_in.generation if self._place_in else 0, self._secret),
            spawn=self._spawn,
        )
        self._pings = Pings(
            crew,
            self._hangs,
            say,
            detect_timeout_s=settings.detect_timeout_s,
            news=self._news,
            # Who halts may be writing for long, and has a time of its own for it.
            may_hang=lambda: self._halted is None,
        )
        self._done = False
        """A worker has finished its training: nobody is replaced any more."""
        self._going = False
        self._waited_s = 0.0
        """Of the time to stop, what has gone by."""
        self._halted: Halted | None = None
        """Our workers were told to stop at a commit; until there is another World."""
        self._lost: tuple[Process, ...] = ()
        self._steps = 0
        self._stepped = 0
        """Newest generation in which one of our workers has committed a step."""
        self._state = InPlaceState()
        self._failures: dict[Process, FailureReport] = {}
        """Of workers that the newest World counted on."""
        self._changed = asyncio.Event()
        self._empty = asyncio.Event()
        crew.on_message = self._hear
        crew.on_end = self._see_end

    def _own_work(self, session: Session) -> tuple[Coroutine[Any, Any, None], ...]:
        self._session = session
        return self._tell_state(session), self._pings.run(), self._tell_paces(session)

    # -- what membership says

    async def _prepare(self, session: Session, event: Prepare) -> None:
        self._place_in, self._world, self._secret = event, None, event.net_secret
        self._halted = None
        self._may_start_newcomers = False
        self._newcomers.stop()
        if event.in_place:
            await self._tell_workers(event)
        else:
            await self._stop_workers(self._shutdown_timeout_s)
            self._spawn(session.acknowledge(event.generation, free_port()))
        self._failures = {p: report for p, report in self._failures.items() if p in event.workers}
        self._lost = tuple(p for p in event.workers if event.in_place and p not in self._crew.living)
        self._update()
        self._acknowledge_if_ready()

    async def _tell_workers(self, event: Prepare) -> None:
        for worker in tuple(self._crew.living.values()):
            if worker.id in event.workers:
                if worker.generation and worker.port is None:
                    topic = Topic.SWITCH if event.polite else Topic.ABORT
                    worker.tell(topic, event.generation, event.reason)
                    if topic is Topic.ABORT:
                        self._hangs.told_to_stop(worker)
            elif worker.generation and event.leaving:
                if not event.polite:
                    # There is no boundary to come to any more; LEAVE alone ends nothing that is under way.
                    worker.tell(Topic.ABORT, event.generation, event.reason)
                    self._hangs.told_to_stop(worker)
                worker.tell(Topic.LEAVE, event.generation, event.reason)
            elif worker.generation:
                # It had not entered yet, so the World was formed without it.
                worker.unwanted = True
                await self._crew.kill(worker)

    async def _start(self, session: Session, world: World) -> None:
        place = self._place_in
        assert place is not None
        self._world = world
        if world.in_place:
            for process in place.workers:
                if process in self._crew.living:
                    self._crew.living[process].enter(world)
        else:
            await self._crew.start_fresh(world, place.workers)
        self._may_start_newcomers = True
        self._update()
        if not place.workers:
            self._newcomers.fill_later(_NO_SURVIVOR_S)

    async def _accept(self, event: Invited) -> None:
        self._secret = event.net_secret
        self._may_start_newcomers = True
        self._newcomers.fill_later()

    def _lose_place(self) -> None:
        self._place_in = self._world = None
        self._may_start_newcomers = False
        self._newcomers.stop()
        self._lost, self._failures = (), {}
        self._update()

    def _forget_workers(self) -> None:
        self._newcomers.stop()

    def _acknowledge_if_ready(self) -> None:
        place = self._place_in
        if place is None or not place.in_place or not place.workers:
            return
        if self._acknowledged == place.generation:
            return
        workers = [self._crew.living.get(process) for process in place.workers]
        if all(worker is not None and worker.port is not None for worker in workers):
            self._acknowledged = place.generation
            assert workers[0] is not None
            self._spawn(self._session.acknowledge(place.generation, workers[0].port))

    # -- what workers say

    def _hear(self, worker: Worker, message: ControlMessage) -> None:
        body = message.body
        self._hangs.hear(worker, message)
        match message.topic:
            case Topic.READY:
                if body["generation"] == worker.generation or worker.told > worker.generation:
                    worker.port = body["port"]
                worker.count_steps(body["steps"])
                self._enter(worker)
                self._acknowledge_if_ready()
            case Topic.ARRIVED:
                worker.arrived = True
                self._update()
            case Topic.PROGRESS:
                self._paces.progressed(worker.id, body)
                self._enter(worker)
                worker.finished |= bool(body.get("ends"))
                if body.get("begins"):
                    # Of a newcomer: those that the others have made.
                    worker.steps = body["steps"]
                self._note_progress(worker, body["generation"], body["steps"])
            case Topic.SUSPECT:
                self._suspect(body)
            case Topic.PONG:
                if body.get("steps", 0) > worker.steps:
                    self._paces.progressed(worker.id, body)
                    self._note_progress(worker, body["generation"], body["steps"])
            case Topic.WORLD | Topic.ABORT | Topic.SWITCH | Topic.LEAVE | Topic.PING:
                self._say(f"baguarun: rank {worker.rank} sent {message.topic.name}, which only agents send")

    def _enter(self, worker: Worker) -> None:
        if not worker.entered:
            worker.entered = True
            self._update()

    def _note_progress(self, worker: Worker, generation: int, steps: int) -> None:
        self._steps = max(self._steps, steps)
        has_stepped = worker.count_steps(steps)
        world = self._world
        if not has_stepped or world is None or generation != world.generation:
            return
        self._stepped = generation
        if self._may_start_newcomers:
            self._may_start_newcomers = False
            self._newcomers.fill_later()
            # One node tells for all that this World gets on.
            if world.node_rank == 0:
                self._update(tell_steps=True)

    def _suspect(self, body: Any) -> None:
        self._say(f"baguarun: generation {body['generation']}: communication broke: {body['reason']}")
        generation, rank, reason = body["generation"], body["rank"], body["reason"]
        self._spawn(self._session.report_suspicion(generation, rank, reason, silence=body["silence"]))

    def _see_end(self, worker: Worker) -> None:
        self._hangs.forget(worker)
        self._paces.forget(worker.id)
        if not self._crew.living:
            self._empty.set()
        if error := worker.process.exited.exception():
            if not self._broken.done():
                self._broken.set_exception(error)
        elif not worker.unwanted:
            self._spawn(self._take_leave_of(worker))
        else:
            self._update()
            self._report_done_if_all_ended()
            if self._world is not None and not self._may_start_newcomers:
                self._newcomers.fill_later()

    async def _take_leave_of(self, worker: Worker) -> None:
        """A worker has ended by itself, or was killed by others."""
        if worker.exit.exit_code == 0:
            await self._see_done(worker)
            return
        must_wait = self._newcomers.failed(worker)
        generation = self._place_in.generation if self._place_in else worker.generation
        failure = await self._crew.failure_of(worker, generation)
        self._say(f"baguarun: {failure.summary()}")
        if must_wait:
            why = failure.message.splitlines()[0] if failure.message else failure.how
            self._say(f"baguarun: {self._newcomers.describe(worker.id.local_rank, why)}")
        place, world = self._place_in, self._world
        is_member = place is not None and worker.id in place.workers
        if is_member or worker.generation:
            # A leaver's, too: the others may be waiting for it.
            self._failure = failure
            retry_free = (
                world is not None
                and not world.in_place
                and worker.rank == 0
                and says_port_in_use(worker.log, world.master_port)
            )
            self._failures[worker.id] = FailureReport(failure=failure, retry_free=retry_free)
        if is_member:
            self._lost = tuple({*self._lost, worker.id})
        self._update()
        if is_member:
            return
        if place is None or (world is not None and not self._may_start_newcomers):
            self._newcomers.fill_later()
        elif world is not None and not place.workers:
            self._newcomers.fill_later(_NO_SURVIVOR_S)

    async def _see_done(self, worker: Worker) -> None:
        place = self._place_in
        if place is None or place.leaving or (self._halted is not None and not worker.finished):
            self._update()
            return
        if not worker.entered:
            self._say(
                f"baguarun: rank {worker.rank} has ended without calling baguarun.elastic.run: "
                "a script that never does is not resized in place"
            )
        self._done = True
        self._newcomers.stop()
        await self._newcomers.kill()
        self._update()
        self._report_done_if_all_ended()

    def _report_done_if_all_ended(self) -> None:
        place = self._place_in
        if place is None or not self._done or not place.workers:
            return
        if not any(process in self._crew.living or process in self._lost for process in place.workers):
            self._status.workers_running = 0
            self._spawn(self._session.report_done(place.generation))

    # -- what the others are told

    def _update(self, *, tell_steps: bool = False) -> None:
        self._status.workers_running = len(self._crew.living)
        workers = self._offered()
        arriving = sum(worker.arrived and not worker.entered for worker in self._crew.living.values())
        state = InPlaceState(
            workers=workers,
            waiting=tuple(p for p in workers if not self._crew.living[p].generation),
            arriving=min(arriving, self._settings.slots - len(workers)),
            lost=self._lost,
            failure=self._first_failure(),
            steps=self._state.steps,
            stepped=self._state.stepped,
            leaving=self._going,
        )
        if state != self._state or tell_steps:
            self._state = replace(state, steps=self._steps, stepped=self._stepped)
            self._changed.set()

    def _first_failure(self) -> FailureReport | None:
        """As one of the newest World, even if it happened while that was being formed."""
        report = next(iter(self._failures.values()), None)
        if report is None or self._place_in is None:
            return None
        failure = replace(report.failure, generation=self._place_in.generation)
        return replace(report, failure=failure)

    def _offered(self) -> tuple[Process, ...]:
        """Those of the World first; spares only in place of others."""
        place = self._place_in.workers if self._place_in else ()
        entered = [worker.id for worker in self._crew.living.values() if worker.entered]
        entered.sort(key=lambda process: (process not in place, process.local_rank))
        return tuple(sorted(entered[: self._settings.slots]))

    async def _tell_state(self, session: Session) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await session.report_state(self._state)

    async def _tell_paces(self, session: Session) -> None:
        while True:
            await asyncio.sleep(_PACES_EVERY_S)
            workers = [worker for worker in self._crew.living.values() if worker.generation]
            found = (self._paces.of(w.id, w.rank, w.generation) for w in workers)
            await session.report_paces([pace for pace in found if pace is not None])
            if self._world is not None and self._world.node_rank == 0:
                # One node tells for all.
                for pace in self._paces.new_stragglers(await session.read_paces()):
                    self._say(
                        f"baguarun: rank {pace.rank} is a straggler: busy for {pace.busy_s:.3g} s of each "
                        "step, more than 1.5 times as long as most"
                    )

    def _news(self) -> dict[str, Any]:
        """What workers are told with every PING."""
        session = self._session
        # A job that is over goes on nowhere, though our lease in it has ended.
        lease_s = self._shutdown_timeout_s if self._finished is not None else session.lease_left_s
        return {"lease_ms": int(1000 * lease_s), "newcomers": session.expects_newcomers()}

    # -- leaving

    async def _leave(self, session: Session, meeting: Meeting, why: str, signals: asyncio.Queue[int]) -> None:
        if self._can_come_to_a_commit():
            again = asyncio.create_task(signals.get())
            await self._leave_at_boundary(why, again)
            if again.done():
                signals.put_nowait(again.result())
            again.cancel()
        await super()._leave(session, meeting, why, signals)

    async def _end_workers(self, event: Finished) -> None:
        """All agents see this end after the same World: what they tell their workers is the same, too."""
        place, has_time = self._place_in, event.stopped and not event.at_once
        if has_time and place is not None and self._can_come_to_a_commit():
            self._halted = Halted(place.generation + 1, event.reason)
            hurry = asyncio.create_task(self._hurry.wait())
            await self._leave_at_boundary(event.reason, hurry)
            hurry.cancel()
        await super()._end_workers(event)

    async def _halt(self, event: Halted) -> None:
        self._halted = event
        if not self._going:
            self._say(f"baguarun: {event.reason}")
        self._tell_halt(event)

    def _tell_halt(self, halted: Halted) -> None:
        topic = Topic.LEAVE if self._going else Topic.SWITCH
        for worker in self._crew.living.values():
            if worker.generation:
                worker.tell(topic, halted.generation, halted.reason, halts=True)

    def _can_come_to_a_commit(self) -> bool:
        """Whether our workers train in `baguarun.elastic.run`, all of them."""
        workers = [worker for worker in self._crew.living.values() if worker.generation]
        return bool(workers) and all(worker.entered and not worker.finished for worker in workers)

    async def _leave_at_boundary(self, why: str, interrupted: asyncio.Task[Any]) -> None:
        """Have our workers finish their step and go, whether or not others go on. Returns when they have,
        when `interrupted`, or when they have had the time that workers get to stop."""
        if not self._going:
            self._say(f"baguarun: {why}: leaving after the present step (a signal: stop the workers at once)")
        self._going = True
        began_s = asyncio.get_running_loop().time()
        self._newcomers.stop()
        await self._newcomers.kill()
        if self._crew.living:
            # Who ended while the newcomers were killed has set it.
            self._empty.clear()
        self._update()
        if self._halted is not None:
            self._tell_halt(self._halted)
        gone = asyncio.create_task(self._empty.wait())
        quiet_s = min(self._settings.detect_timeout_s, _QUIET_S)
        telling = asyncio.get_running_loop().call_later(quiet_s, self._tell_what_is_waited_for)
        try:
            bound_s = _COMMIT_PART * self._shutdown_timeout_s
            await asyncio.wait((gone, interrupted), timeout=bound_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._waited_s = asyncio.get_running_loop().time() - began_s
            telling.cancel()
            gone.cancel()

    async def _stop_workers(self, grace_s: float) -> None:
        await super()._stop_workers(max(grace_s - self._waited_s, 0.0))
        # Whoever waits for them to go.
        self._empty.set()

    def _tell_what_is_waited_for(self) -> None:
        place = self._place_in
        if self._halted is not None or (place is not None and place.leaving):
            ranks = sorted(worker.rank for worker in self._crew.living.values() if worker.generation)
            what = f"rank {', '.join(map(str, ranks))} to come to a commit and end"
        elif self._store_lost:
            what = "the store to answer"
        elif self._world is not None and self._world.num_nodes > 1:
            what = "the other nodes to let this one go"
        else:
            what = "the job to let its workers go"
        self._say(
            f"baguarun: waiting for {what}, for {_COMMIT_PART * self._shutdown_timeout_s:.3g} s in all; "
            "after that the workers are stopped wherever they are"
        )
