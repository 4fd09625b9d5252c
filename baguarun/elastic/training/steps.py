"""The micro-batches of one step on this rank, and what they count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from baguarun.comm.ddp import DistributedDataParallel
from baguarun.comm.weighting import MicroBatch
from baguarun.elastic.training.dealing import Deal
from baguarun.elastic.training.sampler import ElasticSampler
from baguarun.errors import UsageError


class MicroBatches:
    """Iterate over it once, with forward and backward of each batch, before the optimizer steps.

    Weights are such that the gradient is that of the mean loss over all samples of the step, on any number of
    ranks. On a rank without a sample there is nothing to iterate over, and it still takes part. With several
    models it is given one that counts nothing: only the script knows which of them come in which order.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        deal: Deal,
        sampler: ElasticSampler,
        models: Sequence[DistributedDataParallel],
    ) -> None:
        self._batches = batches
        self._deal = deal
        self._models = models
        self._places = sampler.micro_batches(deal)
        self._share = len(deal.share(sampler.rank))
        self.is_done = False
        """Whether all of them were taken."""
        if not models and any(deal.weight(places) != 1 for places in self._places):
            raise UsageError(
                "State.steps: the samples of a step do not come out even here, and the state holds no "
                "baguarun.DistributedDataParallel that could weigh gradients; want State(model=wrapped model)"
            )

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Any]:
        if not self._places:
            for model in self._models:
                model.take_part()
        for index, places in enumerate(self._places):
            part = MicroBatch(
                weight_of_step=self._deal.weight(places) if self._share else 0.0,
                weight_of_rank=len(places) / self._share if self._share else 0.0,
                is_first=index == 0,
                is_last=index == len(self._places) - 1,
            )
            batch = next(self._batches)
            with ExitStack() as stack:
                for model in self._models:
                    stack.enter_context(model.micro_batch(part))
                yield batch
        self.is_done = True
