"""The workers of a node whose workers are resized in place: each lives and dies on its own."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

from baguarun.contract import STACKS_SIGNAL, ControlMessage, Failure, Topic, World
from baguarun.elastic.membership.records import Process
from baguarun.errors import JobFailedError
from baguarun.launcher.binding import BindingPlan
from baguarun.launcher.control_channel import ControlChannel
from baguarun.launcher.failure import cause_from_output, read_error_file
from baguarun.launcher.keeper import ExitNotice, Keeper, KeeperProcess, LeftBehind
from baguarun.launcher.local_workers import stop_and_tell
from baguarun.launcher.logs import Logs, WorkerLog
from baguarun.launcher.settings import RunSettings
from baguarun.launcher.vital_signs import VitalSigns
from baguarun.launcher.worker_commands import WorkerCommands
from baguarun.launcher.workers import WorkerCommand, clear_error_file, spawn_request

_CATCH_UP_S = 0.1
"""At most this is waited for the last words of a worker that ended by itself; survivors wait for the news."""


@dataclass(eq=False)
class Worker:
    """One worker process, and how far it has come."""

    id: Process
    command: WorkerCommand
    log: WorkerLog
    process: KeeperProcess
    channel: ControlChannel
    generation: int
    """Of the World that it was sent to last; 0: it has been in none."""
    rank: int
    """In that World."""
    started_s: float
    heard_s: float
    """When its control thread last said anything, by the loop's clock."""
    signs: VitalSigns
    """For when it does not."""
    asked_s: float = 0.0
    """When it was asked last whether it lives."""
    arrived: bool = False
    """It has come to `baguarun.elastic.run`, as a newcomer."""
    entered: bool = False
    """It is in `baguarun.elastic.run`, and ready for a World or in one."""
    finished: bool = False
    """All its training is done; what else its script does it is not told of."""
    port: int | None = None
    """It is ready for the next World, and listens there."""
    steps: int = 0
    """It has committed; those of its last message."""
    own_steps: int = 0
    """Of those, as many as it has done itself, in Worlds; a newcomer is sent what others have done."""
    joined_s: float | None = None
    """When it came into its first World, by the loop's clock."""
    told: int = 0
    """Newest generation for which it was told to leave its World."""
    unwanted: bool = False
    """It was killed by us to make room for another: no failure."""

    @property
    def exit(self) -> ExitNotice:
        """Of a worker that has ended."""
        return self.process.exited.result()

    def count_steps(self, steps: int) -> bool:
        """Note how many it has committed; returns whether these are more than before."""
        more, self.steps = steps - self.steps, steps
        self.own_steps += max(more, 0)
        return more > 0

    def enter(self, world: World) -> None:
        """Send it to its next World."""
        if self.joined_s is None:
            self.joined_s = asyncio.get_running_loop().time()
        self.port = None
        self.generation, self.rank = world.generation, world.rank_of(self.id.local_rank)
        self.channel.send(ControlMessage(Topic.WORLD, asdict(world)))

    def tell(self, topic: Topic, generation: int, reason: str, *, halts: bool = False) -> None:
        """ABORT, SWITCH or LEAVE; `halts`: with a checkpoint, as no World follows for now."""
        self.told = generation
        body = {"generation": generation, "reason": reason}
        self.channel.send(ControlMessage(topic, {**body, "halts": True} if halts else body))


