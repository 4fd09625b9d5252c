"""The buffers of a model (batch norm's statistics, for one), which all ranks have from rank 0."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from baguarun.comm.replicas import broadcast_buffers, real_view


class SharedBuffers:
    """Overwrites a module's buffers by rank 0's, as torch does: once for each forward that was synchronised,
    before the next one of any kind. So ranks may evaluate as often as each likes."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = tuple(module.modules())
        self.are_due = True
        """Whether a forward has been synchronised since they were shared; alike on all ranks."""

    def share(self, group: dist.ProcessGroup) -> None:
        """Collective over `group`. Raises `CommunicationError`."""
        self.are_due = False
        if buffers := [real_view(buffer) for buffer in self._find()]:
            broadcast_buffers(buffers, group)

    def _find(self) -> Iterator[torch.Tensor]:
        """Those of now, each once: a module may assign its buffers anew."""
        found = {
            id(buffer): buffer
            for module in self._modules
            for buffer in module._buffers.values()
            if buffer is not None
        }
        return iter(found.values())
