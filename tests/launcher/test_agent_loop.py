"""What the agent does with what membership says, in virtual time: no store, no processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import pytest

from baguarun.contract import Failure, World
from baguarun.elastic.membership.events import Dismissed, Finished, MembershipEvent, Prepare, Start, StoreLost
from baguarun.elastic.membership.records import InPlaceState, Process
from baguarun.elastic.membership.session import Session
from baguarun.elastic.membership.stragglers import Pace
from baguarun.launcher.agent import Agent, JobOverError, NodeAgent
from baguarun.launcher.crew import Worker
from baguarun.launcher.hang_watch import HangSettings
from baguarun.launcher.in_place_agent import InPlaceAgent, InPlaceSettings
from baguarun.launcher.meeting import Meeting
from baguarun.launcher.metrics import AgentStatus
from baguarun.launcher.workers import GroupResult
from tests.support.virtual_time import in_virtual_time

WORLD = World(
    job_id="j",
    generation=1,
    node_rank=0,
    num_nodes=1,
    first_rank=0,
    local_world_size=1,
    world_size=1,
    master_addr="127.0.0.1",
    master_port=1,
    restart_count=0,
    max_restarts=0,
)
FAILURE = Failure(
    generation=1, node="n", rank=0, local_rank=0, pid=7, exit_code=9, signal=None, timestamp_s=0.0
)

IN_PLACE = InPlaceSettings(
    slots=1,
    spares=0,
    detect_timeout_s=5.0,
    shutdown_timeout_s=300.0,
    node="n",
    hangs=HangSettings(limit=None, removes=False),
)


class FakeSession:
    """Says what it is told to say; ends when told to leave or after `Finished`."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[MembershipEvent | None] = asyncio.Queue()
        self.ended = asyncio.Event()
        self.stored = asyncio.Event()
        self.hears = asyncio.Event()
        """Whether the store takes acknowledgements."""
        self.hears.set()
        self.lease_left_s = 5.0
        self.left = ""

    async def run(self) -> None:
        await self.ended.wait()
        self.queue.put_nowait(None)

    @property
    async def events(self) -> AsyncIterator[MembershipEvent]:
        while (event := await self.queue.get()) is not None:
            yield event

    async def acknowledge(self, generation: int, master_port: int | None) -> None:
        assert master_port
        await self.hears.wait()

    async def report_state(self, state: InPlaceState) -> None:
        await self.stored.wait()

    async def report_paces(self, paces: Sequence[Pace]) -> None:
        assert not paces

    def expects_newcomers(self) -> bool:
        return False

    async def report_done(self, generation: int) -> None:
        await self.stored.wait()

    async def report_failure(self, failure: Failure, *, retry_free: bool = False) -> None:
        await self.stored.wait()

    async def leave(self, reason: str) -> None:
        self.left = reason
        # What was under way when the farewell was sent is still read.
        self.queue.put_nowait(Start(WORLD))
        await asyncio.sleep(1.0)
        self.ended.set()

    async def wait_until_alone(self, timeout_s: float) -> bool:
        await asyncio.sleep(timeout_s)
        return False


class FakeWorkers:
    def __init__(self, stop_s: float = 0.0) -> None:
        self.result: asyncio.Future[GroupResult] = asyncio.get_running_loop().create_future()
        self.living: dict[Process, Worker] = {}
        self.starts = 0
        self.graces: list[float] = []
        self.stop_s = stop_s

    async def start(self, world: World) -> None:
        self.starts += 1

    async def wait(self) -> GroupResult:
        return await asyncio.shield(self.result)

    async def stop(self, grace_s: float) -> None:
        self.graces.append(grace_s)
        await asyncio.sleep(min(self.stop_s, grace_s))


class FakeMeeting:
    place = "etcd://here:1"

    def __init__(self, *, serves_others: bool = False) -> None:
        self.serves_others = serves_others

    async def keep_serving(self) -> None:
        await asyncio.get_running_loop().create_future()


class Scene:
    """An agent among fakes."""

    def __init__(self, *, stop_s: float = 0.0, serves_others: bool = False, in_place: bool = False) -> None:
        self.session, self.workers = FakeSession(), FakeWorkers(stop_s)
        self.said: list[str] = []
        self.signals: asyncio.Queue[int] = asyncio.Queue()
        workers: Any = self.workers
        status = AgentStatus(job_id="j", node="n")
        agent: NodeAgent
        if in_place:
            agent = InPlaceAgent(workers, status, self.said.append, IN_PLACE)
        else:
            agent = Agent(workers, status, self.said.append, shutdown_timeout_s=300.0)
        meeting: Any = FakeMeeting(serves_others=serves_others)
        self.run = asyncio.create_task(
            agent.run(cast(Session, self.session), cast(Meeting, meeting), self.signals)
        )

    async def say(self, *events: MembershipEvent) -> None:
        for event in events:
            self.session.queue.put_nowait(event)
        await asyncio.sleep(0.1)


