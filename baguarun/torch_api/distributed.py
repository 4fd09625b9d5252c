"""`module.with_bagua(...)`: the module itself becomes data-parallel, without a wrapper around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from baguarun.comm.agreement import refusals_told
from baguarun.comm.algorithms import Algorithm, resolve
from baguarun.comm.session import DataParallelSession, SessionSettings
from baguarun.errors import UsageError
from baguarun.torch_api.groups import BaguaProcessGroup, group_of

Module = TypeVar("Module", bound=nn.Module)


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
    group.
    """
    group = torch_group_of(process_group)
    with refusals_told(group):
        if not do_flatten:
            raise UsageError(
                "with_bagua: do_flatten=False; gradients always live in flat buckets, want do_flatten=True"
            )
        if "_baguarun_session" in self.__dict__:
            raise UsageError("with_bagua: this module is data-parallel already")
        chosen = resolve(algorithm)
    session = DataParallelSession(
        self,
        algorithm=chosen,
        optimizers=optimizers,
        process_group=group,
        settings=SessionSettings(broadcast_buffers=False, evaluates_alone=True),
    )

    def before(_module: nn.Module, _inputs: Any) -> None:
        session.before_forward()

    def after(_module: nn.Module, _inputs: Any, output: Any) -> None:
        session.after_forward(output)

    self.register_forward_pre_hook(before)
    self.register_forward_hook(after)
    self.__dict__.update(
        _baguarun_session=session,
        no_sync=session.no_sync,
        stats=session.stats,
        algorithm_state_dict=session.algorithm_state_dict,
        load_algorithm_state_dict=session.load_algorithm_state_dict,
        bagua_algorithm=session.algorithm,
        bagua_optimizers=list(optimizers),
    )
    return self


def torch_group_of(process_group: BaguaProcessGroup | dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """What the session takes for a group; `UsageError` on a rank that is not a member."""
    if process_group is None:
        return None
    group = group_of(process_group)
    if group is None:
        raise UsageError("this rank is not a member of process_group")
    return group
