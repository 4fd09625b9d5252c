"""Bagua's MPI-style primitives, on torch.distributed: CPU tensors over baguanet or Gloo, CUDA ones over NCCL.

Every primitive is collective over its communicator `comm` (see `CommLike`; by default the default group's)
and returns at once, with None, on a rank that is not a member. `src` and `dst` are ranks of the communicator.
Tensors are dense, with the dtype and device of each other and with the same element counts on all ranks; only
element counts matter, shapes do not. Outputs are contiguous. Where one tensor is all that a primitive has
(send, recv, broadcast, the _inplace forms) it may also be dense in another order, as channels_last is, and
travels as it lies in memory: then it must lie alike on all ranks. On CPU a primitive returns when its result
is there; on CUDA when it is enqueued, in order with the current stream.

Each raises `ArgumentError` (a `ValueError`) for tensors or ranks that cannot be meant, `NoGroupError` (a
`RuntimeError`) before `init_process_group`, and what the backend raises if a peer is lost or the timeout
passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from baguarun.errors import ArgumentError
from baguarun.torch_api.arguments import (
    Pieces,
    ReduceOp,
    equal_part,
    input_of,
    memory_of,
    other_rank,
    output_of,
    require_count,
    require_rank,
    require_same_kind,
    sent_of,
    torch_op,
)
from baguarun.torch_api.groups import (
    BaguaProcessGroup,
    CommLike,
    CommMember,
    Communicator,
    from_torch_group,
    group_of,
    init_process_group,
    is_initialized,
    new_group,
)
from baguarun.torch_api.groups import default_group as _get_default_group
from baguarun.torch_api.utils import flatten, unflatten

__all__ = [
    "ArgumentError",
    "BaguaProcessGroup",
    "CommMember",
    "Communicator",
    "ReduceOp",
    "_get_default_group",
    "_rank_not_in_comm",
    "_rank_not_in_group",
    "allgather",
    "allgather_inplace",
    "allreduce",
    "allreduce_coalesced_inplace",
    "allreduce_inplace",
    "alltoall",
    "alltoall_inplace",
    "alltoall_v",
    "alltoall_v_inplace",
    "barrier",
    "broadcast",
    "broadcast_coalesced",
    "broadcast_object",
    "from_torch_group",
    "gather",
    "gather_inplace",
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
]


def send(tensor: torch.Tensor, dst: int, comm: CommLike = None) -> None:
    """Send `tensor` to rank `dst`, another one, which calls `recv`."""
    group = group_of(comm)
    if group is not None:
        peer = other_rank("send", "dst", dst, group)
        dist.send(sent_of("send", "tensor", tensor), group=group, group_dst=peer)


def recv(tensor: torch.Tensor, src: int, comm: CommLike = None) -> None:
    """Fill `tensor` with what rank `src` sends; count and dtype are the sender's."""
    group = group_of(comm)
    if group is not None:
        peer = other_rank("recv", "src", src, group)
        dist.recv(memory_of("recv", "tensor", tensor), group=group, group_src=peer)


def broadcast(tensor: torch.Tensor, src: int = 0, comm: CommLike = None) -> None:
    """Fill `tensor` on all ranks with that of rank `src`."""
    group = group_of(comm)
    if group is not None:
        root = require_rank("broadcast", "src", src, group)
        dist.broadcast(memory_of("broadcast", "tensor", tensor), group=group, group_src=root)


def broadcast_coalesced(tensors: Sequence[torch.Tensor], src: int = 0, comm: CommLike = None) -> None:
    """`broadcast` of several tensors of one dtype, as one message."""
    group = group_of(comm)
    if group is not None and tensors:
        whole = flatten(tensors)
        broadcast(whole, src, group)
        _copy_back(whole, tensors)


def broadcast_object(obj: Any, src: int = 0, comm: CommLike = None) -> Any:
    """The object that rank `src` gave; `obj` is read there only. It travels pickled: trust the peers.

    Tensors in it arrive on the device that they had.
    """
    group = group_of(comm)
    if group is None:
        return None
    objects = [obj]
    dist.broadcast_object_list(
        objects, group=group, group_src=require_rank("broadcast_object", "src", src, group)
    )
    return objects[0]


