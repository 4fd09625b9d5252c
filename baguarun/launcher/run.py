"""`baguarun run`: one node's part in a job, from settings to exit code."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from baguarun.contract import Failure
from baguarun.elastic.membership.events import Finished
from baguarun.elastic.membership.job import NodeOffer
from baguarun.elastic.membership.prober import UdpProber
from baguarun.elastic.membership.settings import MembershipSettings
from baguarun.errors import JobFailedError
from baguarun.launcher.addresses import node_address
from baguarun.launcher.agent import Agent, JobOverError, NodeAgent, stop_or_hurry
from baguarun.launcher.binding import BindingPlan, plan_binding, read_topology, resolve_slots
from baguarun.launcher.crew import Crew
from baguarun.launcher.failure import format_report
from baguarun.launcher.hang_watch import HangSettings
from baguarun.launcher.in_place_agent import InPlaceAgent, InPlaceSettings
from baguarun.launcher.jobspec import job_spec
from baguarun.launcher.keeper import Keeper
from baguarun.launcher.local_workers import LocalWorkers
from baguarun.launcher.logs import Logs, LogSettings
from baguarun.launcher.meeting import Meeting
from baguarun.launcher.metrics import AgentStatus, MetricsServer
from baguarun.launcher.rendezvous import (
    Embedded,
    EndpointStore,
    ExternalStore,
    Rendezvous,
    Static,
    choose_rendezvous,
)
from baguarun.launcher.settings import ElasticMode, OnHang, RunSettings
from baguarun.launcher.static import static_world

if TYPE_CHECKING:
    from baguarun.elastic.membership.etcd import EtcdStore


def run_job(settings: RunSettings) -> int:
    """Run this node's workers until the job is over; returns the first failing worker's exit code, else 0.

    Raises `UsageError` or `SetupError` before anything is started that would have to be ended.
    """
    rendezvous = choose_rendezvous(settings)
    slots = resolve_slots(settings.nproc_per_node, settings.environ)
    logs = Logs(
        LogSettings.from_flags(
            log_dir=settings.log_dir,
            redirects=settings.redirects,
            tee=settings.tee,
            local_ranks_filter=settings.local_ranks_filter,
        ),
        job_id=settings.job_id,
        node=settings.node_name,
    )
    # Before threads and grpc exist: the keeper must stay small and single-threaded.
    keeper = Keeper.fork()
    return asyncio.run(_Node(settings, rendezvous, slots, keeper, logs).run())


class _Node:
    """Owns everything that must be ended again, in the order in which it must be."""

    def __init__(
        self, settings: RunSettings, rendezvous: Rendezvous, slots: int, keeper: Keeper, logs: Logs
    ) -> None:
        self._settings = settings
        self._rendezvous = rendezvous
        self._slots = slots
        self._keeper = keeper
        self._logs = logs
        self._signals: asyncio.Queue[int] = asyncio.Queue()
        self._status = AgentStatus(job_id=settings.job_id, node=settings.node_name)

    async def run(self) -> int:
        signums = [signal.SIGINT, signal.SIGTERM]
        # Under nohup it is ignored, and stays so.
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signums.append(signal.SIGHUP)
        for signum in signums:
            asyncio.get_running_loop().add_signal_handler(signum, self._signals.put_nowait, signum)
        with _log_lines_go_to(self._logs.say):
            return await self._run()

    async def _run(self) -> int:
        metrics = MetricsServer(self._status)
        workers: LocalWorkers | Crew | None = None
        try:
            if self._settings.metrics_port is not None:
                port = await metrics.start(self._settings.metrics_port)
                self._logs.say(f"baguarun: metrics at http://127.0.0.1:{port}/metrics")
            kind = Crew if self._settings.elastic is ElasticMode.IN_PLACE else LocalWorkers
            workers = kind(self._settings, self._binding(), self._keeper, self._logs)
            if isinstance(self._rendezvous, Static):
                assert isinstance(workers, LocalWorkers)
                return await self._run_static(workers)
            return await self._run_member(workers, self._rendezvous)
        except JobFailedError as error:
            self._report(error, getattr(error, "failure", None))
            return error.exit_code
        except Exception as error:
            if workers is not None:
                # What ends the agent is no fault of theirs: they may save their work, as when it leaves.
                if self._status.workers_running:
                    self._logs.say(f"baguarun: {error}: stopping the workers (a signal: kill them at once)")
                await stop_or_hurry(workers, self._settings.shutdown_timeout_s, self._signals)
            raise
        finally:
            if workers is not None:
                await workers.stop(0.0)
                workers.close()
            await metrics.close()
            await self._keeper.close()
            await self._logs.close()

    async def _run_member(
        self, workers: LocalWorkers | Crew, place: Embedded | ExternalStore | EndpointStore
    ) -> int:
        meeting = Meeting(place, self._settings, self._logs.say, self._keeper.spare)
        try:
            meeting.start()
            # Imported while etcd starts: the client library costs a tenth of a second.
            from baguarun.elastic.membership.session import Session

            store = await self._open(meeting)
            if store is None:
                signum = await self._signals.get()
                self._logs.say(f"baguarun: {signal.Signals(signum).name}: leaving before the job has begun")
                return 128 + signum
            offer, membership = self._offer(place), self._membership_settings()
            prober = self._prober(offer, membership)
            session = Session(store, job_spec(self._settings), offer, membership, prober)
            return await self._agent(workers).run(session, meeting, self._signals)
        finally:
            await meeting.close()

    def _agent(self, workers: LocalWorkers | Crew) -> NodeAgent:
        settings, say = self._settings, self._logs.say
        if isinstance(workers, LocalWorkers):
            return Agent(workers, self._status, say, shutdown_timeout_s=settings.shutdown_timeout_s)
        in_place = InPlaceSettings(
            slots=self._slots,
            spares=settings.spares,
            detect_timeout_s=settings.detect_timeout_s,
            shutdown_timeout_s=settings.shutdown_timeout_s,
            node=settings.node_name,
            hangs=HangSettings(limit=settings.hang_limit, removes=settings.on_hang is OnHang.REMOVE),
        )
        return InPlaceAgent(workers, self._status, say, in_place)

    async def _open(self, meeting: Meeting) -> EtcdStore | None:
        """The meeting place, however long it takes to appear; None if a signal came first."""
        opening = asyncio.create_task(meeting.open())
        signalled = asyncio.create_task(self._signals.get())
        try:
            await asyncio.wait((opening, signalled), return_when=asyncio.FIRST_COMPLETED)
            if signalled.done():
                self._signals.put_nowait(signalled.result())
                return None
            return opening.result()
        finally:
            opening.cancel()
            signalled.cancel()
            await asyncio.gather(opening, signalled, return_exceptions=True)

    def _binding(self) -> BindingPlan:
        environ = self._settings.environ
        plan = plan_binding(
            self._slots + self._settings.spares, read_topology(environ), self._settings.bind, environ
        )
        for notice in plan.notices:
            self._logs.say(f"baguarun: {notice}")
        return plan

    def _offer(self, place: Embedded | ExternalStore | EndpointStore) -> NodeOffer:
        settings = self._settings
        return NodeOffer(
            node_id=f"{settings.node_name}-{os.getpid()}-{os.urandom(3).hex()}",
            name=settings.node_name,
            address=node_address(settings, place),
            slots=self._slots,
            node_rank=settings.node_rank,
        )

    def _membership_settings(self) -> MembershipSettings:
        return MembershipSettings(
            detect_timeout_s=self._settings.detect_timeout_s, join_timeout_s=self._settings.join_timeout_s
        )

    def _prober(self, offer: NodeOffer, membership: MembershipSettings) -> UdpProber | None:
        """Nodes that can be alone in a job have nobody to ask, and long detection times need no probes."""
        if not membership.probes or self._settings.max_nodes == 1:
            return None
        try:
            return UdpProber(offer.address, membership.probe_interval_s, membership.suspect_s)
        except OSError as error:
            self._logs.say(
                f"baguarun: warning: no UDP socket for probes on {offer.address}: {error}; a lost node "
                f"is found by its lease of {membership.lease_ttl_s} s only"
            )
            return None

    def _report(self, error: JobFailedError, failure: Failure | None) -> None:
        """The last words of every agent: who failed first in the whole cluster."""
        if failure is None:
            how = "was stopped" if getattr(error, "stopped", False) else "failed"
            self._logs.say(f"baguarun: job {self._settings.job_id} {how}: {error}")
            return
        why = str(error).removeprefix(failure.summary()).lstrip(" ,;")
        is_count = why.startswith("after ")
        if not is_count:
            self._logs.say(f"baguarun: {why}")
        outcome = why if is_count and self._settings.max_restarts else ""
        self._logs.say(format_report(failure, self._settings.job_id, outcome).rstrip("\n"))

    async def _run_static(self, workers: LocalWorkers) -> int:
        """No store and no membership: the World is what the flags say, restarts are this node's alone."""
        max_restarts = self._settings.max_restarts
        secret = secrets.token_hex(16) if self._settings.max_nodes == 1 else ""
        for restart_count in itertools.count():
            world = static_world(self._settings, self._slots, restart_count=restart_count, net_secret=secret)
            await workers.start(world)
            self._status.enter(world.generation, world.world_size, time.monotonic())
            self._status.workers_running = world.local_world_size
            self._status.restarts_total = restart_count
            ended = asyncio.create_task(workers.wait())
            signalled = asyncio.create_task(self._signals.get())
            await asyncio.wait((ended, signalled), return_when=asyncio.FIRST_COMPLETED)
            if signalled.done():
                ended.cancel()
                return await self._stop_for(signalled.result(), workers)
            signalled.cancel()
            failure = ended.result().failure
            if failure is None:
                await workers.stop(0.0)
                return 0
            self._logs.say(f"baguarun: {failure.summary()}")
            hurried = await stop_or_hurry(workers, self._settings.shutdown_timeout_s, self._signals)
            if hurried or restart_count == max_restarts:
                reason = f"after {restart_count} of {max_restarts} restarts"
                raise JobOverError(Finished(False, failure, reason, failure.process_exit_code))
            self._logs.say(f"baguarun: restart {restart_count + 1} of {max_restarts}")
        raise AssertionError("a job restarts or ends")

    async def _stop_for(self, signum: int, workers: LocalWorkers) -> int:
        name = signal.Signals(signum).name
        self._logs.say(f"baguarun: {name}: stopping the workers (once more: kill them at once)")
        await stop_or_hurry(workers, self._settings.shutdown_timeout_s, self._signals)
        return 128 + signum


class _SayHandler(logging.Handler):
    """Prints warnings of the membership code as the agent prints its own words."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(f"baguarun: {record.getMessage()}")


@contextlib.contextmanager
def _log_lines_go_to(say: Callable[[str], None]) -> Iterator[None]:
    handler = _SayHandler(say)
    logger = logging.getLogger("baguarun")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