class Crew:
    """Threads: the agent's event loop. `living` are the workers that have not ended, by who they are."""

    def __init__(self, settings: RunSettings, binding: BindingPlan, keeper: Keeper, logs: Logs) -> None:
        self._node = settings.node_name
        self._detect_timeout_s = settings.detect_timeout_s
        self._commands = WorkerCommands(settings, binding)
        self._keeper = keeper
        self._logs = logs
        self._starting = asyncio.Lock()
        self._stops = 0
        self._ended_logs: list[WorkerLog] = []
        self.living: dict[Process, Worker] = {}
        self.on_message: Callable[[Worker, ControlMessage], None] = lambda worker, message: None
        self.on_end: Callable[[Worker], None] = lambda worker: None
        """Called when a worker has ended; not for those that `stop` ends."""

    async def start_fresh(self, world: World, workers: Iterable[Process]) -> None:
        """Start the workers of a World; raises `UsageError` if that cannot be."""
        commands = {
            process: self._commands.for_world(world, process.local_rank, control=True) for process in workers
        }
        async with self._starting:
            started = await asyncio.gather(
                *(self._start(process, command, world, 0) for process, command in commands.items()),
                return_exceptions=True,
            )
        for result in started:
            if isinstance(result, BaseException):
                with contextlib.suppress(JobFailedError):
                    await self._keeper.stop_all(0)
                raise result

    async def start_newcomer(self, process: Process, generation: int, net_secret: str) -> None:
        """Start one that waits to be taken in, while `generation` trains."""
        command = self._commands.for_newcomer(process, net_secret)
        async with self._starting:
            await self._start(process, command, None, generation)

    async def kill(self, worker: Worker) -> None:
        """End one worker, and what is in its process group, at once."""
        await self._keeper.signal(worker.process, signal.SIGKILL)

    async def dump_stacks(self, worker: Worker) -> None:
        """Have one that has entered write the stacks of all its threads to its stderr."""
        await self._keeper.signal(worker.process, STACKS_SIGNAL, alone=True)

    async def stop(self, grace_s: float) -> None:
        """End all of them and whatever they started; calling again shortens the grace."""
        async with self._starting:
            self._stops += 1
        try:
            await stop_and_tell(self._stop(grace_s), grace_s, self._logs)
        finally:
            self._stops -= 1

    def close(self) -> None:
        for line in self._commands.close():
            self._logs.say(f"baguarun: {line}")

    async def failure_of(self, worker: Worker, generation: int) -> Failure:
        """How a worker that has ended failed, with its last words as far as they are there at once."""
        notice = worker.exit
        if notice.signal is None:
            await self._logs.catch_up([worker.log], _CATCH_UP_S)
        recorded = read_error_file(worker.command.error_file)
        cause = recorded[0] if recorded else cause_from_output(*worker.log.tail())
        return Failure(
            generation=generation,
            node=self._node,
            rank=worker.rank,
            local_rank=worker.id.local_rank,
            pid=worker.process.pid,
            exit_code=notice.exit_code,
            signal=notice.signal,
            timestamp_s=notice.timestamp_s,
            message=cause.message,
            traceback=cause.traceback,
            log_path=worker.log.path,
        )

    async def _start(
        self, process: Process, command: WorkerCommand, world: World | None, generation: int
    ) -> None:
        clear_error_file(command.error_file)
        rank = world.rank_of(process.local_rank) if world else 0
        log = self._logs.open_worker(
            generation=world.generation if world else generation,
            rank=rank,
            local_rank=process.local_rank,
            is_newcomer=world is None,
        )
        worker: Worker | None = None
        early: list[ControlMessage] = []

        def heard(message: ControlMessage) -> None:
            if worker is None:
                early.append(message)
            elif worker.id in self.living:
                worker.heard_s = asyncio.get_running_loop().time()
                self.on_message(worker, message)

        def broken(reason: str) -> None:
            self._logs.say(f"baguarun: local rank {process.local_rank}: control channel: {reason}")

        channel: ControlChannel | None = None
        try:
            channel, theirs = await ControlChannel.open(heard, broken)
            with theirs:
                started = await self._keeper.spawn(spawn_request(command, log, theirs.fileno()))
        except BaseException:
            if channel is not None:
                channel.close()
            log.close_write_ends()
            await self._logs.finish([log])
            raise
        log.close_write_ends()
        now_s = asyncio.get_running_loop().time()
        generation = world.generation if world else 0
        signs = VitalSigns(started.pid, self._detect_timeout_s)
        worker = Worker(process, command, log, started, channel, generation, rank, now_s, now_s, signs)
        if world:
            worker.joined_s = now_s
        self.living[process] = worker
        for message in early:
            heard(message)
        started.exited.add_done_callback(lambda _: self._end(worker))

    def _end(self, worker: Worker) -> None:
        if self.living.pop(worker.id, None) is None:
            return
        worker.channel.close()
        self._ended_logs = [log for log in self._ended_logs if not all(s.ended.done() for s in log.streams)]
        self._ended_logs.append(worker.log)
        if not self._stops:
            self.on_end(worker)

    async def _stop(self, grace_s: float) -> tuple[LeftBehind, ...]:
        left: tuple[LeftBehind, ...] = ()
        with contextlib.suppress(JobFailedError):
            left = await self._keeper.stop_all(grace_s)
        for worker in tuple(self.living.values()):
            self._end(worker)
        logs, self._ended_logs = self._ended_logs, []
        await self._logs.finish(logs)
        return left
