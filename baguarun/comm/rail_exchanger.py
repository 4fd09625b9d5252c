"""Weights on their way by rail: reduced inside the node, exchanged between nodes, spread inside the node."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from itertools import cycle

import torch
import torch.distributed as dist

from baguarun.comm import timeline
from baguarun.comm.arrival import require_arrived
from baguarun.comm.rail_groups import RailGroups
from baguarun.comm.weights import pieces_of
from baguarun.errors import CommunicationError

# Each takes its trips. Weights of 34 MB between two nodes at 1 Gbit/s and 5 ms, in one group of Gloo: 382 ms
# with 8 of them, 398 and 480 with 4 and 16; on four lanes 344 with 8. Without latency 338, 347, 334; 330.
_MOST_PIECES = 8
# The next one is copied while one is summed up.
_FILLED_AHEAD = 2
Shards = list[torch.Tensor]
"""Parts of tensors; views of them."""
Between = Callable[[Iterator[torch.Tensor]], Iterator[object]]
"""Takes this rank's shards, each the sum of the node's when it comes out of the iterator, and yields once for
each, in the same order, when what the node is to get is in it."""


class RailExchanger:
    """Runs the exchanges of one model one after the other, in the order of their start on all ranks.

    On the CPU a thread of its own takes each through its levels while training goes on, in pieces: while one
    is between nodes, others are inside. On an accelerator they are enqueued on a stream.
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

    def average(
        self, tensors: Sequence[torch.Tensor], sources: Sequence[torch.Tensor] | None = None
    ) -> PendingRails:
        """Start to replace `tensors` by averages over all ranks, however many each node has: of themselves,
        or of `sources`, which are not to change until these have come."""
        world_size = self.groups.layout.world_size
        lanes = cycle(self.groups.lanes)

        def between(shards: Iterator[torch.Tensor]) -> Iterator[object]:
            started = [(shard, next(lanes).allreduce([shard], dist.AllreduceOptions())) for shard in shards]
            for shard, work in started:
                work.wait()
                yield shard.div_(world_size)

        return self._start(tensors, sources, between)

    def average_with(
        self,
        tensors: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        to_node: int | None,
        from_node: int | None,
    ) -> PendingRails:
        """Start to replace `tensors` by the node's average of `sources`, half and half with `from_node`'s.

        The node's average goes to `to_node`. None for both: the node stays by itself. The sources are not to
        change until these have come.
        """
        node_size = len(self.groups.layout.nodes[self.node_index])

        def swap(mine: torch.Tensor, to_node: int, from_node: int) -> tuple[torch.Tensor, list[dist.Work]]:
            other = torch.empty_like(mine)
            return other, dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.irecv, other, group=self.groups.rail, group_peer=from_node),
                    dist.P2POp(dist.isend, mine, group=self.groups.rail, group_peer=to_node),
                ]
            )

        def between(shards: Iterator[torch.Tensor]) -> Iterator[object]:
            averages = (shard.div_(node_size) for shard in shards)
            if to_node is None or from_node is None:
                yield from averages
                return
            started = [(mine, *swap(mine, to_node, from_node)) for mine in averages]
            for mine, other, works in started:
                _wait(works)
                yield mine.add_(other).div_(2)

        return self._start(tensors, sources, between)

    def average_in_nodes(self, tensors: Sequence[torch.Tensor], between: Callable[[], None]) -> PendingRails:
        """Start to replace `tensors` by the node's average, or by what `between` makes of it.

        It is called on ranks that own a shard, when `part(tensors)` is the node's average there; on the CPU
        by the exchanger's own thread. What it raises `wait` raises.
        """
        node_size = len(self.groups.layout.nodes[self.node_index])

        def average(shards: Iterator[torch.Tensor]) -> Iterator[object]:
            averages = [shard.div_(node_size) for shard in shards]
            between()
            yield from averages

        return self._start(tensors, None, average, in_pieces=False)

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

    def _start(
        self,
        tensors: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor] | None,
        between: Between,
        *,
        in_pieces: bool = True,
    ) -> PendingRails:
        cut = _pieces if in_pieces else list
        exchange = _Exchange(
            pieces=cut(tensors), sources=None if sources is None else cut(sources), between=between
        )
        if tensors[0].device.type == "cpu":
            return PendingRails(tensors, exchange, self._thread.submit(self._run_or_abort, exchange), None)
        if self._stream is None:
            self._stream = torch.cuda.Stream(tensors[0].device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(tensors[0].device))
        with torch.cuda.stream(self._stream):
            self._run(exchange)
            return PendingRails(tensors, exchange, None, self._stream.record_event())

    def _run_or_abort(self, exchange: _Exchange) -> None:
        try:
            size_bytes = sum(piece.nbytes for piece in exchange.pieces)
            with timeline.span("exchange by rail", "wire", size_bytes):
                self._run(exchange)
        except Exception:
            exchange.give_up()
            # Others of the node and the rail wait for this rank. Gloo's abort() does nothing: there they wait
            # until this process has ended, or for the group's timeout.
            for group in (self.groups.node, *self.groups.lanes):
                _made(group)._get_backend(torch.device("cpu")).abort()
            raise

    # Straight to the groups: torch's functions do not know them any more once the program has said
    # destroy_process_group(), when an exchange may still be under way.

    @torch.no_grad()
    def _run(self, exchange: _Exchange) -> None:
        layout, rank = self.groups.layout, self.groups.rank
        dealt = [piece.tensor_split(layout.num_rails) for piece in exchange.pieces]
        place = layout.node_of(rank).index(rank)
        owned = [bool(layout.rail_of(rank)) and shards[place].numel() > 0 for shards in dealt]
        works: list[list[dist.Work]] = []
        # On an accelerator all of the node goes before all of the rail: see `_pieces`.
        ahead = _FILLED_AHEAD if exchange.pieces[0].is_cpu else len(dealt)

        def collect(until: int) -> None:
            for index in range(len(works), min(until, len(dealt))):
                exchange.fill(index)
                works.append(self._collect(dealt[index]))

        def collected() -> Iterator[torch.Tensor]:
            for index, (shards, owns) in enumerate(zip(dealt, owned, strict=True)):
                collect(index + ahead)
                _wait(works[index])
                if owns:
                    yield shards[place]

        finished = exchange.between(collected())
        spreading: list[dist.Work] = []
        for index, (shards, owns) in enumerate(zip(dealt, owned, strict=True)):
            if owns:
                next(finished)
            # All of a node in the same order: first what is collected, then what is spread.
            collect(len(dealt))
            spread = self._spread(shards)
            exchange.spread[index].set_result(spread)
            spreading += spread
        _wait([work for collecting in works for work in collecting] + spreading)

    def _collect(self, shards: Sequence[torch.Tensor]) -> list[dist.Work]:
        """Start to sum up every shard of a piece where its owner is."""
        works = []
        for owner, shard in enumerate(shards):
            if shard.numel() > 0:
                options = dist.ReduceOptions()
                options.rootRank = owner
                works.append(_made(self.groups.node).reduce([shard], options))
        return works

    def _spread(self, shards: Sequence[torch.Tensor]) -> list[dist.Work]:
        """Start to give every shard of a piece to all of the node, piece after piece in the same order."""
        works = []
        for owner, shard in enumerate(shards):
            if shard.numel() > 0:
                options = dist.BroadcastOptions()
                options.rootRank = owner
                works.append(_made(self.groups.node).broadcast([shard], options))
        return works


