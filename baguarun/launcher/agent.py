"""One node's part in a job: turns what membership says into workers started and stopped, and back.

The loop is thin. What the job should do next is decided in `elastic.membership`; how processes are started,
stopped and read is in `workers`, `keeper` and `logs`. Nothing here blocks the event loop.
"""

from __future__ import annotations

import asyncio
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any

from baguarun.contract import Failure, World
from baguarun.elastic.membership.events import (
    Dismissed,
    Expelled,
    Finished,
    Halted,
    Invited,
    MembershipEvent,
    Prepare,
    Start,
    StoreBack,
    StoreLost,
    Waiting,
)
from baguarun.elastic.membership.session import Session
from baguarun.errors import JobFailedError
from baguarun.launcher.addresses import free_port
from baguarun.launcher.local_workers import LocalWorkers, StoppableWorkers
from baguarun.launcher.meeting import Meeting
from baguarun.launcher.metrics import AgentStatus

_GIVE_UP_S = 60.0
"""A node without workers and without a store has nothing left to wait for after this."""
_FOR_EVER_S = 1e9
_ALONE_S = 10.0
"""How long the node that serves the store waits for the others to read the outcome."""


class JobOverError(JobFailedError):
    """The job ended without success; `failure` is what every agent prints last, if a worker was the cause."""

    def __init__(self, finished: Finished) -> None:
        super().__init__(finished.reason, finished.exit_code)
        self.failure: Failure | None = finished.failure
        self.stopped = finished.stopped
        """Nothing failed: somebody ended the job on purpose."""


