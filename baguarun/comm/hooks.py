"""The codecs as communication hooks for torch's own DistributedDataParallel.

    model = torch.nn.parallel.DistributedDataParallel(net)
    model.register_comm_hook(hooks.CodecState(), hooks.onebit)

Each bucket goes through one scatter-reduce-gather: rank r gets share r of every rank's bucket, encoded; sums
these in fp32, in rank order; and sends the average, encoded, to all. With error feedback its own part comes
first and as it is, for nobody sends it, and the sum is what travels. Every rank decodes all shares from what
was sent, its own too, so that replicas stay bit-equal.

Buckets are a pipeline: while backward computes the next one, the shares of this one are on their way, and the
averages of the one before. Every rank calls for collectives in one order, from DDP's thread: for a bucket's
scatter at its own turn, for its gather at the next one's; of those that callbacks start, several buckets'
would cross. The last bucket's turn ends them all. On CUDA all of it is enqueued on a stream of its own, and
no host waits.
"""

# DDP compares the annotations of a hook with classes: they must not be strings, as with
# `from __future__ import annotations`.
import contextlib
from collections.abc import Iterator, Sequence
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
_DEVICES = ("cpu", "cuda")


@dataclass(kw_only=True)
class Residuals:
    """What the chunks of one bucket lacked at the last step (1-bit Adam, arXiv 2102.02888, section 4)."""

    parameters: tuple[int, ...]
    """`id` of the bucket's parameters."""
    owed: torch.Tensor
    """float32, as long as the bucket, in units of gradients: in this rank's share what the sum lacked,
    elsewhere what its gradients did."""


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
    under_way: list["_Exchange"] = field(default_factory=list, init=False, repr=False)
    """The buckets of this backward that are not done, oldest first."""
    stream: torch.cuda.Stream | None = field(default=None, init=False, repr=False)
    """Of a model on CUDA: what all exchanges are enqueued on."""

    def __post_init__(self) -> None:
        if not 1 <= self.keep <= _MOST_KEPT:
            raise UsageError(f"hooks.CodecState: keep={self.keep}; want 1 <= keep <= {_MOST_KEPT}")


