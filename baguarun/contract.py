"""All that crosses a process border: what agents tell each other and what a worker is told.

Values only, frozen, and readable as JSON. The worker side reads its place from the environment here and
nowhere else (`WorkerEnv.from_environ`).
"""

from __future__ import annotations

import enum
import json
import os
import signal as _signal
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

_CONTROL_HEADER = struct.Struct("!IB")

_PLACE = frozenset(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"))

STACKS_SIGNAL = _signal.SIGQUIT
"""Has a worker that has entered `baguarun.elastic.run` in place write the stacks of all its threads to its
stderr; as in other runtimes."""


@dataclass(frozen=True, kw_only=True)
class World:
    """One agreed membership, as one of its nodes sees it."""

    job_id: str
    """The job that this World belongs to."""
    generation: int
    """Number of this World, from 1; every name and port of the job is scoped by it."""
    node_rank: int
    """Place of this node among the nodes, 0 <= node_rank < num_nodes."""
    num_nodes: int
    """Nodes in this World."""
    first_rank: int
    """Rank of this node's local rank 0; its workers have consecutive ranks."""
    local_world_size: int
    """Workers on this node (nodes may differ)."""
    world_size: int
    """Workers in all."""
    master_addr: str
    """Address of node 0, where rank 0's worker hosts c10d's TCPStore."""
    master_port: int
    """Port of that TCPStore, picked anew by node 0's agent for each generation."""
    restart_count: int
    """Restarts charged to the job so far (membership changes are not charged)."""
    max_restarts: int
    """Restarts the job may use up."""
    net_secret: str = field(default="", repr=False)
    """What the job's workers prove to each other when they connect; empty where the nodes share no store."""
    local_ranks: tuple[int, ...] = ()
    """Local ranks of this node's workers, in the order of their ranks; empty: 0 to local_world_size - 1."""
    in_place: bool = False
    """Workers of older Worlds go on in it; otherwise all are started anew."""

    def rank_of(self, local_rank: int) -> int:
        """Rank of this node's worker with that local rank. Raises `ValueError` if it has no place."""
        return self.first_rank + (self.local_ranks or range(self.local_world_size)).index(local_rank)

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> World:
        fields = json.loads(data)
        return cls(**{**fields, "local_ranks": tuple(fields["local_ranks"])})


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How one worker failed; the first of a generation is the job's root cause."""

    generation: int
    node: str
    """Name of the node, as in the output prefix."""
    rank: int
    local_rank: int
    pid: int
    exit_code: int | None
    """Exit status, or None when a signal ended the worker."""
    signal: int | None
    """Signal number that ended the worker, or None."""
    timestamp_s: float
    """Unix time at which the agent saw the exit (or the time in the worker's error file)."""
    message: str = ""
    """Last line of the exception, if the worker left one."""
    traceback: str = ""
    """The worker's traceback, from its error file (`@record`) or from the end of its stderr."""
    log_path: str = ""
    """Where the whole output of the worker lies on its node, if it was kept."""

    @property
    def process_exit_code(self) -> int:
        """What the launcher exits with on behalf of this worker: its status, or 128 + signal."""
        return 128 + self.signal if self.signal is not None else (self.exit_code or 1)

    @property
    def how(self) -> str:
        """Its end, in words."""
        if self.signal is not None:
            return f"killed by {_signal_name(self.signal)}"
        return f"exited with code {self.exit_code}"

    def summary(self) -> str:
        """One line: who, where, how."""
        return (
            f"rank {self.rank} on node {self.node} (local rank {self.local_rank}, pid {self.pid}) "
            f"{self.how} in generation {self.generation}"
        )

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Failure:
        return cls(**json.loads(data))


def _signal_name(number: int) -> str:
    try:
        return f"{_signal.Signals(number).name} (signal {number})"
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True, kw_only=True)
class WorkerEnv:
    """What one worker learns from its environment: torchrun's names, plus `BAGUARUN_*` for what is ours."""

    rank: int
    local_rank: int
    node_rank: int
    num_nodes: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int
    """Port of rank 0's TCPStore; 0 for a newcomer, which is alone until it is taken in."""
    job_id: str
    restart_count: int
    max_restarts: int
    generation: int = 0
    """Generation of the World, from 1 (a static job's too); 0 for a script that no agent started."""
    role: str = "default"
    error_file: str = ""
    """Where `torch.distributed.elastic.multiprocessing.errors.record` writes the exception."""
    algorithm: str | None = None
    """Algorithm chosen on the command line, used where the script names none."""
    timeline: str = ""
    """Recordings of the engine go to files that begin with this path; empty for none."""
    control_fd: int | None = None
    """The worker's end of its control channel; None where the job is not resized in place."""
    detect_timeout_s: float | None = None
    """`--detect-timeout`; None where the job is not resized in place."""
    extra: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Further variables for this worker alone (device binding, OMP_NUM_THREADS, the transport's)."""
    named: frozenset[str] = field(default=frozenset(), repr=False, compare=False)
    """Which of the variables of a worker's place were there to be read; the others have their defaults."""

    @classmethod
    def for_worker(cls, world: World, local_rank: int, **rest: Any) -> WorkerEnv:
        return cls(
            rank=world.rank_of(local_rank),
            local_rank=local_rank,
            node_rank=world.node_rank,
            num_nodes=world.num_nodes,
            world_size=world.world_size,
            local_world_size=world.local_world_size,
            master_addr=world.master_addr,
            master_port=world.master_port,
            job_id=world.job_id,
            restart_count=world.restart_count,
            max_restarts=world.max_restarts,
            generation=world.generation,
            **rest,
        )

    @classmethod
    def for_newcomer(cls, job_id: str, local_rank: int, **rest: Any) -> WorkerEnv:
        """For a worker that is started while others train: a World of its own until it is taken in."""
        return cls(
            rank=0,
            local_rank=local_rank,
            node_rank=0,
            num_nodes=1,
            world_size=1,
            local_world_size=1,
            master_addr="127.0.0.1",
            master_port=0,
            job_id=job_id,
            **rest,
        )

    @property
    def timeline_part(self) -> str:
        """This worker's own file of the timeline: no other worker and no other generation uses it."""
        if not self.timeline:
            return ""
        generation = f".generation{self.generation}" if self.generation else ""
        return f"{self.timeline}{generation}.rank{self.rank}"

    def to_environ(self) -> dict[str, str]:
        """The variables a torchrun script reads, and ours."""
        env = {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "GROUP_RANK": str(self.node_rank),
            "ROLE_RANK": str(self.rank),
            "ROLE_NAME": self.role,
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_WORLD_SIZE": str(self.num_nodes),
            "ROLE_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": self.master_addr,
            "TORCHELASTIC_RUN_ID": self.job_id,
            "TORCHELASTIC_RESTART_COUNT": str(self.restart_count),
            "TORCHELASTIC_MAX_RESTARTS": str(self.max_restarts),
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            "BAGUARUN_GENERATION": str(self.generation),
        }
        if self.master_port:
            env["MASTER_PORT"] = str(self.master_port)
        if self.error_file:
            env["TORCHELASTIC_ERROR_FILE"] = self.error_file
        if self.algorithm:
            env["BAGUARUN_ALGORITHM"] = self.algorithm
        if self.timeline:
            env["BAGUARUN_TIMELINE"] = self.timeline
        if self.control_fd is not None:
            env["BAGUARUN_CONTROL_FD"] = str(self.control_fd)
        if self.detect_timeout_s is not None:
            env["BAGUARUN_DETECT_TIMEOUT_S"] = f"{self.detect_timeout_s:g}"
        env.update(self.extra)
        return env

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> WorkerEnv:
        """Read a worker's place; a script started by plain `python` is a World of one."""
        env = os.environ if environ is None else environ

        def number(name: str, default: int) -> int:
            return int(env.get(name, default))

        return cls(
            rank=number("RANK", 0),
            local_rank=number("LOCAL_RANK", 0),
            # The older name is looked at only where the newer one is not there: it may hold anything.
            node_rank=int(env.get("GROUP_RANK") or env.get("NODE_RANK") or 0),
            num_nodes=number("GROUP_WORLD_SIZE", 1),
            world_size=number("WORLD_SIZE", 1),
            local_world_size=number("LOCAL_WORLD_SIZE", number("WORLD_SIZE", 1)),
            master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
            master_port=number("MASTER_PORT", 0),
            job_id=env.get("TORCHELASTIC_RUN_ID", ""),
            restart_count=number("TORCHELASTIC_RESTART_COUNT", 0),
            max_restarts=number("TORCHELASTIC_MAX_RESTARTS", 0),
            generation=number("BAGUARUN_GENERATION", 0),
            role=env.get("ROLE_NAME", "default"),
            error_file=env.get("TORCHELASTIC_ERROR_FILE", ""),
            algorithm=env.get("BAGUARUN_ALGORITHM"),
            timeline=env.get("BAGUARUN_TIMELINE", ""),
            control_fd=number("BAGUARUN_CONTROL_FD", 0) or None,
            detect_timeout_s=float(env.get("BAGUARUN_DETECT_TIMEOUT_S", 0)) or None,
            named=_PLACE & env.keys(),
        )


class Topic(enum.IntEnum):
    """What a message on the control channel is about; its body is JSON.

    On the wire: 4 bytes length of the body and 1 byte topic, in network order, then the body. One channel is
    a pair of connected stream sockets: the agent has one end, the worker inherits the other as
    `WorkerEnv.control_fd`. End of file means that the other side is gone; a worker exits then.
    """

    WORLD = 1
    """To the worker: `World` to enter; it had said READY."""
    ABORT = 2
    """To the worker: {"generation", "reason"}. Somebody is lost: end all communication, say READY."""
    SWITCH = 3
    """To the worker: {"generation", "reason"}. Nobody is lost: go on to the boundary that all agree on, then
    say READY. With "halts": true no World is to follow for now: leave a checkpoint of that commit."""
    LEAVE = 4
    """To the worker: {"generation", "reason"}. As SWITCH, also "halts", but exit with 0 at the boundary."""
    PING = 5
    """To the worker, which answers with PONG, whatever its training does: {"lease_ms", "newcomers"}. For so
    long the node cannot be taken for lost, and the job cannot go on elsewhere without it; with "newcomers":
    true workers are likely to come soon that will have to be taken in."""

    READY = 16
    """To the agent: {"generation", "port", "steps"}. Waits for a World: it has left `generation` (0: it was
    in none), listens on `port` for the case that it becomes rank 0, and has committed `steps`."""
    PROGRESS = 17
    """To the agent: {"generation", "steps"}. So many steps are committed. With "begins": true the worker has
    entered that World and steps next; with "ends": true it has done all its steps. Else this is its first
    step there: of the further ones it tells in every PONG."""
    SUSPECT = 18
    """To the agent: {"generation", "rank", "silence", "reason"}. Communication broke and no news of the
    membership has come; `rank` is who the transport blames, None if nobody; "silence": it is not heard."""
    PONG = 19
    """To the agent: the body of the PING, and "waits": whether a thread of the worker waits in communication,
    None where that cannot be told (NCCL, gloo). In a World also "generation" and "steps", as in PROGRESS, and
    "busy_s": the time between the commit told of in the PONG before and this one's in which it did not wait
    for others; None where that cannot be told, or if that was another World's."""

    ARRIVED = 20
    """To the agent: {}. A newcomer has called `baguarun.elastic.run`; READY follows when it has made room for
    what it will be sent."""


@dataclass(frozen=True)
class ControlMessage:
    """One message on a control channel."""

    topic: Topic
    body: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        payload = json.dumps(self.body, separators=(",", ":")).encode()
        return _CONTROL_HEADER.pack(len(payload), self.topic) + payload


class ControlDecoder:
    """Cuts what comes out of a control channel into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[ControlMessage]:
        """The messages that `data` completes. Raises `ValueError` for an unknown topic."""
        self._buffer += data
        messages: list[ControlMessage] = []
        while len(self._buffer) >= _CONTROL_HEADER.size:
            length, topic = _CONTROL_HEADER.unpack_from(self._buffer)
            end = _CONTROL_HEADER.size + length
            if len(self._buffer) < end:
                break
            body = json.loads(bytes(self._buffer[_CONTROL_HEADER.size : end]))
            messages.append(ControlMessage(Topic(topic), body))
            del self._buffer[:end]
        return messages