def reduce(
    send_tensor: torch.Tensor,
    recv_tensor: torch.Tensor,
    dst: int,
    op: ReduceOp = ReduceOp.SUM,
    comm: CommLike = None,
) -> None:
    """Combine `send_tensor` of all ranks into `recv_tensor` of rank `dst`, of the same count.

    On the other ranks `recv_tensor` stays as it was.
    """
    group = group_of(comm)
    if group is None:
        return
    require_same_kind("reduce", send_tensor, recv_tensor)
    result = input_of("reduce", "send_tensor", send_tensor).clone()
    require_count("reduce", "recv_tensor", recv_tensor, result.numel(), "send_tensor's count")
    root = require_rank("reduce", "dst", dst, group)
    # On all ranks, as which of them is the root is no reason to fail on one only.
    into = output_of("reduce", "recv_tensor", recv_tensor)
    # In a copy: what a backend leaves in the buffers of the other ranks is its own affair.
    dist.reduce(result, op=torch_op("reduce", op, result), group=group, group_dst=root)
    if dist.get_rank(group) == root:
        into.copy_(result)


def reduce_inplace(
    tensor: torch.Tensor, dst: int, op: ReduceOp = ReduceOp.SUM, comm: CommLike = None
) -> None:
    """`reduce` with the result in `tensor` of rank `dst`; the other ranks' stay as they were."""
    group = group_of(comm)
    if group is not None:
        flat = memory_of("reduce_inplace", "tensor", tensor)
        reduce(flat, flat, dst, op, group)


def allreduce(
    send_tensor: torch.Tensor,
    recv_tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    comm: CommLike = None,
) -> None:
    """Combine `send_tensor` of all ranks into every `recv_tensor`, of its count: the same bits for all."""
    group = group_of(comm)
    if group is None:
        return
    require_same_kind("allreduce", send_tensor, recv_tensor)
    source = input_of("allreduce", "send_tensor", send_tensor)
    require_count("allreduce", "recv_tensor", recv_tensor, source.numel(), "send_tensor's count")
    result = output_of("allreduce", "recv_tensor", recv_tensor)
    operation = torch_op("allreduce", op, source)
    result.copy_(source)
    dist.all_reduce(result, op=operation, group=group)


def allreduce_inplace(tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, comm: CommLike = None) -> None:
    """`allreduce` with the result in `tensor`."""
    group = group_of(comm)
    if group is not None:
        flat = memory_of("allreduce_inplace", "tensor", tensor)
        allreduce(flat, flat, op, group)


def allreduce_coalesced_inplace(
    tensors: Sequence[torch.Tensor], op: ReduceOp = ReduceOp.SUM, comm: CommLike = None
) -> None:
    """`allreduce_inplace` of several tensors of one dtype, as one message."""
    group = group_of(comm)
    if group is not None and tensors:
        whole = flatten(tensors)
        allreduce_inplace(whole, op, group)
        _copy_back(whole, tensors)


def allgather(send_tensor: torch.Tensor, recv_tensor: torch.Tensor, comm: CommLike = None) -> None:
    """Put `send_tensor` of all ranks one after the other into `recv_tensor`, of nranks times its count."""
    group = group_of(comm)
    if group is None:
        return
    require_same_kind("allgather", send_tensor, recv_tensor)
    source = input_of("allgather", "send_tensor", send_tensor)
    total = dist.get_world_size(group) * source.numel()
    require_count("allgather", "recv_tensor", recv_tensor, total, "nranks times send_tensor's count")
    dist.all_gather_into_tensor(output_of("allgather", "recv_tensor", recv_tensor), source, group=group)


def allgather_inplace(tensor: torch.Tensor, comm: CommLike = None) -> None:
    """`allgather` of nranks equal parts of `tensor`, of which each rank gives the one with its number."""
    group = group_of(comm)
    if group is not None:
        flat = memory_of("allgather_inplace", "tensor", tensor)
        count = equal_part("allgather_inplace", "tensor", flat, dist.get_world_size(group))
        allgather(_parts(flat, count, group)[dist.get_rank(group)].clone(), flat, group)


