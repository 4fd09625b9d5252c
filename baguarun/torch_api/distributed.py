"""`module.with_bagua(...)`: the module itself becomes data-parallel, without a wrapper around it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.utils.hooks import RemovableHandle

from baguarun.comm.agreement import refusals_told
from baguarun.comm.algorithms import Algorithm, resolve
from baguarun.comm.backend import NAME as BAGUANET
from baguarun.comm.groups import new_local_group
from baguarun.comm.session import DataParallelSession
from baguarun.comm.settings import SessionSettings
from baguarun.torch_api.groups import BaguaProcessGroup, group_of

Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class _Attached:
    """What `with_bagua` has put on a module."""

    session: DataParallelSession
    group: dist.ProcessGroup | None
    hooks: Sequence[RemovableHandle]
    attributes: Sequence[str]


def with_bagua(
    self: Module,
    optimizers: Sequence[torch.optim.Optimizer],
    algorithm: Algorithm | str,
    process_group: BaguaProcessGroup | dist.ProcessGroup | None = None,
    do_flatten: bool = True,
) -> Module:
    """Make this module data-parallel and return it: hooks around forward, the engine on the parameters.

    Adds `no_sync()`, `stats()`, `algorithm_state_dict()`, `load_algorithm_state_dict()`, `bagua_algorithm`
    and `bagua_optimizers` to the module; names in its state_dict stay as they are. Parameters, buffers and
    the state of optimizers begin as rank 0's; after that buffers are each rank's own, and a forward in
    evaluation mode communicates nothing. Raises `UsageError` for what cannot be served. Collective over the
    group; a rank outside of it trains alone, with the same attributes.

    Called again, on all ranks after the same step, it first ends what the last call has made: exchanges
    under way are waited for, gradients are dropped. In the middle of a step or of a backward it is refused.
    """
    present: _Attached | None = self.__dict__.get("_baguarun_attached")
    group = torch_group_of(process_group)
    if not do_flatten:
        warnings.warn(
            "with_bagua: do_flatten=False: gradients are views of flat buckets all the same", stacklevel=2
        )
    with refusals_told(group if present is None else present.group):
        chosen = resolve(algorithm)
        if present is not None:
            present.session.require_between_steps()
    left = []
    if present is not None:
        present.session.agree_to_end(present.group)
        left = _detach(self, present)
    try:
        _attach(self, optimizers, chosen, group)
    finally:
        # Not before: where all compare their models all have ended what was there.
        for each in left:
            # The script may have destroyed them with all others.
            if each in c10d._world.pg_map:
                dist.destroy_process_group(each)
    return self


def _attach(
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    algorithm: Algorithm,
    group: dist.ProcessGroup | None,
) -> None:
    session = DataParallelSession(
        module,
        algorithm=algorithm,
        optimizers=optimizers,
        process_group=group,
        settings=SessionSettings(broadcast_buffers=False, evaluates_alone=True),
    )

    def before(_module: nn.Module, _inputs: Any) -> None:
        session.before_forward()

    def after(_module: nn.Module, _inputs: Any, output: Any) -> None:
        session.after_forward(output)

    hooks = (module.register_forward_pre_hook(before), module.register_forward_hook(after))
    attributes = {
        "_baguarun_session": session,
        "no_sync": session.no_sync,
        "stats": session.stats,
        "algorithm_state_dict": session.algorithm_state_dict,
        "load_algorithm_state_dict": session.load_algorithm_state_dict,
        "bagua_algorithm": session.algorithm,
        "bagua_optimizers": list(optimizers),
    }
    attached = _Attached(session=session, group=group, hooks=hooks, attributes=tuple(attributes))
    module.__dict__.update(attributes, _baguarun_attached=attached)


def _detach(module: nn.Module, present: _Attached) -> list[dist.ProcessGroup]:
    """Undo `_attach`; returns groups that nobody needs when all ranks have."""
    try:
        return present.session.end()
    finally:
        for hook in present.hooks:
            hook.remove()
        for name in ("_baguarun_attached", *present.attributes):
            module.__dict__.pop(name, None)


def torch_group_of(
    process_group: BaguaProcessGroup | dist.ProcessGroup | int | None,
) -> dist.ProcessGroup | None:
    """What the session takes for a group; on a rank that is not a member, a new one of this rank alone.

    The only int is torch's `GroupMember.NON_GROUP_MEMBER`.
    """
    if process_group is None:
        return None
    group = group_of(process_group)
    # Ours on a GPU, too: nothing is sent over it, and NCCL may want all ranks for any new group.
    return new_local_group([dist.get_rank()], backend=BAGUANET) if group is None else group
