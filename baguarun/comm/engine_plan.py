"""Which gradients of a model are exchanged and how, and the engine that does it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from baguarun.comm.algorithms import Algorithm
from baguarun.comm.algorithms.base import BLOCK_WIRES, WIRE_OF_DTYPE, Operation, OperationKind
from baguarun.comm.extension import load_extension, operation_spec
from baguarun.comm.lanes import Lanes
from baguarun.comm.models import bucket_limits
from baguarun.comm.rail_groups import RailGroups
from baguarun.comm.settings import SessionSettings

_BUCKET_ALIGN_BYTES = 64
"""In shared memory; as kBucketAlignBytes in cpp_ext/engine/bucket.h."""


class EnginePlan:
    """What an engine is to do for one model, by the algorithm's own operations."""

    def __init__(
        self,
        algorithm: Algorithm,
        parameters: Sequence[tuple[str, nn.Parameter]],
        device: torch.device,
        settings: SessionSettings,
    ) -> None:
        asked = {
            dtype: algorithm.operation(dtype, device)
            for dtype in dict.fromkeys(parameter.dtype for _, parameter in parameters)
        }
        self._settings = settings
        self._device = device
        self._operations = {dtype: found for dtype, found in asked.items() if found is not None}
        self.exchanged = [(name, found) for name, found in parameters if found.dtype in self._operations]
        """The named parameters whose gradients do not stay local."""
        self.arena_bytes = self._arena_bytes()
        """Room for all gradients that ranks of one host can reduce where they lie, each in its own bucket."""

    def make_engine(self, lanes: Lanes, rails: RailGroups | None) -> Any:
        """The engine on `lanes`. Collective over them."""
        extension, settings = load_extension(), self._settings
        specs = {dtype: make_spec(operation, rails) for dtype, operation in self._operations.items()}
        total_bytes = sum(parameter.nbytes for _, parameter in self.exchanged)
        world_size = dist.get_world_size(lanes[0])
        small_bytes, bucket_bytes = bucket_limits(
            total_bytes, world_size, self._device, settings.bucket_cap_mb
        )
        return extension.Engine(
            [(name, parameter, specs[parameter.dtype]) for name, parameter in self.exchanged],
            list(lanes),
            extension.EngineSettings(
                bucket_bytes=bucket_bytes,
                small_bucket_bytes=small_bytes,
                find_unused=settings.find_unused_parameters,
                static_graph=settings.static_graph,
                arena_bytes=self.arena_bytes,
            ),
        )

    def sends_blocks(self) -> bool:
        """Whether a result depends on where in a bucket a gradient lies."""
        return any(operation.wire in BLOCK_WIRES for operation in self._operations.values())

    def _arena_bytes(self) -> int:
        if self._device.type != "cpu" or not self._settings.share_memory:
            return 0
        total_bytes = 0
        for _, parameter in self.exchanged:
            operation = self._operations[parameter.dtype]
            is_plain = operation.wire is WIRE_OF_DTYPE.get(parameter.dtype)
            if operation.kind is OperationKind.SCATTER_REDUCE_GATHER and is_plain:
                total_bytes += -(-parameter.nbytes // _BUCKET_ALIGN_BYTES) * _BUCKET_ALIGN_BYTES
        return total_bytes


def make_spec(operation: Operation, rails: RailGroups | None) -> Any:
    """`operation` as the engine's `OperationSpec`, by rail where there is more than one node."""
    spec = operation_spec(operation)
    if rails is not None and len(rails.layout.nodes) > 1:
        spec.exchange_by_rail(rails.for_engine(load_extension()))
    return spec