@in_virtual_time
async def test_a_node_whose_worker_failed_while_the_store_was_away_gives_up_with_that_failure() -> None:
    scene = Scene()
    await scene.say(Prepare(1, "first"), Start(WORLD), StoreLost())
    await asyncio.sleep(1000)
    assert not scene.run.done(), "training goes on"
    scene.workers.result.set_result(GroupResult(failure=FAILURE))
    with pytest.raises(JobOverError, match="etcd://here:1 has not answered for 60 s") as caught:
        await scene.run
    assert (caught.value.failure, caught.value.exit_code) == (FAILURE, 9)


@in_virtual_time
@pytest.mark.parametrize("in_place", [False, True])
async def test_a_store_that_goes_away_before_it_hears_of_stopped_workers_is_told_of_and_given_up(
    in_place: bool,
) -> None:
    scene = Scene(in_place=in_place)
    scene.session.hears.clear()
    await scene.say(Prepare(1, "first"), StoreLost())
    assert scene.said == [
        "baguarun: the store etcd://here:1 does not answer; membership is paused, the workers go on"
    ]
    with pytest.raises(JobOverError, match="etcd://here:1 has not answered for 60 s"):
        await scene.run


@in_virtual_time
async def test_one_that_leaves_starts_nothing_more() -> None:
    scene = Scene()
    await scene.say(Prepare(1, "first"))
    scene.signals.put_nowait(15)
    assert await scene.run == 143
    assert (scene.session.left, scene.workers.starts) == ("SIGTERM", 0)


@in_virtual_time
async def test_a_signal_cuts_the_wait_for_other_nodes_short_and_keeps_the_outcome() -> None:
    scene = Scene(serves_others=True)
    await scene.say(Prepare(1, "first"), Start(WORLD), Finished(False, FAILURE, "it failed", 9))
    scene.session.ended.set()
    await asyncio.sleep(1.0)
    assert not scene.run.done()
    scene.signals.put_nowait(2)
    await asyncio.sleep(0.1)
    assert scene.run.done()
    with pytest.raises(JobOverError, match="it failed"):
        await scene.run


@in_virtual_time
async def test_what_was_said_of_a_failure_is_not_said_again_with_the_restart() -> None:
    scene = Scene()
    await scene.say(Prepare(1, "first"), Start(WORLD))
    scene.workers.result.set_result(GroupResult(failure=FAILURE))
    await asyncio.sleep(0.1)
    await scene.say(Prepare(2, f"{FAILURE.summary()}; restart 1 of 2"))
    assert scene.said == [f"baguarun: {FAILURE.summary()}", "baguarun: generation 2: restart 1 of 2"]
    scene.signals.put_nowait(15)
    await scene.run


@in_virtual_time
async def test_one_that_the_job_lets_go_leaves_as_politely_and_has_not_failed() -> None:
    scene = Scene(stop_s=5.0)
    await scene.say(Prepare(1, "first"), Start(WORLD), Dismissed("scaled to 1 node"))
    assert await scene.run == 0
    assert (scene.session.left, scene.workers.starts) == ("scaled to 1 node", 1)
    assert scene.said == [
        "baguarun: scaled to 1 node: stopping the workers and leaving the job (a signal: kill them at once)"
    ]


@in_virtual_time
async def test_a_signal_hurries_one_that_was_let_go() -> None:
    scene = Scene()
    await scene.say(Prepare(1, "first"), Start(WORLD))
    scene.workers.stop_s = 200.0
    await scene.say(Dismissed("scaled to 1 node"))
    scene.signals.put_nowait(15)
    assert await scene.run == 0
    assert scene.workers.graces[-2:] == [300.0, 0.0]


@in_virtual_time
@pytest.mark.parametrize(("at_once", "grace_s"), [(False, 300.0), (True, 0.0)])
async def test_a_stopped_job_gives_workers_time_unless_it_was_stopped_at_once(
    at_once: bool, grace_s: float
) -> None:
    scene = Scene()
    await scene.say(Prepare(1, "first"), Start(WORLD))
    await scene.say(Finished(False, None, "by somebody", 143, stopped=True, at_once=at_once))
    scene.session.ended.set()
    scene.session.queue.put_nowait(None)
    with pytest.raises(JobOverError, match="by somebody") as caught:
        await scene.run
    assert (caught.value.stopped, caught.value.exit_code) == (True, 143)
    assert scene.workers.graces[-1] == grace_s
