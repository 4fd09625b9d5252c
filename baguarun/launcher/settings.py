"""What one `baguarun run` was asked to do: flags over environment over defaults, merged and checked here.

This is the agent side's only reader of the environment.
"""

from __future__ import annotations

import enum
import math
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baguarun.errors import UsageError

NO_JOB_ID = "none"
"""torchrun's name for a job that got none; fine as long as the job has its store to itself."""


class CommandKind(enum.Enum):
    """How `script` is started."""

    SCRIPT = "script"
    MODULE = "module"
    PROGRAM = "program"


class ElasticMode(enum.Enum):
    """What happens to workers when the World changes."""

    RESTART = "restart"
    IN_PLACE = "in-place"


class RdzvBackend(enum.Enum):
    """torchrun's rendezvous backends, as far as they have a meaning here."""

    C10D = "c10d"
    ETCD = "etcd"
    ETCD_V2 = "etcd-v2"
    STATIC = "static"


class BindPolicy(enum.Enum):
    """Which CPUs a worker may use."""

    NODE = "node"
    EXCLUSIVE = "exclusive"
    NONE = "none"


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """One node's part in a job. Checked when made; an impossible value raises `UsageError` naming its flag."""

    script: str
    """Script, module or program, as given."""
    script_args: tuple[str, ...] = ()
    """What follows it, untouched."""
    command_kind: CommandKind = CommandKind.SCRIPT
    """`-m` and `--no-python` say that `script` is a module or a program."""
    python: str = sys.executable
    """Interpreter for the workers; `$PYTHON_EXEC` if set, as in torchrun."""

    nproc_per_node: int | str = 1
    """Workers on this node: a number, or `gpu`, `cpu`, `auto` to be resolved by `binding.resolve_slots`."""
    bind: BindPolicy = BindPolicy.NODE
    """CPUs that workers are kept on; no effect on a machine with one NUMA node."""
    algorithm: str | None = None
    """Handed to workers as BAGUARUN_ALGORITHM; None leaves it to the script."""
    role: str = "default"
    """ROLE_NAME of the workers; otherwise unused."""

    min_nodes: int = 1
    """Fewest nodes that the job runs on."""
    max_nodes: int = 1
    """Most nodes that the job runs on; more wait as standby."""
    job_id: str = NO_JOB_ID
    """Name of the job, part of store keys and of log paths, the same on all its nodes."""
    store: str | None = None
    """URL of an etcd of one's own: `etcd://host:port[,host:port]`, `etcds://` for TLS."""
    store_password: str | None = field(default=None, repr=False)
    """From BAGUARUN_STORE_PASSWORD alone: a flag would show it to every user of the machine."""
    etcd_binary: str | None = None
    """From BAGUARUN_ETCD: the etcd to start where this agent hosts the store; None searches for one."""
    standalone: bool = False
    """One node with a store of its own, said aloud."""
    rdzv_backend: RdzvBackend | None = None
    """torchrun's choice of meeting place; None when not given."""
    rdzv_endpoint: str | None = None
    """torchrun's meeting place, `host[:port]`, or several of an etcd's."""
    rdzv_conf: Mapping[str, str] = field(default_factory=dict)
    """torchrun's further settings, known keys only (see `rdzv_conf.py`)."""
    master_addr: str | None = None
    """Static job: host of rank 0."""
    master_port: int | None = None
    """Static job: port of rank 0's TCPStore; None means torchrun's 29500."""
    node_rank: int | None = None
    """Static job: this node's place. Else a wish, honoured in the first World."""
    local_addr: str | None = None
    """Address at which other nodes reach this one; None finds it by routing."""
    node_name: str = "localhost"
    """This node in output prefixes and reports; its host name unless given."""

    elastic: ElasticMode = ElasticMode.RESTART
    """What happens to workers when the World changes."""
    max_restarts: int = 0
    """Failures that the whole job survives, counted for the job and not per node."""
    detect_timeout_s: float = 5.0
    """Silence after which a node is lost; lease, abort and settle times are derived from it."""
    join_timeout_s: float = 600.0
    """How long the job waits for `min_nodes`."""
    shutdown_timeout_s: float = 30.0
    """Grace between SIGTERM and SIGKILL: time to write a checkpoint."""

    log_dir: str | None = None
    """Base folder for the workers' output; None keeps none unless `tee` or `redirects` ask for it."""
    tee: str = "0"
    """Streams to files and console, torchrun's notation: 0-3, or `local_rank:0-3` joined by commas."""
    redirects: str = "0"
    """Streams to files only, same notation."""
    local_ranks_filter: frozenset[int] | None = None
    """Local ranks shown on the console; None shows all. Files are not affected."""
    metrics_port: int | None = None
    """Port of the Prometheus endpoint, 0 for any; None serves none."""

    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The agent's environment, which the workers inherit."""

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_names()
        self._check_times()
        self._check_output()
        if self.elastic is ElasticMode.IN_PLACE:
            raise UsageError("--elastic=in-place: not yet: workers cannot be resized in place; use --elastic restart")

    def _check_sizes(self) -> None:
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise UsageError(
                f"--nnodes={self.min_nodes}:{self.max_nodes}: want 1 <= MIN <= MAX; "
                "write the fewest nodes first, as --nnodes 1:4"
            )
        slots = self.nproc_per_node
        if slots not in ("gpu", "cpu", "auto") and not (isinstance(slots, int) and slots >= 1):
            raise UsageError(f"--nproc-per-node={slots}: want a number from 1, or gpu, cpu or auto")
        if self.node_rank is not None and not 0 <= self.node_rank < self.max_nodes:
            raise UsageError(
                f"--node-rank={self.node_rank}: want 0 <= N < {self.max_nodes}, the number of nodes; "
                "give --nnodes too, or another rank"
            )
        if self.max_restarts < 0:
            raise UsageError(f"--max-restarts={self.max_restarts}: want 0 or more; 0 ends the job at its first failure")

    def _check_names(self) -> None:
        _want_word("--job-id", self.job_id)
        _want_word("--node-name", self.node_name)
        _want_word("--role", self.role)
        if self.algorithm is not None and not re.fullmatch(r"[a-z][a-z0-9_]*", self.algorithm):
            raise UsageError(
                f"--algorithm={self.algorithm}: want a name in lower case, as gradient_allreduce or bytegrad"
            )
        if self.store is not None and not re.match(r"etcds?://[^/]", self.store):
            raise UsageError(f"--store={self.store}: want etcd://host:port[,host:port], or etcds:// for TLS")

    def _check_times(self) -> None:
        # 2 s is the shortest lease that etcd grants.
        _want_seconds("--detect-timeout", self.detect_timeout_s, at_least=2.0)
        _want_seconds("--join-timeout", self.join_timeout_s, at_least=1.0)
        _want_seconds("--shutdown-timeout", self.shutdown_timeout_s, at_least=0.0)

    def _check_output(self) -> None:
        for flag, value in (("--tee", self.tee), ("--redirects", self.redirects)):
            if not re.fullmatch(r"[0-3]|\d+:[0-3](,\d+:[0-3])*", value):
                raise UsageError(
                    f"{flag}={value}: want 0 (none), 1 (stdout), 2 (stderr) or 3 (both), "
                    "or one per local rank, as 0:3,1:2"
                )
        for flag, port, least in (("--master-port", self.master_port, 0), ("--metrics-port", self.metrics_port, 0)):
            if port is not None and not least <= port <= 65535:
                raise UsageError(f"{flag}={port}: want a port, {least} to 65535")

    @property
    def is_elastic(self) -> bool:
        """Whether the number of nodes may change."""
        return self.min_nodes < self.max_nodes


def _want_word(flag: str, value: str) -> None:
    """Names go into store keys, paths and line prefixes: one word that is hostile to none of them."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.:@+=-]{0,127}", value):
        raise UsageError(
            f"{flag}={value}: want 1 to 128 letters, digits or any of _.:@+=- that start with a letter, digit or _"
        )


def _want_seconds(flag: str, value: float, *, at_least: float) -> None:
    if not (math.isfinite(value) and value >= at_least):
        raise UsageError(f"{flag}={value:g}: want seconds, at least {at_least:g}")
