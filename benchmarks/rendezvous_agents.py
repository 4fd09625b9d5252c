"""One process full of simulated agents: the production `Session` on a store connection of its own each."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from baguarun.elastic.membership.etcd import EtcdStore
from baguarun.elastic.membership.events import Prepare, Start
from baguarun.elastic.membership.job import JobSpec, NodeOffer
from baguarun.elastic.membership.session import Session
from baguarun.elastic.membership.settings import MembershipSettings
from baguarun.elastic.membership.store_url import StoreUrl

SLOTS = 8
_CAP_S = 120.0


@dataclass(frozen=True)
class Crowd:
    """The agents of one process."""

    url: StoreUrl
    job_id: str
    num_agents: int
    """Of the whole job."""
    numbers: range
    """Of those, the ones in this process."""


@dataclass
class _Agent:
    session: Session
    store: EtcdStore
    started: dict[int, float] = field(default_factory=dict)
    """Generation to the moment of its `Start`."""


@dataclass(frozen=True)
class Phase:
    """What one process saw of forming or re-forming."""

    last_start: float
    """CLOCK_MONOTONIC, the same in all processes."""
    cpu_s: float
    left_at: float | None = None
    """When the agent that left began to, if it lived here."""


def live(pipe: Connection, crowd: Crowd) -> None:
    """Target of the process: says `ready`, waits for `go`, forms, waits for who leaves, re-forms, ends."""
    asyncio.run(_live(pipe, crowd))
    # Hundreds of channels need not be closed one by one.
    os._exit(0)


async def _live(pipe: Connection, crowd: Crowd) -> None:
    loop = asyncio.get_running_loop()
    changed = asyncio.Condition()
    agents: dict[int, _Agent] = {}

    async def live_one(number: int) -> None:
        store = await EtcdStore.open(crowd.url, timeout_s=60.0)
        agent = agents[number] = _Agent(_session(store, crowd, number), store)
        running = asyncio.create_task(agent.session.run())
        async for event in agent.session.events:
            if isinstance(event, Prepare):
                await agent.session.acknowledge(event.generation, 29500)
            elif isinstance(event, Start):
                agent.started[event.world.generation] = time.monotonic()
                async with changed:
                    changed.notify_all()
        await running

    async def all_started(generation: int, numbers: set[int]) -> float:
        def complete() -> bool:
            return all(n in agents and generation in agents[n].started for n in numbers)

        async with changed:
            await asyncio.wait_for(changed.wait_for(complete), _CAP_S)
        return max(agents[n].started[generation] for n in numbers)

    # An agent has its process for itself; here hundreds of heaps would be searched again and again.
    gc.disable()
    pipe.send("ready")
    await loop.run_in_executor(None, pipe.recv)
    cpu_s = _cpu_s()
    tasks = [asyncio.create_task(live_one(number)) for number in crowd.numbers]
    numbers = set(crowd.numbers)
    pipe.send(Phase(await all_started(1, numbers), _cpu_s() - cpu_s))

    leaver: int = await loop.run_in_executor(None, pipe.recv)
    cpu_s, left_at = _cpu_s(), None
    if leaver in numbers:
        numbers.remove(leaver)
        left_at = time.monotonic()
        await agents[leaver].session.leave("benchmark")
    pipe.send(Phase(await all_started(2, numbers), _cpu_s() - cpu_s, left_at))
    await loop.run_in_executor(None, pipe.recv)
    for task in tasks:
        task.cancel()


def _session(store: EtcdStore, crowd: Crowd, number: int) -> Session:
    spec = JobSpec(
        job_id=crowd.job_id,
        min_nodes=crowd.num_agents - 1,
        max_nodes=crowd.num_agents,
        max_restarts=0,
        digest="0",
        summary="rendezvous benchmark",
    )
    address = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
    offer = NodeOffer(node_id=f"{number:05d}", name=f"node{number}", address=address, slots=SLOTS)
    return Session(store, spec, offer, MembershipSettings())


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
