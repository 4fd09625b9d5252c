"""Weights on their way by rail: reduced inside the node, exchanged between nodes, spread inside the node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist

from baguarun.comm.rail_groups import RailGroups
from baguarun.errors import CommunicationError

Shards = list[torch.Tensor]
"""This rank's part of every tensor; views of them."""


class RailExchanger:
    """Runs the exchanges of one model one after the other, in the order of their start on all ranks.

    On the CPU a thread of its own takes each through its levels while training goes on; on an accelerator
    they are enqueued on a stream.
    """

    def __init__(self, groups: RailGroups) -> None:
        self.groups = groups
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bagua-rails")
        self._stream: torch.cuda.Stream | None = None

    @property
    def num_nodes(self) -> int:
        return len(self.groups.layout.nodes)

    @property
    def node_index(self) -> int:
        return self.groups.layout.node_index(self.groups.rank)

    def average(self, tensors: Sequence[torch.Tensor]) -> PendingRails:
        """Start to replace `tensors` by their averages over all ranks, however many each node has."""
        world_size = self.groups.layout.world_size

        def between(shards: Shards) -> None:
            _wait([_made(self.groups.rail).allreduce([shard], dist.AllreduceOptions()) for shard in shards])
            torch._foreach_div_(shards, world_size)

        return self._start(tensors, between)

    def average_with(
        self, tensors: Sequence[torch.Tensor], to_node: int | None, from_node: int | None
    ) -> PendingRails:
        """Start to replace `tensors` by the node's average, half and half with that of `from_node`.

        The node's average goes to `to_node`. None for both: the node stays by itself.
        """
        node_size = len(self.groups.layout.nodes[self.node_index])

        def between(shards: Shards) -> None:
            torch._foreach_div_(shards, node_size)
            if to_node is None or from_node is None:
                return
            received = [torch.empty_like(shard) for shard in shards]
            operations = []
            for mine, other in zip(shards, received, strict=True):
                operations.append(dist.P2POp(dist.isend, mine, group=self.groups.rail, group_peer=to_node))
                operations.append(dist.P2POp(dist.irecv, other, group=self.groups.rail, group_peer=from_node))
            _wait(dist.batch_isend_irecv(operations))
            torch._foreach_add_(shards, received)
            torch._foreach_div_(shards, 2)

        return self._start(tensors, between)

    def average_in_nodes(self, tensors: Sequence[torch.Tensor], between: Callable[[], None]) -> PendingRails:
        """Start to replace `tensors` by the node's average, or by what `between` makes of it.

        It is called on ranks that own a shard, when `part(tensors)` is the node's average there; on the CPU
        by the exchanger's own thread. What it raises `wait` raises.
        """
        node_size = len(self.groups.layout.nodes[self.node_index])

        def average(shards: Shards) -> None:
            torch._foreach_div_(shards, node_size)
            between()

        return self._start(tensors, average)

    def part(self, tensors: Sequence[torch.Tensor]) -> Shards:
        """What this rank owns of `tensors`, views of those that it owns something of."""
        layout, rank = self.groups.layout, self.groups.rank
        if not layout.rail_of(rank):
            return []
        place = layout.node_of(rank).index(rank)
        shards = [tensor.tensor_split(layout.num_rails)[place] for tensor in tensors]
        return [shard for shard in shards if shard.numel() > 0]

    def bytes_per_average(self, tensors: Sequence[torch.Tensor]) -> int:
        """Bytes that this rank's share of `average` comes to."""
        return self._bytes(tensors, 2 * (self.num_nodes - 1) / self.num_nodes)

    def bytes_per_exchange(self, tensors: Sequence[torch.Tensor], *, sends: bool) -> int:
        """Bytes that this rank's share of `average_with` comes to; `sends`: to another node, too."""
        return self._bytes(tensors, 1.0 if sends else 0.0)

    def _bytes(self, tensors: Sequence[torch.Tensor], times_between: float) -> int:
        layout, rank = self.groups.layout, self.groups.rank
        total = sum(tensor.nbytes for tensor in tensors)
        others = len(layout.node_of(rank)) - 1
        own = total // layout.num_rails if layout.rail_of(rank) else 0
        inside = (total - own if others else 0) + own * others
        return inside + int(own * times_between)

    def _start(self, tensors: Sequence[torch.Tensor], between: Callable[[Shards], None]) -> PendingRails:
        if tensors[0].device.type == "cpu":
            return PendingRails(tensors, self._thread.submit(self._run_or_abort, tensors, between), None)
        if self._stream is None:
            self._stream = torch.cuda.Stream(tensors[0].device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(tensors[0].device))
        with torch.cuda.stream(self._stream):
            self._run(tensors, between)
            return PendingRails(tensors, None, self._stream.record_event())

    def _run_or_abort(self, tensors: Sequence[torch.Tensor], between: Callable[[Shards], None]) -> None:
        try:
            self._run(tensors, between)
        except Exception:
            # Others of the node and the rail wait for this rank. Gloo's abort() does nothing: there they wait
            # until this process has ended, or for the group's timeout.
            for group in (self.groups.node, self.groups.rail):
                _made(group)._get_backend(torch.device("cpu")).abort()
            raise

    def _run(self, tensors: Sequence[torch.Tensor], between: Callable[[Shards], None]) -> None:
        layout, rank = self.groups.layout, self.groups.rank
        # By rail: the part of every tensor.
        dealt = [
            [shard for shard in shards if shard.numel() > 0]
            for shards in zip(*(tensor.tensor_split(layout.num_rails) for tensor in tensors), strict=True)
        ]
        with torch.no_grad():
            self._collect(dealt)
            own = dealt[layout.node_of(rank).index(rank)] if layout.rail_of(rank) else []
            if own:
                between(own)
            self._spread(dealt)

    # Straight to the groups: torch's functions do not know them any more once the program has said
    # destroy_process_group(), when an exchange may still be under way.

    def _collect(self, dealt: Sequence[Shards]) -> None:
        works = []
        for owner, shards in enumerate(dealt):
            options = dist.ReduceOptions()
            options.rootRank = owner
            works += [_made(self.groups.node).reduce([shard], options) for shard in shards]
        _wait(works)

    def _spread(self, dealt: Sequence[Shards]) -> None:
        works = []
        for owner, shards in enumerate(dealt):
            options = dist.BroadcastOptions()
            options.rootRank = owner
            works += [_made(self.groups.node).broadcast([shard], options) for shard in shards]
        _wait(works)


class PendingRails:
    """Tensors on the way by rail; do not touch them until `wait`."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], running: Future[None] | None, event: torch.cuda.Event | None
    ) -> None:
        self._tensors = list(tensors)
        self._running = running
        self._event = event

    def is_done(self) -> bool:
        """Whether `wait` returns at once. Does not block."""
        if self._running is not None:
            return self._running.done()
        return self._event is None or self._event.query()  # type: ignore[no-untyped-call]

    def wait(self) -> list[torch.Tensor]:
        """The results: on CPU they are there, on an accelerator its current stream waits for them."""
        if self._running is not None:
            try:
                self._running.result()
            except RuntimeError as error:
                raise CommunicationError(
                    f"exchange of the model's weights between nodes failed: {error}"
                ) from error
        if self._event is not None:
            torch.cuda.current_stream(self._tensors[0].device).wait_event(self._event)
        return self._tensors


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


def _made(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    assert group is not None, "exchanges of weights want groups"
    return group
