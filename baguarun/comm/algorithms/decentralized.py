"""Weights are averaged with some other ranks while the gradient is computed; gradients stay local."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar

import torch

from baguarun.comm.algorithms.base import Algorithm, Operation
from baguarun.comm.algorithms.pending import Pending, PendingExchange
from baguarun.comm.algorithms.stepper import StepContext, Stepper, require_range
from baguarun.comm.rail_exchanger import RailExchanger
from baguarun.comm.rails import Hierarchical, require_hierarchical
from baguarun.comm.weights import FlatWeights, at_places, pieces_of, replace_as_they_come
from baguarun.errors import UsageError


class PeerSelection(enum.Enum):
    """With whom a rank averages."""

    ALL = "all"
    """With everybody: an all-reduce of the weights."""
    SHIFT_ONE = "shift_one"
    """With one rank per exchange, another one each time; with an odd number of ranks one stays idle."""
    EXPONENTIAL = "exponential"
    """Sends to the rank 1, 2, 4, ... further on: exact after log2(n) exchanges if n is a power of two."""


@dataclass(frozen=True, kw_only=True)
class Peers:
    """Where one rank's weights go in one exchange, and whose come in."""

    to_rank: int
    from_rank: int


@dataclass(frozen=True, kw_only=True)
class Decentralized(Algorithm):
    """D-PSGD (Lian et al., arXiv 1705.09056; peers as in Bagua, arXiv 2107.01499, and arXiv 2110.13363).

    x(t+1) = mix(x(t)) - step(g(x(t))): the gradient is taken at the weights before they are mixed, so that
    the exchange overlaps forward and backward. Replicas differ between exchanges.

    When the World changes, the exchange under way is dropped, every rank keeps its own weights, and peers are
    chosen among the new ranks.
    """

    name: ClassVar[str] = "decentralized"
    exchanges_weights: ClassVar[bool] = True

    peer_selection_mode: str = "all"
    """all, shift_one or exponential."""
    communication_interval: int = 1
    """Exchange in every so manyth step, the first one included."""
    hierarchical: Hierarchical = "auto"
    """Nodes are the peers: the average of a node's ranks meets other nodes' averages, and all ranks of a node
    get the same weights; a single node has no peer and averages its ranks. "auto": where several nodes have
    several workers."""

    def __post_init__(self) -> None:
        modes = [mode.value for mode in PeerSelection]
        if self.peer_selection_mode not in modes:
            raise UsageError(
                f"decentralized: peer_selection_mode={self.peer_selection_mode!r}; "
                f"want one of {', '.join(modes)}"
            )
        require_range(self.name, "communication_interval", self.communication_interval, 1)
        require_hierarchical(self.name, self.hierarchical)

    def operation(self, dtype: torch.dtype, device: torch.device) -> Operation | None:
        del dtype, device
        return None

    def hierarchy(self) -> Hierarchical:
        return self.hierarchical

    def exchanges_with_few(self) -> bool:
        return PeerSelection(self.peer_selection_mode) is not PeerSelection.ALL

    def prepare(self, weights: FlatWeights) -> None:
        weights.keep_spare(1)

    def make_stepper(self, context: StepContext) -> Stepper:
        return _Mixer(context, self)


def choose_peers(mode: PeerSelection, exchange: int, rank: int, world_size: int) -> Peers | None:
    """Whom `rank` meets in the exchange of that number; None if it stays idle. For the modes with one peer.

    Over the ranks of one exchange, sending is a permutation, so the average of all weights stays.
    """
    if mode is PeerSelection.EXPONENTIAL:
        distance = 1 << exchange % (world_size - 1).bit_length()
        return Peers(to_rank=(rank + distance) % world_size, from_rank=(rank - distance) % world_size)
    if mode is not PeerSelection.SHIFT_ONE:
        raise ValueError(f"{mode} has no single peer")
    half = world_size // 2
    if world_size % 2 == 1:
        # A round-robin tournament: all pairs meet once in world_size exchanges.
        peer = (exchange - rank) % world_size
    elif rank < half:
        peer = (exchange + rank) % half + half
    else:
        peer = (rank - half - exchange) % half
    return None if peer == rank else Peers(to_rank=peer, from_rank=peer)


class _Mixer(Stepper):
    def __init__(self, context: StepContext, settings: Decentralized) -> None:
        super().__init__(context)
        self._mode = PeerSelection(settings.peer_selection_mode)
        if self.rails is not None and self.rails.num_nodes == 1:
            # No peer: what is left is the average of the node.
            self._mode = PeerSelection.ALL
        self._interval = settings.communication_interval
        self._started = False
        self._pending: Pending | PendingExchange | None = None
        # Where others' weights come in: one copy of the model.
        self._incoming = context.weights.empty_copy()

    def before_forward(self) -> None:
        if not self._started:
            self._started = True
            if self.steps % self._interval == 0:
                self._pending = self._start(self.steps // self._interval)

    def before_step(self) -> None:
        if self._pending is None:
            return
        arrivals = self._pending.arrivals()
        if isinstance(self._pending, PendingExchange):
            theirs = at_places(self.context.weights.buffers, arrivals)
            arrivals = (other.add_(mine).mul_(0.5) for mine, other in theirs)
        replace_as_they_come(self.context.weights.buffers, arrivals, self._pending.is_done)
        self._pending = None
        self.shared_steps = self.steps

    def after_step(self) -> None:
        self.steps += 1
        self._started = False

    def drop(self) -> None:
        if self._pending is not None:
            self._pending.wait()
        self._pending, self._started = None, False

    def _start(self, exchange: int) -> Pending | PendingExchange | None:
        if self._mode is PeerSelection.ALL:
            return self.average(self._incoming, self.context.weights.buffers)
        if self.rails is not None:
            return self._start_between_nodes(self.rails, exchange)
        peers = choose_peers(self._mode, exchange, self.context.rank, self.context.world_size)
        if peers is None:
            return None
        # Nobody changes the weights before the optimizer's step, which waits: no copy is needed. In pieces:
        # one is averaged while the next ones are on their way.
        mine, theirs = pieces_of(self.context.weights.buffers), pieces_of(self._incoming)
        return self.exchange(mine, theirs, to_rank=peers.to_rank, from_rank=peers.from_rank)

    def _start_between_nodes(self, rails: RailExchanger, exchange: int) -> Pending:
        peers = choose_peers(self._mode, exchange, rails.node_index, rails.num_nodes)
        self.rounds += 1
        self.bytes_sent += rails.bytes_per_exchange(self._incoming, sends=peers is not None)
        to_node, from_node = (None, None) if peers is None else (peers.to_rank, peers.from_rank)
        return rails.average_with(self._incoming, self.context.weights.buffers, to_node, from_node)