class _Exchange:
    """The scatter-reduce-gather of one bucket: `scatter`, `gather` and `finish`, in this order.

    What a collective under way reads or writes is kept until it has been waited for.
    """

    def __init__(self, values: torch.Tensor, state: CodecState, wire: str) -> None:
        self._values = values
        self._codec = load_extension()
        self._wire = self._codec.Wire.__members__[wire]
        self._keep = state.keep
        self._group = state.process_group or dist.group.WORLD
        self._world_size = dist.get_world_size(self._group)
        self._rank = dist.get_rank(self._group)
        self._owed: torch.Tensor | None = None
        self._work: dist.Work | None = None
        self._sent = self._received = torch.empty(0)
        blocks = -(-values.numel() // _BLOCK_ELEMENTS)
        self._stride = -(-blocks // self._world_size) * _BLOCK_ELEMENTS
        self._own = self._share(self._rank)
        devices: list[int | str | torch.device] = [] if values.is_cpu else [values.device]
        self.average: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        """The bucket, overwritten with the average over the ranks."""

    def scatter(self, owed: torch.Tensor | None) -> None:
        """Send chunk r to rank r. `owed`: error feedback, as in `Residuals`."""
        self._owed = owed
        chunks = [self._contribution(rank) for rank in range(self._world_size)]
        own_bytes = chunks[self._rank].numel()
        self._sent, self._received = torch.cat(chunks), self._room_for(own_bytes)
        self._work = dist.all_to_all_single(
            self._received,
            self._sent,
            output_split_sizes=[own_bytes] * self._world_size,
            input_split_sizes=[chunk.numel() for chunk in chunks],
            group=self._group,
            async_op=True,
        )

    def gather(self) -> None:
        """Reduce the chunks for this rank and send the result to all."""
        chunk = self._encoded_result()
        # All send as much as the longest.
        most_bytes = self._codec.encoded_bytes(self._wire, self._stride, keep=self._keep)
        self._sent = torch.nn.functional.pad(chunk, (0, most_bytes - chunk.numel()))
        self._received = self._room_for(most_bytes)
        self._work = dist.all_gather_into_tensor(self._received, self._sent, group=self._group, async_op=True)

    def finish(self) -> None:
        """Decode all shares."""
        scale = 1.0 if self._owed is None else 1.0 / self._world_size
        for share, chunk in zip(self._shares(), self._arrived(), strict=True):
            part = self._values[share]
            part.copy_(self._sum([chunk], part.numel(), scale, part.dtype))
        self.average.set_result(self._values)

    def _contribution(self, rank: int) -> torch.Tensor:
        """What `rank` gets for its chunk."""
        share = self._share(rank)
        if self._owed is None:
            return self._encode(self._values[share], None)
        if rank == self._rank:
            # It is summed up as it is; something has to lie in its place.
            size = self._codec.encoded_bytes(self._wire, self._values[share].numel(), keep=self._keep)
            return torch.zeros(size, dtype=torch.uint8, device=self._values.device)
        return self._encode(self._values[share], self._owed[share])

    def _encoded_result(self) -> torch.Tensor:
        """This rank's chunk, averaged in rank order. With error feedback its own part comes first, and as it
        is; and it is the sum, for what an average owes would be in other units than gradients."""
        arrived, own = self._arrived(), self._values[self._own]
        if self._owed is None:
            return self._encode(self._sum(arrived, own.numel(), 1.0 / self._world_size), None)
        others = arrived[: self._rank] + arrived[self._rank + 1 :]
        return self._encode(own, self._owed[self._own], others)

    def _sum(
        self, chunks: list[torch.Tensor], numel: int, scale: float, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        found = self._codec.reduce_decode(chunks, self._wire, scale, numel, dtype, keep=self._keep)
        assert isinstance(found, torch.Tensor)
        return found

    def _share(self, rank: int) -> slice:
        return slice(rank * self._stride, (rank + 1) * self._stride)

    def _shares(self) -> Iterator[slice]:
        return map(self._share, range(self._world_size))

    def _encode(
        self, values: torch.Tensor, residual: torch.Tensor | None, others: Sequence[torch.Tensor] = ()
    ) -> torch.Tensor:
        if residual is None:
            chunk = self._codec.encode(values, self._wire, keep=self._keep)
        else:
            chunk = self._codec.encode_with_residual(
                values, residual, self._wire, keep=self._keep, others=list(others)
            )
        assert isinstance(chunk, torch.Tensor)
        return chunk

    def _room_for(self, chunk_bytes: int) -> torch.Tensor:
        """For a chunk from every rank."""
        return torch.empty(self._world_size * chunk_bytes, dtype=torch.uint8, device=self._values.device)

    def _arrived(self) -> list[torch.Tensor]:
        """Every rank's chunk, in rank order, once they are there; on CUDA the stream waits for them."""
        assert self._work is not None
        self._work.wait()
        return list(self._received.view(self._world_size, -1))


def bytegrad(state: CodecState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """8 bits per number (Bagua, arXiv 2107.01499), without error feedback.

    Like the other hooks: raises `UsageError` for gradients that are not float32, float16 or bfloat16, on the
    CPU or CUDA. NaN and Inf come out as NaN in their block of 2048.
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
    if values.device.type not in _DEVICES or values.dtype not in _DTYPES:
        raise UsageError(
            f"hooks: a bucket of {values.dtype} on {values.device}; want float32, float16 or bfloat16 on "
            f"{' or '.join(_DEVICES)}"
        )
    exchange = _Exchange(values, state, wire)
    # What is left at the first bucket is of a backward that failed.
    under_way = [*(state.under_way if bucket.index() > 0 else []), exchange]
    with _aside(state, values.device):
        exchange.scatter(_owed(state, bucket) if feedback else None)
        for before in under_way[-2:-1]:
            before.gather()
        for before in under_way[-3:-2]:
            before.finish()
        under_way = under_way[-2:]
        if bucket.is_last():
            exchange.gather()
            for each in under_way:
                each.finish()
            under_way = []
    state.under_way = under_way
    return exchange.average


def _aside(state: CodecState, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """On CUDA the stream of the exchanges, behind what the current one does before its bucket is full."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    if state.stream is None:
        state.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    state.stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(state.stream)


def _owed(state: CodecState, bucket: GradBucket) -> torch.Tensor:
    values = bucket.buffer()
    parameters = tuple(id(parameter) for parameter in bucket.parameters())
    found = state.residuals.get(bucket.index())
    if found is None or found.parameters != parameters:
        found = Residuals(parameters=parameters, owed=torch.zeros(values.numel(), device=values.device))
        state.residuals[bucket.index()] = found
    return found.owed
