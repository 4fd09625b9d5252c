"""Bagua's `DistributedDataParallel`: torch's of 1.9 by its arguments, with optimizers and an algorithm."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from baguarun.comm.algorithms import Algorithm
from baguarun.comm.ddp import DistributedDataParallel as OurDistributedDataParallel
from baguarun.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from baguarun.torch_api.distributed import torch_group_of
from baguarun.torch_api.groups import BaguaProcessGroup, default_group, from_torch_group

__all__ = ["DistributedDataParallel", "DistributedDataParallel_V1_9_0", "to_bagua_process_group"]


def to_bagua_process_group(
    process_group: BaguaProcessGroup | dist.ProcessGroup | None = None,
) -> BaguaProcessGroup:
    """The handle of a group of torch's, or of the default group; a handle is given back as it is."""
    if isinstance(process_group, BaguaProcessGroup):
        return process_group
    return default_group() if process_group is None else from_torch_group(process_group)


class DistributedDataParallel_V1_9_0(OurDistributedDataParallel):
    """`baguarun.DistributedDataParallel` with Bagua's order of arguments.

    `algorithm` None is gradient all-reduce, whatever the command line says: Bagua's default. `bucket_cap_mb`
    is None here, what measured best, where Bagua has 25 and does not use it. With `device_ids`,
    `output_device` or `broadcast_buffers=False` Bagua falls back to torch's DDP and drops the algorithm; here
    they work with it. `check_reduction` has no effect, in torch neither; True is answered by a warning.
    Raises and collective as `baguarun.DistributedDataParallel`; but a rank outside of `process_group` trains
    alone.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        process_group: BaguaProcessGroup | dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        algorithm: Algorithm | str | None = None,
    ) -> None:
        if check_reduction:
            warnings.warn("check_reduction=True has no effect: torch has given it up", stacklevel=2)
        chosen = algorithm if algorithm is not None else GradientAllReduceAlgorithm()
        super().__init__(
            module,
            device_ids,
            output_device,
            dim,
            broadcast_buffers,
            process_group=torch_group_of(process_group),
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=gradient_as_bucket_view,
            optimizers=optimizers,
            algorithm=chosen,
        )
        self.bagua_algorithm = self._session.algorithm
        self.bagua_optimizers = list(optimizers)


DistributedDataParallel = DistributedDataParallel_V1_9_0
