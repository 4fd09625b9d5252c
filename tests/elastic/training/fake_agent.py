"""Stands for the agents of a job that is resized in place: real workers, told of Worlds by a test.

All workers are of one node unless the test says otherwise. What happens to them is decided by the test, or
follows from a worker's death.
"""

from __future__ import annotations

import multiprocessing
import os
import selectors
import socket
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from multiprocessing.process import BaseProcess
from typing import Any

from baguarun.contract import ControlDecoder, ControlMessage, Topic, WorkerEnv, World
from tests.support.etcd_servers import free_port

DEADLINE_S = 60.0
START_METHOD = "forkserver"
"""Of workers. On CUDA "spawn": what the fork server imports looks for GPUs, and CUDA survives no fork."""


@dataclass
class Worker:
    """One worker process and the agent's end of its channel."""

    local_rank: int
    process: BaseProcess
    channel: socket.socket
    decoder: ControlDecoder = field(default_factory=ControlDecoder)
    heard: list[ControlMessage] = field(default_factory=list)
    generation: int = 0
    """Of the World that it is in or was told to enter."""
    ready: ControlMessage | None = None
    is_gone: bool = False

    def tell(self, topic: Topic, **body: Any) -> None:
        try:
            self.channel.sendall(ControlMessage(topic, body).encode())
        except OSError:
            # It has just died; its process is looked at next.
            pass