def gather(send_tensor: torch.Tensor, recv_tensor: torch.Tensor, dst: int, comm: CommLike = None) -> None:
    """Put `send_tensor` of all ranks one after the other into `recv_tensor` of rank `dst`.

    It has nranks times the count of `send_tensor` there; on the other ranks it is not looked at.
    """
    group = group_of(comm)
    if group is None:
        return
    root = require_rank("gather", "dst", dst, group)
    source = input_of("gather", "send_tensor", send_tensor)
    parts = None
    if dist.get_rank(group) == root:
        require_same_kind("gather", send_tensor, recv_tensor)
        total = dist.get_world_size(group) * source.numel()
        require_count("gather", "recv_tensor", recv_tensor, total, "nranks times send_tensor's count")
        parts = _parts(output_of("gather", "recv_tensor", recv_tensor), source.numel(), group)
    dist.gather(source, parts, group=group, group_dst=root)


def gather_inplace(tensor: torch.Tensor, count: int, dst: int, comm: CommLike = None) -> None:
    """`gather` of `count` elements per rank: `tensor` has `count`, on rank `dst` nranks times as many.

    There, the part with its own number is what it gives.
    """
    group = group_of(comm)
    if group is None:
        return
    root = require_rank("gather_inplace", "dst", dst, group)
    flat = memory_of("gather_inplace", "tensor", tensor)
    gather(_rooted_part("gather_inplace", flat, count, root, group).clone(), flat, dst, group)


def scatter(send_tensor: torch.Tensor, recv_tensor: torch.Tensor, src: int, comm: CommLike = None) -> None:
    """Deal the nranks equal parts of `send_tensor` of rank `src` to all ranks' `recv_tensor`.

    On the other ranks `send_tensor` is not looked at.
    """
    group = group_of(comm)
    if group is None:
        return
    root = require_rank("scatter", "src", src, group)
    result = output_of("scatter", "recv_tensor", recv_tensor)
    parts = None
    if dist.get_rank(group) == root:
        require_same_kind("scatter", send_tensor, recv_tensor)
        total = dist.get_world_size(group) * result.numel()
        require_count("scatter", "send_tensor", send_tensor, total, "nranks times recv_tensor's count")
        parts = _parts(input_of("scatter", "send_tensor", send_tensor), result.numel(), group)
    dist.scatter(result, parts, group=group, group_src=root)


def scatter_inplace(tensor: torch.Tensor, count: int, src: int, comm: CommLike = None) -> None:
    """`scatter` of `count` elements per rank: `tensor` has `count`, on rank `src` nranks times as many.

    There, it stays as it was.
    """
    group = group_of(comm)
    if group is None:
        return
    root = require_rank("scatter_inplace", "src", src, group)
    flat = memory_of("scatter_inplace", "tensor", tensor)
    mine = _rooted_part("scatter_inplace", flat, count, root, group)
    scatter(flat, torch.empty_like(mine) if dist.get_rank(group) == root else mine, src, group)


def reduce_scatter(
    send_tensor: torch.Tensor,
    recv_tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    comm: CommLike = None,
) -> None:
    """Combine `send_tensor`, nranks equal parts; each rank gets the one with its number as `recv_tensor`."""
    group = group_of(comm)
    if group is None:
        return
    require_same_kind("reduce_scatter", send_tensor, recv_tensor)
    source = input_of("reduce_scatter", "send_tensor", send_tensor)
    result = output_of("reduce_scatter", "recv_tensor", recv_tensor)
    total = dist.get_world_size(group) * result.numel()
    require_count("reduce_scatter", "send_tensor", source, total, "nranks times recv_tensor's count")
    _reduce_scatter(result, source, op=torch_op("reduce_scatter", op, source), group=group)


def reduce_scatter_inplace(tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, comm: CommLike = None) -> None:
    """`reduce_scatter` into the first of nranks parts of `tensor`, on every rank; the rest stays as it was.

    That is where MPI_Reduce_scatter_block puts it with MPI_IN_PLACE.
    """
    group = group_of(comm)
    if group is not None:
        flat = memory_of("reduce_scatter_inplace", "tensor", tensor)
        count = equal_part("reduce_scatter_inplace", "tensor", flat, dist.get_world_size(group))
        result = flat.new_empty(count)
        reduce_scatter(flat, result, op, group)
        flat[:count].copy_(result)


