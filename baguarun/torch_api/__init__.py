"""Bagua's own names: a Bagua script runs when its import line becomes `import baguarun.torch_api as bagua`.

docs/bagua.md lists them, and what differs. Importing this package adds `with_bagua` to `torch.nn.Module`;
nothing else in baguarun patches torch.
"""

from __future__ import annotations

from torch import nn

from baguarun.torch_api import algorithms, communication, data_parallel, env, utils
from baguarun.torch_api.communication import (
    BaguaProcessGroup,
    ReduceOp,
    allgather,
    allgather_inplace,
    allreduce,
    allreduce_inplace,
    alltoall,
    alltoall_inplace,
    alltoall_v,
    alltoall_v_inplace,
    barrier,
    broadcast,
    broadcast_object,
    from_torch_group,
    gather,
    gather_inplace,
    init_process_group,
    is_initialized,
    new_group,
    recv,
    reduce,
    reduce_inplace,
    reduce_scatter,
    reduce_scatter_inplace,
    scatter,
    scatter_inplace,
    send,
)
from baguarun.torch_api.distributed import with_bagua
from baguarun.torch_api.env import get_local_rank, get_local_size, get_node_rank, get_rank, get_world_size

__all__ = [
    "BaguaProcessGroup",
    "ReduceOp",
    "algorithms",
    "allgather",
    "allgather_inplace",
    "allreduce",
    "allreduce_inplace",
    "alltoall",
    "alltoall_inplace",
    "alltoall_v",
    "alltoall_v_inplace",
    "barrier",
    "broadcast",
    "broadcast_object",
    "communication",
    "data_parallel",
    "env",
    "from_torch_group",
    "gather",
    "gather_inplace",
    "get_local_rank",
    "get_local_size",
    "get_node_rank",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "is_initialized",
    "new_group",
    "recv",
    "reduce",
    "reduce_inplace",
    "reduce_scatter",
    "reduce_scatter_inplace",
    "scatter",
    "scatter_inplace",
    "send",
    "utils",
    "with_bagua",
]

nn.Module.with_bagua = with_bagua  # type: ignore[attr-defined]
