"""How many workers a node takes and which CPUs each of them runs on."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class BindingPolicy(enum.Enum):
    NONE = "none"
    NUMA = "numa"
    """Each worker on the NUMA node of its GPU, CPU workers evenly over the nodes; one node: no binding."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU as CUDA shows it to the workers: its place in the list is the local rank that uses it."""

    name: str
    numa_node: int | None


@dataclass(frozen=True, kw_only=True)
class Topology:
    """What of the machine matters for placing workers."""

    numa_cpus: Mapping[int, tuple[int, ...]]
    """Usable CPUs by NUMA node."""
    gpus: tuple[Gpu, ...] = ()


@dataclass(frozen=True, kw_only=True)
class WorkerBinding:
    cpus: tuple[int, ...] = ()
    """CPUs to bind to, empty for no binding."""
    env: Mapping[str, str]
    """Variables to add for this worker (OMP_NUM_THREADS)."""


@dataclass(frozen=True, kw_only=True)
class BindingPlan:
    workers: tuple[WorkerBinding, ...]
    """By local rank."""
    notices: tuple[str, ...]
    """What the user should be told once."""


def resolve_slots(nproc_per_node: str, environ: Mapping[str, str]) -> int:
    """Workers of this node for `--nproc-per-node gpu|cpu|auto|N`; raises UsageError."""
    raise NotImplementedError


def read_topology(environ: Mapping[str, str]) -> Topology:
    """The NUMA nodes, and the GPUs that CUDA_VISIBLE_DEVICES leaves."""
    raise NotImplementedError


def plan_binding(
    slots: int, topology: Topology, policy: BindingPolicy, environ: Mapping[str, str]
) -> BindingPlan:
    """Place `slots` workers; pure."""
    raise NotImplementedError