def alltoall(send_tensor: torch.Tensor, recv_tensor: torch.Tensor, comm: CommLike = None) -> None:
    """Send part i of nranks equal parts of `send_tensor` to rank i; part i of `recv_tensor` is from it."""
    group = group_of(comm)
    if group is None:
        return
    require_same_kind("alltoall", send_tensor, recv_tensor)
    source = input_of("alltoall", "send_tensor", send_tensor)
    equal_part("alltoall", "send_tensor", source, dist.get_world_size(group))
    require_count("alltoall", "recv_tensor", recv_tensor, source.numel(), "send_tensor's count")
    dist.all_to_all_single(output_of("alltoall", "recv_tensor", recv_tensor), source, group=group)


def alltoall_inplace(tensor: torch.Tensor, comm: CommLike = None) -> None:
    """`alltoall` with the result in `tensor`."""
    group = group_of(comm)
    if group is not None:
        flat = memory_of("alltoall_inplace", "tensor", tensor)
        alltoall(flat.clone(), flat, group)


def alltoall_v(
    send_tensor: torch.Tensor,
    send_counts: Sequence[int],
    send_displs: Sequence[int],
    recv_tensor: torch.Tensor,
    recv_counts: Sequence[int],
    recv_displs: Sequence[int],
    comm: CommLike = None,
) -> None:
    """Send `send_counts[i]` elements, from `send_displs[i]` on, to rank i; `recv_counts` come from there.

    What rank a sends to b, b expects from a. Counts may be zero. Elements of `recv_tensor` outside of the
    parts stay as they were. Displacements that are not the running sum of the counts cost a copy. Raises
    `ArgumentError` for parts outside of their tensor or parts of `recv_tensor` that overlap.
    """
    group = group_of(comm)
    if group is None:
        return
    require_same_kind("alltoall_v", send_tensor, recv_tensor)
    ranks = dist.get_world_size(group)
    source = input_of("alltoall_v", "send_tensor", send_tensor)
    target = output_of("alltoall_v", "recv_tensor", recv_tensor)
    sent = Pieces("send_tensor", source, send_counts, send_displs, ranks)
    received = Pieces("recv_tensor", target, recv_counts, recv_displs, ranks)
    received.require_apart("recv_tensor")
    outgoing = sent.packed()
    incoming = received.packed()
    if outgoing is None:
        outgoing = torch.cat(sent.views())
    result = torch.empty_like(target[: sum(received.counts)]) if incoming is None else incoming
    dist.all_to_all_single(result, outgoing, received.counts, sent.counts, group=group)
    if incoming is None:
        for part, came in zip(received.views(), torch.split(result, received.counts), strict=True):
            part.copy_(came)


def alltoall_v_inplace(
    tensor: torch.Tensor, counts: Sequence[int], displs: Sequence[int], comm: CommLike = None
) -> None:
    """`alltoall_v` that swaps the parts of `tensor`: as many elements come from each rank as go there."""
    group = group_of(comm)
    if group is not None:
        flat = memory_of("alltoall_v_inplace", "tensor", tensor)
        alltoall_v(flat.clone(), counts, displs, flat, counts, displs, group)


def barrier(comm: CommLike = None) -> None:
    """Return when all ranks of the communicator have called it."""
    group = group_of(comm)
    if group is not None:
        dist.barrier(group=group)


def _rank_not_in_group(group: BaguaProcessGroup | None = None) -> bool:
    """Whether this rank is outside of `group`; of the default group no rank is."""
    return _rank_not_in_comm(group)


def _rank_not_in_comm(comm: CommLike = None) -> bool:
    """Whether primitives do nothing with `comm` on this rank."""
    return comm is not None and group_of(comm) is None


# The older name is deprecated from torch 2.13 on, and the only one before.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _rooted_part(
    where: str, flat: torch.Tensor, count: int, root: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """This rank's `count` elements: its part on the root, the whole tensor elsewhere."""
    if dist.get_rank(group) != root:
        require_count(where, "tensor", flat, count, "count")
        return flat
    require_count(where, "tensor", flat, count * dist.get_world_size(group), "nranks times count")
    return _parts(flat, count, group)[root]


def _parts(flat: torch.Tensor, count: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
    return [flat[rank * count : (rank + 1) * count] for rank in range(dist.get_world_size(group))]


def _copy_back(whole: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    for tensor, result in zip(tensors, unflatten(whole, tensors), strict=True):
        tensor.detach().copy_(result)
