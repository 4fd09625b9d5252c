"""The codecs as communication hooks for torch's own DistributedDataParallel, on CPU process groups.

    model = torch.nn.parallel.DistributedDataParallel(net)
    model.register_comm_hook(hooks.CodecState(), hooks.onebit)

Each bucket goes through one scatter-reduce-gather: rank r gets share r of every rank's bucket, encoded; sums
these in fp32, in rank order; and sends the average, encoded, to all. Every rank decodes all shares from what
was sent, its own too, so that replicas stay bit-equal. A hook returns when its bucket is done: DDP computes
nothing meanwhile. `baguarun`'s own DistributedDataParallel does.
"""

# DDP compares the annotations of a hook with classes: they must not be strings, as with
# `from __future__ import annotations`.
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from baguarun.comm.extension import load_extension
from baguarun.errors import UsageError

__all__ = ["CodecState", "bytegrad", "onebit", "topk"]

_BLOCK_ELEMENTS = 2048
"""Of the codecs. Shares are whole blocks, but for the end of the bucket."""
_MOST_KEPT = 256
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(kw_only=True)
class Residuals:
    """What the chunks of one bucket lacked at the last step (1-bit Adam, arXiv 2102.02888, section 4)."""

    parameters: tuple[int, ...]
    """`id` of the bucket's parameters."""
    sent: torch.Tensor
    """float32, as long as the bucket: of this rank's gradients."""
    reduced: torch.Tensor
    """float32, as long as this rank's share: of its averages."""


@dataclass(kw_only=True)
class CodecState:
    """What a hook keeps between steps, for `register_comm_hook`. One per model."""

    process_group: dist.ProcessGroup | None = None
    """The group of the model. None: the default group."""
    keep: int = 20
    """How many of each 2048 numbers `topk` keeps, 1 to 256. The other hooks do not read it."""
    residuals: dict[int, Residuals] = field(default_factory=dict, repr=False)
    """Error feedback of each bucket, by its index. DDP builds other buckets after the first step, whose
    feedback begins at zero. Each rank has its own."""

    def __post_init__(self) -> None:
        if not 1 <= self.keep <= _MOST_KEPT:
            raise UsageError(f"hooks.CodecState: keep={self.keep}; want 1 <= keep <= {_MOST_KEPT}")


class _Exchange:
    """The scatter-reduce-gather of one bucket."""

    def __init__(self, num_elements: int, state: CodecState, wire: str) -> None:
        self._codec = load_extension()
        self._wire = self._codec.Wire.__members__[wire]
        self._keep = state.keep
        self._group = state.process_group or dist.group.WORLD
        self._world_size = dist.get_world_size(self._group)
        self._rank = dist.get_rank(self._group)
        blocks = -(-num_elements // _BLOCK_ELEMENTS)
        self._stride = -(-blocks // self._world_size) * _BLOCK_ELEMENTS
        self.own_elements = len(range(num_elements)[self._share(self._rank)])

    def average(self, values: torch.Tensor, residuals: Residuals | None) -> None:
        """Overwrite `values` with their average over the ranks."""
        chunks = [
            self._encode(values[share], None if residuals is None else residuals.sent[share])
            for share in self._shares()
        ]
        own = self._codec.reduce_decode(
            self._scatter(chunks),
            self._wire,
            1.0 / self._world_size,
            self.own_elements,
            torch.float32,
            keep=self._keep,
        )
        gathered = self._gather(self._encode(own, None if residuals is None else residuals.reduced))
        for share, chunk in zip(self._shares(), gathered, strict=True):
            part = values[share]
            part.copy_(self._codec.decode(chunk, self._wire, part.numel(), values.dtype, keep=self._keep))

    def _share(self, rank: int) -> slice:
        return slice(rank * self._stride, (rank + 1) * self._stride)

    def _shares(self) -> Iterator[slice]:
        return map(self._share, range(self._world_size))

    def _encode(self, values: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        if residual is None:
            chunk = self._codec.encode(values, self._wire, keep=self._keep)
        else:
            chunk = self._codec.encode_with_residual(values, residual, self._wire, keep=self._keep)
        assert isinstance(chunk, torch.Tensor)
        return chunk

    def _scatter(self, chunks: list[torch.Tensor]) -> list[torch.Tensor]:
        """Send chunk r to rank r; the chunks for this rank, in rank order."""
        own_bytes = chunks[self._rank].numel()
        received = torch.empty(self._world_size * own_bytes, dtype=torch.uint8)
        dist.all_to_all_single(
            received,
            torch.cat(chunks),
            output_split_sizes=[own_bytes] * self._world_size,
            input_split_sizes=[chunk.numel() for chunk in chunks],
            group=self._group,
        )
        return list(received.view(self._world_size, own_bytes))

    def _gather(self, chunk: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's chunk, in rank order, filled up to the size of the longest."""
        most_bytes = self._codec.encoded_bytes(self._wire, self._stride, keep=self._keep)
        filled = torch.nn.functional.pad(chunk, (0, most_bytes - chunk.numel()))
        gathered = torch.empty(self._world_size * most_bytes, dtype=torch.uint8)
        dist.all_gather_into_tensor(gathered, filled, group=self._group)
        return list(gathered.view(self._world_size, most_bytes))


def bytegrad(state: CodecState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """8 bits per number (Bagua, arXiv 2107.01499), without error feedback.

    Like the other hooks: raises `UsageError` for gradients that are not float32, float16 or bfloat16 on the
    CPU. NaN and Inf come out as NaN in their block of 2048.
    """
    return _averaged(state, bucket, "MINMAX8", feedback=False)


def onebit(state: CodecState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Signs and the mean magnitude of each block of 2048, with error feedback on both ways.

    Meant for SGD with momentum; see QAdam for Adam, whose second moment wants a warm-up at full precision.
    """
    return _averaged(state, bucket, "SIGN1", feedback=True)


def topk(state: CodecState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The `state.keep` greatest of each 2048 numbers, with error feedback on both ways."""
    return _averaged(state, bucket, "TOPK", feedback=True)


def _averaged(
    state: CodecState, bucket: GradBucket, wire: str, feedback: bool
) -> torch.futures.Future[torch.Tensor]:
    values = bucket.buffer()
    if values.device.type != "cpu" or values.dtype not in _DTYPES:
        raise UsageError(
            f"hooks: a bucket of {values.dtype} on {values.device}; want float32, float16 or bfloat16 on cpu"
        )
    exchange = _Exchange(values.numel(), state, wire)
    exchange.average(values, _residuals(state, bucket, exchange) if feedback else None)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(values)
    return done


def _residuals(state: CodecState, bucket: GradBucket, exchange: _Exchange) -> Residuals:
    parameters = tuple(id(parameter) for parameter in bucket.parameters())
    found = state.residuals.get(bucket.index())
    if found is None or found.parameters != parameters:
        found = Residuals(
            parameters=parameters,
            sent=torch.zeros(bucket.buffer().numel()),
            reduced=torch.zeros(exchange.own_elements),
        )
        state.residuals[bucket.index()] = found
    return found
