"""How many workers a node takes and which CPUs each of them runs on.

A worker's GPU is the one that its LOCAL_RANK names among those that CUDA_VISIBLE_DEVICES leaves, as under
torchrun: the variable is read here, never rewritten.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from baguarun.errors import UsageError
from baguarun.launcher import devices
from baguarun.launcher.devices import Topology


class BindingPolicy(enum.Enum):
    NONE = "none"
    NUMA = "numa"
    """Each worker on the NUMA node of its GPU, CPU workers evenly over the nodes; one node: no binding."""


@dataclass(frozen=True, kw_only=True)
class WorkerBinding:
    cpus: tuple[int, ...] = ()
    """CPUs to bind to, empty for no binding."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables to add for this worker (OMP_NUM_THREADS)."""


@dataclass(frozen=True, kw_only=True)
class BindingPlan:
    workers: tuple[WorkerBinding, ...]
    """By local rank."""
    notices: tuple[str, ...] = ()
    """What the user should be told once."""


def resolve_slots(nproc_per_node: str, environ: Mapping[str, str]) -> int:
    """Workers of this node for `--nproc-per-node gpu|cpu|auto|N`; raises UsageError.

    gpu: one per GPU that CUDA sees; cpu: one per CPU that this process may use; auto: gpu if there is one.
    """
    if nproc_per_node == "cpu":
        return devices.count_cpus()
    if nproc_per_node in ("gpu", "auto"):
        num_gpus = len(devices.read_gpus(environ))
        if num_gpus or nproc_per_node == "auto":
            return num_gpus or devices.count_cpus()
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        because = "" if visible is None else f" with CUDA_VISIBLE_DEVICES={visible!r}"
        raise UsageError(
            f"--nproc-per-node gpu: no GPU found on this node{because}; "
            "look at `nvidia-smi`, or use cpu or a number"
        )
    if not nproc_per_node.isascii() or not nproc_per_node.isdecimal() or int(nproc_per_node) < 1:
        raise UsageError(f"--nproc-per-node {nproc_per_node}: want gpu, cpu, auto or a number from 1 up")
    return int(nproc_per_node)


def read_topology(environ: Mapping[str, str]) -> Topology:
    """The NUMA nodes, and the GPUs that CUDA_VISIBLE_DEVICES leaves (not looked for if there is one node)."""
    numa_cpus = devices.read_numa_cpus()
    gpus = devices.read_gpus(environ) if len(numa_cpus) > 1 else ()
    return Topology(numa_cpus=numa_cpus, gpus=gpus)


def plan_binding(
    slots: int, topology: Topology, policy: BindingPolicy, environ: Mapping[str, str]
) -> BindingPlan:
    """Place `slots` workers; pure."""
    env: dict[str, str] = {}
    notices: list[str] = []
    if slots > 1 and "OMP_NUM_THREADS" not in environ:
        env["OMP_NUM_THREADS"] = "1"
        notices.append(
            f"OMP_NUM_THREADS=1 for each of this node's {slots} workers, so that they do not crowd each "
            "other out; set it yourself for more threads per worker"
        )
    cpus: tuple[tuple[int, ...], ...] = ((),) * slots
    if policy is BindingPolicy.NUMA and len(topology.numa_cpus) > 1:
        if 0 < slots <= len(topology.gpus):
            cpus = _near_gpus(slots, topology)
            unknown = [local_rank for local_rank in range(slots) if not cpus[local_rank]]
            if unknown:
                notices.append(
                    f"local ranks {unknown} are not bound: the NUMA node of their GPU is not known"
                )
        elif slots >= len(topology.numa_cpus):
            cpus = _evenly(slots, topology)
    workers = tuple(WorkerBinding(cpus=cpus[local_rank], env=env) for local_rank in range(slots))
    return BindingPlan(workers=workers, notices=tuple(notices))


def _near_gpus(slots: int, topology: Topology) -> tuple[tuple[int, ...], ...]:
    return tuple(
        topology.numa_cpus.get(gpu.numa_node, ()) if gpu.numa_node is not None else ()
        for gpu in topology.gpus[:slots]
    )


def _evenly(slots: int, topology: Topology) -> tuple[tuple[int, ...], ...]:
    """Neighbouring ranks share a node, and a node gets workers in proportion to its usable CPUs."""
    nodes = [topology.numa_cpus[node] for node in sorted(topology.numa_cpus)]
    node_of_cpu = [node for node in nodes for _ in node]
    return tuple(
        node_of_cpu[(2 * local_rank + 1) * len(node_of_cpu) // (2 * slots)] for local_rank in range(slots)
    )
