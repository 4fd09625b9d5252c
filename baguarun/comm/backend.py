"""Makes `baguanet`, this project's c10d backend for CPU tensors, known to torch.

Importing this module is enough for `dist.init_process_group("baguanet")`, also in a combination such as
"cpu:baguanet,cuda:nccl". The compiled engine is loaded when the first group is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from baguarun.errors import UsageError

NAME = "baguanet"


@dataclass(frozen=True, kw_only=True)
class BaguanetOptions:
    """The `pg_options` of a group, the same on all its ranks."""

    arena_bytes: int = 0
    """Room for tensors of the backend's `allocate_tensor` on this rank, which ranks of one host reduce where
    they lie. Costs memory when it is allocated and used."""
    over: Any = None
    """A group of the same ranks in the same order that has baguanet on the CPU: the new one is made by a
    collective of it, several times sooner than by torch's store. Where it gives signs of life it does so for
    both: it must live as long, and unbroken, for a silent rank to be found (None)."""

    def __post_init__(self) -> None:
        if self.arena_bytes < 0:
            raise UsageError(f"arena_bytes={self.arena_bytes}: want zero or more")


def register() -> None:
    """Let `torch.distributed` make groups with the backend baguanet; a second call does nothing."""
    # Not above: torch calls this function while it is imported, maybe by this module.
    import torch.distributed as dist

    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def backend_of(group: Any, device: Any) -> Any:
    """The backend itself: TORCH_DISTRIBUTED_DEBUG=DETAIL puts one that checks arguments around it.

    Raises `RuntimeError` if the group has none for `device`, a `torch.device`.
    """
    backend = group._get_backend(device)
    return getattr(backend, "wrapped_pg", backend)


def backend_on_cpu(group: Any) -> Any:
    """As `backend_of`, for CPU tensors; None if the group has none."""
    import torch

    try:
        return backend_of(group, torch.device("cpu"))
    except RuntimeError:
        return None


def _create(options: Any, backend_options: object) -> Any:
    """One rank's `baguarun._C.Backend`, joined with the group's others through the store in `options`."""
    # torch imports this module while it is imported itself, maybe by that one.
    from baguarun.comm.extension import load_extension

    asked = BaguanetOptions() if backend_options is None else backend_options
    if not isinstance(asked, BaguanetOptions):
        raise UsageError(
            f"pg_options={backend_options!r}: want baguarun.comm.backend.BaguanetOptions; baguanet's other "
            "settings are the variables BAGUA_NET_* and the group's timeout"
        )
    over = None if asked.over is None else backend_on_cpu(asked.over)
    if asked.over is not None and (over is None or over.name() != NAME):
        found = "no backend for the CPU" if over is None else f"{over.name()} on the CPU"
        raise UsageError(f"BaguanetOptions(over=...): the group has {found}; want one that has {NAME} there")
    return load_extension().Backend(options, arena_bytes=asked.arena_bytes, over=over)


register()
