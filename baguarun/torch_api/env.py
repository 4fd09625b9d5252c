"""Bagua's `env` module: a worker's place in the job, as `init_process_group` was told, or by variables."""

from __future__ import annotations

import socket

import torch.distributed as dist

from baguarun.comm.groups import read_worker_env

__all__ = [
    "find_free_network_port",
    "get_local_rank",
    "get_local_size",
    "get_master_addr",
    "get_node_rank",
    "get_rank",
    "get_world_size",
]


def get_rank() -> int:
    """Rank of this worker; from its environment before `init_process_group`."""
    return dist.get_rank() if dist.is_initialized() else read_worker_env().rank


def get_world_size() -> int:
    """Workers in all; from the environment before `init_process_group`."""
    return dist.get_world_size() if dist.is_initialized() else read_worker_env().world_size


def get_local_rank() -> int:
    """Rank of this worker on its node: the number of its device."""
    return read_worker_env().local_rank


def get_local_size() -> int:
    """Workers on this node."""
    return read_worker_env().local_world_size


def get_node_rank() -> int:
    """Place of this node among the nodes: GROUP_RANK, which launchers of today set, else NODE_RANK."""
    return read_worker_env().node_rank


def get_master_addr() -> str:
    """Address of the node where rank 0 runs."""
    return read_worker_env().master_addr


def find_free_network_port() -> int:
    """A TCP port that was free on this machine a moment ago; somebody else may take it before you do."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    return port