class FakeAgent:
    """Starts workers that run `job(*args)`, and is to be used as a context manager."""

    def __init__(self, job: Callable[..., None], *args: Any) -> None:
        self._job = job
        self._args = args
        self._context = multiprocessing.get_context(START_METHOD)
        self._context.set_forkserver_preload(["tests.comm.preload"])
        self._selector = selectors.DefaultSelector()
        self.workers: dict[int, Worker] = {}
        self.everybody: list[Worker] = []
        self.generation = 0
        self.members: list[int] = []
        """Local ranks of the World, in the order of ranks."""
        self.losses: list[int] = []
        self.suspicions: list[ControlMessage] = []
        self.node_of: dict[int, int] = {}
        """By local rank, which is one count for all nodes; 0 if not named. Members are in order of nodes."""
        self.at_loss: Callable[[int], None] = self.shrink
        self.at_suspicion: Callable[[ControlMessage], None] = self.meet_again

    def __enter__(self) -> FakeAgent:
        return self

    def __exit__(self, *_error: object) -> None:
        for worker in self.everybody:
            worker.process.kill()
            worker.process.join()
            worker.channel.close()
        self._selector.close()

    def start(self, world_size: int) -> None:
        """Generation 1: all from the environment."""
        self.generation, self.members = 1, list(range(world_size))
        port = free_port()
        for local_rank in self.members:
            world = self._world(port, local_rank)
            self._spawn(local_rank, WorkerEnv.for_worker(world, local_rank)).generation = 1

    def start_newcomer(self, local_rank: int) -> Worker:
        """A worker that will be ready for a World, and is in one of its own meanwhile."""
        world = World(
            job_id="test",
            generation=0,
            node_rank=0,
            num_nodes=1,
            first_rank=0,
            local_world_size=1,
            world_size=1,
            master_addr="127.0.0.1",
            master_port=0,
            restart_count=0,
            max_restarts=0,
            local_ranks=(local_rank,),
        )
        return self._spawn(local_rank, WorkerEnv.for_worker(world, local_rank))

    def shrink(self, lost: int) -> None:
        """The next World is without the lost one."""
        self.change([member for member in self.members if member != lost], polite=False)

    def meet_again(self, suspicion: ControlMessage) -> None:
        """The next World has the same members."""
        if suspicion.body["generation"] == self.generation:
            self.change(self.members, polite=False)

    def change(self, members: Iterable[int], *, polite: bool) -> None:
        """Announce the next World; it begins when all its members are ready."""
        before, self.members = self.members, list(members)
        self.generation += 1
        for local_rank in before:
            topic = Topic.ABORT
            if polite:
                topic = Topic.SWITCH if local_rank in self.members else Topic.LEAVE
            self.workers[local_rank].tell(topic, generation=self.generation, reason="test")
            if not polite:
                self.workers[local_rank].ready = None
        if polite:
            for local_rank in before:
                self.workers[local_rank].ready = None

    def halt(self, members: Iterable[int]) -> None:
        """Have those leave, told that the whole job halts; the others of the World are to be told later."""
        for local_rank in members:
            body = {"generation": self.generation + 1, "reason": "test", "halts": True}
            self.workers[local_rank].tell(Topic.LEAVE, **body)

    def run_until(self, condition: Callable[[], bool]) -> None:
        """Serve the workers until `condition()`; fails the test after DEADLINE_S."""
        give_up_at_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < give_up_at_s, self._describe()
            for key, _ in self._selector.select(timeout=0.2):
                worker: Worker = key.data
                if key.fileobj is worker.channel:
                    self._hear(worker)
                else:
                    self._bury(worker)

    def run_to_the_end(self) -> None:
        """Until no worker is left."""
        self.run_until(lambda: all(worker.is_gone for worker in self.everybody))

    def _world(self, port: int, local_rank: int) -> World:
        """As the agent of that worker sees it."""
        nodes = [self.node_of.get(member, 0) for member in self.members]
        node = self.node_of.get(local_rank, 0)
        local_ranks = [member for member, its in zip(self.members, nodes, strict=True) if its == node]
        return World(
            job_id="test",
            generation=self.generation,
            node_rank=sorted(set(nodes)).index(node),
            num_nodes=len(set(nodes)),
            first_rank=nodes.index(node),
            local_world_size=len(local_ranks),
            world_size=len(self.members),
            master_addr="127.0.0.1",
            master_port=port,
            restart_count=0,
            max_restarts=0,
            local_ranks=tuple(local_ranks),
            in_place=self.generation > 1,
        )

    def _spawn(self, local_rank: int, env: WorkerEnv) -> Worker:
        ours, theirs = socket.socketpair()
        process = self._context.Process(
            target=_work, args=(theirs, env.to_environ(), self._job, self._args), daemon=False
        )
        process.start()
        theirs.close()
        worker = Worker(local_rank, process, ours)
        self.workers[local_rank] = worker
        self.everybody.append(worker)
        self._selector.register(ours, selectors.EVENT_READ, worker)
        self._selector.register(process.sentinel, selectors.EVENT_READ, worker)
        return worker

    def _hear(self, worker: Worker) -> None:
        try:
            data = worker.channel.recv(65536)
        except ConnectionResetError:
            data = b""
        if not data:
            self._selector.unregister(worker.channel)
            return
        for message in worker.decoder.feed(data):
            worker.heard.append(message)
            if message.topic is Topic.READY:
                worker.ready = message
                self._begin_if_ready()
            elif message.topic is Topic.SUSPECT:
                self.suspicions.append(message)
                self.at_suspicion(message)

    def _begin_if_ready(self) -> None:
        members = [self.workers[local_rank] for local_rank in self.members]
        if all(member.ready is not None and member.generation < self.generation for member in members):
            assert members[0].ready is not None
            port = members[0].ready.body["port"]
            for member in members:
                member.generation = self.generation
                member.tell(Topic.WORLD, **asdict(self._world(port, member.local_rank)))

    def _bury(self, worker: Worker) -> None:
        worker.is_gone = True
        self._selector.unregister(worker.process.sentinel)
        worker.process.join()
        if self.workers.get(worker.local_rank) is not worker:
            return
        if worker.local_rank in self.members and worker.process.exitcode != 0:
            self.losses.append(worker.local_rank)
            self.at_loss(worker.local_rank)
            self._begin_if_ready()

    def _describe(self) -> str:
        lines = [f"generation {self.generation}, members {self.members}"]
        for worker in self.everybody:
            state = f"exit {worker.process.exitcode}" if worker.is_gone else "running"
            lines.append(f"local rank {worker.local_rank}: {state}, {worker.heard[-3:]}")
        return "\n".join(lines)


def _work(
    channel: socket.socket, environ: dict[str, str], job: Callable[..., None], args: tuple[Any, ...]
) -> None:
    descriptor = channel.detach()
    os.environ.update(environ, BAGUARUN_CONTROL_FD=str(descriptor))
    # As in a script: a loader's processes see by their parent that this one was killed.
    multiprocessing.set_start_method("fork", force=True)
    import torch

    torch.set_num_threads(1)
    try:
        job(*args)
        code = 0
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    # As a script ends, but for what multiprocessing would wait for.
    os._exit(code)