class NodeAgent(ABC):
    """One node of a job that meets in a store. Threads: one event loop."""

    def __init__(
        self,
        workers: StoppableWorkers,
        status: AgentStatus,
        say: Callable[[str], None],
        *,
        shutdown_timeout_s: float,
    ) -> None:
        self._workers = workers
        self._status = status
        self._say = say
        self._shutdown_timeout_s = shutdown_timeout_s
        self._broken: asyncio.Future[None]
        self._tasks: set[asyncio.Task[None]] = set()
        self._store_lost = False
        self._finished: Finished | None = None
        self._place = ""
        self._leaving = False
        self._dismissed: asyncio.Future[str]
        self._hurry = asyncio.Event()
        """Set when nobody wants to wait any longer for a job that is over."""
        self._failure: Failure | None = None
        """The last failure on this node; it has been printed."""

    async def run(self, session: Session, meeting: Meeting, signals: asyncio.Queue[int]) -> int:
        """Take part until the job is over, a signal says to leave, or the job wants fewer nodes.

        Returns the exit code of the process: the job's, 128 + signal, or 0 for a node that it let go.

        Raises `JobOverError` when the job failed, and whatever the session refuses with.
        """
        self._place = meeting.place
        member = asyncio.create_task(session.run(), name="session")
        follow = asyncio.create_task(self._follow(session), name="follow")
        give_up = asyncio.create_task(self._give_up_without_store(), name="give up")
        signalled = asyncio.create_task(signals.get(), name="signals")
        serve = asyncio.create_task(meeting.keep_serving(), name="serve")
        own = [asyncio.create_task(work) for work in self._own_work(session)]
        tasks: tuple[asyncio.Task[Any], ...] = (member, follow, give_up, serve, signalled, *own)
        self._broken = asyncio.get_running_loop().create_future()
        self._dismissed = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait((*tasks, self._broken, self._dismissed), return_when=asyncio.FIRST_COMPLETED)
            if signalled.done():
                signum = signalled.result()
                await self._leave(session, meeting, signal.Signals(signum).name, signals)
                return 128 + signum
            if self._dismissed.done():
                signalled.cancel()
                await self._leave(session, meeting, self._dismissed.result(), signals)
                return 0
            for ended in (self._broken, give_up, serve, follow, member, *own):
                if ended.done():
                    ended.result()
            ending = asyncio.create_task(self._end(session, meeting, (follow, member)), name="end")
            tasks = (ending, *tasks)
            await asyncio.wait((ending, signalled), return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                self._say("baguarun: the job is over; not waiting any longer")
                await self._workers.stop(0.0)
                self._hurry.set()
            return await ending
        finally:
            self._forget_workers()
            all_tasks = (*tasks, *self._tasks)
            for task in all_tasks:
                task.cancel()
            await asyncio.gather(*all_tasks, return_exceptions=True)

    async def _follow(self, session: Session) -> None:
        async for event in session.events:
            await self._act(session, event)

    async def _act(self, session: Session, event: MembershipEvent) -> None:
        if self._leaving:
            return
        match event:
            case Prepare(generation, reason):
                if generation > 1:
                    told = self._failure.summary() if self._failure else ""
                    news = reason.removeprefix(told).lstrip(" ;")
                    self._say(f"baguarun: generation {generation}: {news}")
                await self._prepare(session, event)
            case Start(world):
                if world.num_nodes > 1 or world.generation > 1:
                    self._say(f"baguarun: generation {world.generation}: {describe(world)}")
                await self._start(session, world)
                self._status.enter(world.generation, world.world_size, time.monotonic())
                self._status.workers_running = world.local_world_size
                self._status.restarts_total = world.restart_count
            case Finished():
                self._finished = event
                await self._end_workers(event)
            case Waiting(reason):
                self._say(f"baguarun: waiting: {reason}")
            case StoreLost():
                self._store_lost = True
                self._status.store_up = False
                self._say(
                    f"baguarun: the store {self._place} does not answer; "
                    "membership is paused, the workers go on"
                )
            case StoreBack():
                self._store_lost = False
                self._status.store_up = True
                self._say("baguarun: the store answers again")
            case Expelled(reason):
                self._say(f"baguarun: {reason}; stopping the workers and joining again")
                # No grace: the others went on without us; a late checkpoint of ours would overwrite theirs.
                await self._stop_workers(0.0)
                self._lose_place()
            case Dismissed(reason):
                self._dismissed.set_result(reason)
            case Invited():
                await self._accept(event)
            case Halted():
                await self._halt(event)

    # -- what restarting and resizing in place do differently

    @abstractmethod
    async def _prepare(self, session: Session, event: Prepare) -> None:
        """See `Prepare`."""

    @abstractmethod
    async def _start(self, session: Session, world: World) -> None:
        """Have this node's workers train in `world`."""

    @abstractmethod
    def _forget_workers(self) -> None:
        """What becomes of the workers from here on is our own doing and nobody's failure."""

    def _own_work(self, session: Session) -> tuple[Coroutine[Any, Any, None], ...]:
        """What else is to run as long as the agent does; never returns but by raising."""
        return ()

    async def _accept(self, event: Invited) -> None:
        raise RuntimeError("only workers that are resized in place are started before they have a place")

    async def _halt(self, event: Halted) -> None:
        raise RuntimeError("only workers that are resized in place stop at a commit that they agree on")

    async def _end_workers(self, event: Finished) -> None:
        """The job is over."""
        await self._stop_workers(0.0 if event.at_once else self._shutdown_timeout_s)

    @abstractmethod
    def _lose_place(self) -> None:
        """The node is no member of a World any more."""

    async def _stop_workers(self, grace_s: float) -> None:
        self._forget_workers()
        await self._workers.stop(grace_s)
        self._status.workers_running = 0

    async def _give_up_without_store(self) -> None:
        """Returns never; raises when neither workers nor a store are left to wait for."""
        now = asyncio.get_running_loop().time
        idle_since: float | None = None
        while True:
            await asyncio.sleep(1.0)
            busy = not self._store_lost or self._status.workers_running > 0
            idle_since = None if busy else idle_since or now()
            if idle_since is not None and now() - idle_since > _GIVE_UP_S:
                reason = (
                    f"the store {self._place} has not answered for {_GIVE_UP_S:.0f} s and no worker is left "
                    "running on this node; start the job again when the store is back"
                )
                code = self._failure.process_exit_code if self._failure else 1
                raise JobOverError(Finished(False, self._failure, reason, code))

    async def _leave(self, session: Session, meeting: Meeting, why: str, signals: asyncio.Queue[int]) -> None:
        """Tell the others, let the workers save what they want to save, and go."""
        if self._status.workers_running:
            hint = "a signal" if self._dismissed.done() else "once more"
            self._say(
                f"baguarun: {why}: stopping the workers and leaving the job ({hint}: kill them at once)"
            )
        # What membership still has to say is for those who stay.
        self._leaving = True
        await session.leave(why)
        self._forget_workers()
        hurried = await stop_or_hurry(self._workers, self._shutdown_timeout_s, signals)
        if meeting.serves_others and not hurried:
            self._say(
                "baguarun: this node serves the job's store: "
                "staying until the others are done (once more: go)"
            )
            alone = asyncio.create_task(session.wait_until_alone(_FOR_EVER_S))
            again = asyncio.create_task(signals.get())
            await asyncio.wait((alone, again), return_when=asyncio.FIRST_COMPLETED)
            alone.cancel()
            again.cancel()

    async def _end(self, session: Session, meeting: Meeting, work: tuple[asyncio.Task[None], ...]) -> int:
        await asyncio.gather(*work)
        finished = self._finished
        if finished is None:
            raise RuntimeError("the session ended without an outcome")
        if meeting.serves_others:
            alone = asyncio.create_task(session.wait_until_alone(_ALONE_S))
            hurry = asyncio.create_task(self._hurry.wait())
            await asyncio.wait((alone, hurry), return_when=asyncio.FIRST_COMPLETED)
            alone.cancel()
            hurry.cancel()
        if not finished.success:
            raise JobOverError(finished)
        return finished.exit_code

    # -- tasks

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._check)

    def _check(self, task: asyncio.Task[None]) -> None:
        """A task that breaks ends the agent."""
        if not task.cancelled() and (error := task.exception()) and not self._broken.done():
            self._broken.set_exception(error)


