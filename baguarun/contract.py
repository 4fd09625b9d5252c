"""All that crosses a process border: what agents tell each other and what a worker is told.

Values only, frozen, and readable as JSON. The worker side reads its place from the environment here and
nowhere else (`WorkerEnv.from_environ`).
"""

from __future__ import annotations

import json
import os
import signal as _signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


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

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> World:
        return cls(**json.loads(data))


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

    def summary(self) -> str:
        """One line: who, where, how."""
        if self.signal is not None:
            how = f"killed by {_signal_name(self.signal)}"
        else:
            how = f"exited with code {self.exit_code}"
        return (
            f"rank {self.rank} on node {self.node} (local rank {self.local_rank}, pid {self.pid}) "
            f"{how} in generation {self.generation}"
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
    extra: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Further variables for this worker alone (device binding, OMP_NUM_THREADS, the transport's)."""

    @classmethod
    def for_worker(cls, world: World, local_rank: int, **rest: Any) -> WorkerEnv:
        return cls(
            rank=world.first_rank + local_rank,
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
            "MASTER_PORT": str(self.master_port),
            "TORCHELASTIC_RUN_ID": self.job_id,
            "TORCHELASTIC_RESTART_COUNT": str(self.restart_count),
            "TORCHELASTIC_MAX_RESTARTS": str(self.max_restarts),
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            "BAGUARUN_GENERATION": str(self.generation),
        }
        if self.error_file:
            env["TORCHELASTIC_ERROR_FILE"] = self.error_file
        if self.algorithm:
            env["BAGUARUN_ALGORITHM"] = self.algorithm
        if self.timeline:
            env["BAGUARUN_TIMELINE"] = self.timeline
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
            node_rank=number("GROUP_RANK", 0),
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
        )