class _Exchange:
    """What one exchange works on, and how far it is."""

    def __init__(self, *, pieces: Shards, sources: Shards | None, between: Between) -> None:
        self.pieces = pieces
        self.between = between
        self.spread: list[Future[list[dist.Work]]] = [Future() for _ in pieces]
        """By piece: what is to be waited for until the result is in it, once that is on its way."""
        self._sources = sources

    def fill(self, index: int) -> None:
        """Have in the piece what the exchange begins with."""
        if self._sources is not None:
            self.pieces[index].copy_(self._sources[index])

    def give_up(self) -> None:
        """No more pieces will come. Why, the thread's own future says: its frames know these."""
        for spread in self.spread:
            spread.cancel()


class PendingRails:
    """Tensors on the way by rail; do not touch them until `wait`."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        exchange: _Exchange,
        running: Future[None] | None,
        event: torch.cuda.Event | None,
    ) -> None:
        self._tensors = list(tensors)
        self._exchange = exchange
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
                # Without frames: they know this object, which knows it.
                raise _broken(error) from error.with_traceback(None)
        if self._event is not None:
            torch.cuda.current_stream(self._tensors[0].device).wait_event(self._event)
            require_arrived(self._tensors[0].device)
        return self._tensors

    def arrivals(self) -> Iterator[torch.Tensor]:
        """The results in pieces, in their order, each when it is there; on an accelerator when all are."""
        if self._running is None:
            self.wait()
        for piece, spread in zip(self._exchange.pieces, self._exchange.spread, strict=True):
            if self._running is not None:
                self._wait_for(spread)
            yield piece
        self.wait()

    def _wait_for(self, spread: Future[list[dist.Work]]) -> None:
        broke: Exception | None = None
        try:
            _wait(spread.result())
        except (CancelledError, RuntimeError) as error:
            broke = error.with_traceback(None)
        if broke is not None:
            # Raises, when the exchanger's thread has told others of it.
            self.wait()
            raise _broken(broke) from broke


def _broken(error: Exception) -> CommunicationError:
    return CommunicationError(f"exchange of the model's weights between nodes failed: {error}")


def _pieces(tensors: Sequence[torch.Tensor]) -> Shards:
    """On an accelerator whole tensors: with pieces, collectives of two groups would run at the same time, and
    each may wait for room on one device that the other has there and misses on the next."""
    return pieces_of(tensors, _MOST_PIECES) if tensors[0].is_cpu else list(tensors)


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


def _made(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    assert group is not None, "exchanges of weights want groups"
    return group