class Agent(NodeAgent):
    """Workers are stopped and started anew with each World."""

    def __init__(
        self,
        workers: LocalWorkers,
        status: AgentStatus,
        say: Callable[[str], None],
        *,
        shutdown_timeout_s: float,
    ) -> None:
        super().__init__(workers, status, say, shutdown_timeout_s=shutdown_timeout_s)
        self._group = workers
        self._watch: asyncio.Task[None] | None = None

    async def _prepare(self, session: Session, event: Prepare) -> None:
        await self._stop_workers(self._shutdown_timeout_s)
        # News of a store that does not take it have to be read meanwhile.
        self._spawn(session.acknowledge(event.generation, free_port()))

    async def _start(self, session: Session, world: World) -> None:
        await self._group.start(world)
        self._watch = asyncio.create_task(self._watch_workers(session, world), name="watch")
        # One that breaks (the keeper was killed) leaves the agent blind.
        self._watch.add_done_callback(self._check)

    async def _watch_workers(self, session: Session, world: World) -> None:
        result = await self._group.wait()
        self._status.workers_running = 0
        if result.failure is None:
            await session.report_done(world.generation)
        else:
            self._failure = result.failure
            self._say(f"baguarun: {self._failure.summary()}")
            await session.report_failure(result.failure, retry_free=result.port_in_use)

    def _forget_workers(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _lose_place(self) -> None:
        self._forget_workers()


def describe(world: World) -> str:
    """`2 nodes, 4 workers; this is node 1, ranks 2 to 3`."""
    if not world.local_world_size:
        nodes, workers = _count(world.num_nodes, "node"), _count(world.world_size, "worker")
        return f"{nodes}, {workers}; none of them is on this node"
    last = world.first_rank + world.local_world_size - 1
    ranks = f"ranks {world.first_rank} to {last}" if world.local_world_size > 1 else f"rank {last}"
    nodes, workers = _count(world.num_nodes, "node"), _count(world.world_size, "worker")
    return f"{nodes}, {workers}; this is node {world.node_rank}, {ranks}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


async def stop_or_hurry(workers: StoppableWorkers, grace_s: float, signals: asyncio.Queue[int]) -> bool:
    """Stop the workers; a second signal meanwhile kills them at once. Returns whether there was one."""
    stop = asyncio.create_task(workers.stop(grace_s))
    hurry = asyncio.create_task(signals.get())
    await asyncio.wait((stop, hurry), return_when=asyncio.FIRST_COMPLETED)
    if hurried := hurry.done():
        await workers.stop(0.0)
    await stop
    hurry.cancel()
    return hurried
