"""Which samples each rank trains on in one step. Pure: every rank works out the same for any World."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Deal:
    """One step's samples, as places in the order of the epoch, dealt out to the ranks.

    Ranks get neighbouring places; shares differ by one sample at most, and the first ranks have the larger
    ones. A share is cut into as few micro-batches as `batch_size` allows, equal but for one sample.
    """

    first: int
    """Place of the step's first sample."""
    end: int
    """Place after its last one."""
    world_size: int
    batch_size: int
    """The most samples in one micro-batch."""

    @property
    def samples(self) -> int:
        """Samples of all ranks together."""
        return self.end - self.first

    def share(self, rank: int) -> range:
        """Places that are `rank`'s; none if there are more ranks than samples."""
        return _part(range(self.first, self.end), rank, self.world_size)

    def micro_batches(self, rank: int) -> list[range]:
        """The share, cut up."""
        share = self.share(rank)
        count = -(-len(share) // self.batch_size)
        return [_part(share, index, count) for index in range(count)]

    def weight(self, micro_batch: range) -> float:
        """What the gradient of a micro-batch's mean loss counts, for the mean over the ranks to be the mean
        over the samples; 1 if all ranks have one micro-batch of the same size."""
        return len(micro_batch) * self.world_size / self.samples


def deals(
    first: int, length: int, *, global_batch: int, world_size: int, batch_size: int, drop_last: bool
) -> Iterator[Deal]:
    """The steps of an epoch of `length` samples from place `first` on, `global_batch` samples in each.

    The last one has what is left, or is left out (`drop_last`).
    """
    while first < length and not (drop_last and first + global_batch > length):
        end = min(first + global_batch, length)
        yield Deal(first=first, end=end, world_size=world_size, batch_size=batch_size)
        first = end


def _part(places: range, index: int, count: int) -> range:
    """Part `index` of `count` parts, the first ones longer by one if it does not come out even."""
    least, longer = divmod(len(places), count)
    first = index * least + min(index, longer)
    return places[first : first + least + (index < longer)]
