"""Makes `baguanet`, this project's c10d backend for CPU tensors, known to torch.

Importing this module is enough for `dist.init_process_group("baguanet")`, also in a combination such as
"cpu:baguanet,cuda:nccl". The compiled engine is loaded when the first group is made.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from baguarun.comm.extension import load_extension
from baguarun.errors import UsageError

NAME = "baguanet"


def register() -> None:
    """Let `torch.distributed` make groups with the backend baguanet; a second call does nothing."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, backend_options: object) -> Any:
    """One rank's `baguarun._C.Backend`, joined with the group's others through the store in `options`."""
    if backend_options is not None:
        raise UsageError(
            f"pg_options={backend_options!r}: baguanet has no options; its settings are the variables "
            "BAGUA_NET_* and the group's timeout"
        )
    return load_extension().Backend(options)


register()
