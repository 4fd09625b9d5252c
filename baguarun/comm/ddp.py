"""`DistributedDataParallel`: torch's wrapper by name and behaviour, on our engine."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from baguarun.comm.agreement import Declaration, refusals_told
from baguarun.comm.algorithms import Algorithm, resolve
from baguarun.comm.groups import read_worker_env
from baguarun.comm.models import device_of
from baguarun.comm.session import DataParallelSession
from baguarun.comm.settings import SessionSettings
from baguarun.comm.stats import CommunicationStats
from baguarun.comm.weighting import MicroBatch
from baguarun.errors import ArgumentError, UsageError


class DistributedDataParallel(nn.Module):
    """Wraps `module` so that every backward leaves the combined gradients of all ranks in `grad`.

    Algorithms that exchange weights leave gradients alone and work around the steps of `optimizers` instead.

    Arguments have torch's names, order and meaning (2.13), those after `static_graph` by name only and some
    of these refused; ours are `optimizers` (whose state, if any, starts as rank 0's), `algorithm`, a name or
    an `Algorithm` (None: what `baguarun run --algorithm` says, else gradient_allreduce), and `share_memory`.
    Gradients are always views of the buckets. Collective over the process group to construct. Raises
    `UsageError` for what cannot be served; a failed collective raises `CommunicationError` from backward or
    the next forward. To copy the model, copy `module`.
    """

    module: nn.Module

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = True,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        *,
        forward_sync_buffers: bool | None = None,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        algorithm: str | Algorithm | None = None,
        share_memory: bool = True,
        **of_torch: object,
    ) -> None:
        super().__init__()
        if unknown := of_torch.keys() - _NOT_SERVED.keys():
            raise TypeError(f"DistributedDataParallel has no argument {', '.join(sorted(unknown))}")
        if check_reduction:
            warnings.warn("check_reduction=True has no effect: torch has given it up", stacklevel=2)
        if not gradient_as_bucket_view:
            warnings.warn(
                "gradient_as_bucket_view=False: gradients are views of the buckets all the same", stacklevel=2
            )
        self.module = module
        with refusals_told(process_group):
            _refuse_not_served(of_torch)
            # As torch has it: None is True.
            asked = broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
            chosen = resolve(algorithm, read_worker_env().algorithm)
            settings = SessionSettings(
                bucket_cap_mb=bucket_cap_mb,
                find_unused_parameters=find_unused_parameters,
                static_graph=static_graph,
                broadcast_buffers=True if asked is None else bool(asked),
                init_sync=init_sync,
                share_memory=share_memory,
            )
            self._input_device = _input_device(device_of(module), device_ids, output_device, dim)
        self._session = DataParallelSession(
            module,
            algorithm=chosen,
            optimizers=optimizers,
            process_group=process_group,
            settings=settings,
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._session.before_forward()
        if self._input_device is not None:
            args = move_tensors(args, self._input_device)
            kwargs = move_tensors(kwargs, self._input_device)
        args, kwargs = self._session.pass_inputs((args, kwargs))
        output = self.module(*args, **kwargs)
        return self._session.after_forward(output)

    def no_sync(self) -> AbstractContextManager[None]:
        """Forwards inside it accumulate gradients locally, until a backward whose forward was outside."""
        return self._session.no_sync()

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm in use, with its settings."""
        return self._session.algorithm

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """Those that were given when the module was wrapped."""
        return self._session.optimizers

    def micro_batch(self, micro_batch: MicroBatch) -> AbstractContextManager[None]:
        """Forwards inside it are of one part of an uneven step; only the last part's backward communicates.

        Where it is used, every rank uses it for all parts of the step, or calls `take_part`.
        """
        return self._session.micro_batch(micro_batch)

    def take_part(self) -> None:
        """Stands for forward and backward on a rank that has no sample in a step."""
        self._session.take_part()

    def prepare(self) -> None:
        """In a World of one, before `enter_world` with ranks that would wait: do what needs none of them."""
        self._session.prepare()

    def enter_world(self) -> None:
        """Go on in the World that `baguarun.comm.world.enter_world` has made. Collective over it.

        The algorithm and its settings stay, and what it keeps of the past as docs/algorithms.md says.
        Gradients are dropped. Parameters, buffers and optimizers are left as they are, equal or not. May be
        called again after it has failed, in a further World.
        """
        self._session = self._session.succeed()

    def declaration(self) -> Declaration:
        """What `enter_world` would compare now, and where ranks differ in it end on all of them."""
        return self._session.declare_successor()

    def require_complete(self, *, again: bool = False) -> None:
        """Between backward and `optimizer.step()`: all that the gradients are made of has arrived, here.

        On CPU backward has waited for it already. On GPUs the host waits, which costs the overlap of the next
        step's launches: for jobs that are resized in place, so that no optimizer applies the gradients of a
        step that broke. Raises `CommunicationError`, also where the World is given up meanwhile; but with
        `again`, before a further optimizer's step, what this found of the same gradients stands.
        """
        self._session.require_complete(again=again)

    def end_left_out_step(self) -> None:
        """At a commit: take part in the exchange behind a step that a GradScaler has left out on this rank,
        which would come with the next forward; other ranks may wait for it now."""
        self._session.end_left_out_step()

    def require_ended(self) -> None:
        """After `optimizer.step()`: the exchange of weights that comes behind it has not broken.

        Raises `CommunicationError` if it has, once; the step itself has been taken. With `keep_committed`
        `step()` leaves that to this method, or to the next forward.
        """
        self._session.require_ended()

    def shared_steps(self) -> tuple[int, int]:
        """Of an algorithm that exchanges weights: steps so far, as all ranks count them, and how many of them
        are in the weights that ranks have of each other: what a lost rank did in them is not lost."""
        return self._session.shared_steps()

    def keep_committed(self, keep: bool = True) -> None:
        """Between steps: keep from now on what `roll_back` needs, a copy of what error feedback owes, if
        anything. Costs nothing where the algorithm has no error feedback."""
        self._session.keep_committed(keep)

    def commit(self) -> None:
        """Between steps: `roll_back` comes back to here. Copies nothing itself, so it is cheap."""
        self._session.commit()

    def roll_back(self) -> None:
        """Between steps: what error feedback owes is again what it was at the last `commit`.

        For a step that is done again, also right after `enter_world` if the World before has not ended it.
        Parameters, buffers and optimizers are left alone.
        """
        self._session.roll_back()

    def common_state(self) -> dict[str, Any]:
        """What the algorithm itself has alike on all ranks besides weights; empty for most. For
        `adopt_common_state` on a rank of the same World that is sent the state."""
        return self._session.common_state()

    def adopt_common_state(self, state: dict[str, Any]) -> None:
        """Between steps: go on from what `common_state` gave on another rank."""
        self._session.adopt_common_state(state)

    def stats(self) -> CommunicationStats:
        """What this model's communication has cost so far, on this rank."""
        return self._session.stats()

    def algorithm_state_dict(self) -> dict[str, Any]:
        """What a checkpoint must keep of the algorithm (DiLoCo's outer weights, counts of steps, and what
        error feedback has left to send).

        Empty for those that have nothing to keep. Take it after optimizer.step(); the tensors are copies. It
        is the same on all ranks, unless docs/algorithms.md says that it is each rank's own.
        """
        return self._session.algorithm_state_dict()

    def load_algorithm_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `algorithm_state_dict`. On all ranks, after `load_state_dict` of model and optimizers.

        A rank that gets another rank's "engine", or one of another number of ranks, warns and begins without
        residuals.
        """
        self._session.load_algorithm_state_dict(state)

    def join(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise UsageError(
            "join() for uneven inputs is not there yet; give every rank the same number of batches"
        )

    def register_comm_hook(self, state: object, hook: Callable[..., object]) -> NoReturn:
        del state, hook
        raise UsageError(
            "register_comm_hook: the engine has algorithms in place of hooks; want algorithm=..."
        )


def move_tensors(value: Any, device: torch.device) -> Any:
    """`value` with all tensors in lists, tuples and mappings on `device`."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, tuple):
        moved = [move_tensors(item, device) for item in value]
        return type(value)(*moved) if hasattr(value, "_fields") else tuple(moved)
    if isinstance(value, list):
        return [move_tensors(item, device) for item in value]
    if isinstance(value, Mapping):
        return {key: move_tensors(item, device) for key, item in value.items()}
    return value


_NOT_SERVED = {
    "delay_all_reduce_named_params": "buckets go when they are full",
    "param_to_hook_all_reduce": "buckets go when they are full",
    "mixed_precision": "want torch.autocast, or a module of that type",
    "device_mesh": "want process_group=mesh.get_group()",
    "skip_all_reduce_unused_params": "all ranks exchange all gradients",
    "bucket_cap_mb_list": "want bucket_cap_mb",
    "batched_grad_copy": "gradients are views of the buckets: nothing is copied",
}
"""Arguments of torch's that are accepted as it has them by default, and what to do without."""


def _refuse_not_served(arguments: Mapping[str, object]) -> None:
    for name, value in arguments.items():
        if value:
            raise UsageError(f"{name}={value!r} is not there; {_NOT_SERVED[name]}")


def _input_device(
    device: torch.device,
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
    dim: int,
) -> torch.device | None:
    """Where forward's inputs are moved to; None leaves them where they are."""
    if device_ids and len(device_ids) > 1:
        raise ArgumentError(f"device_ids={list(device_ids)}: one process serves one device; want one or None")
    if dim != 0:
        raise ArgumentError(f"dim={dim}: one process serves one device, so inputs are not split; want dim=0")
    asked = [("device_ids", found) for found in device_ids or []]
    asked += [("output_device", output_device)] if output_device is not None else []
    for name, found in asked:
        wanted = found if isinstance(found, torch.device) else torch.device("cuda", int(found))
        if wanted != device:
            raise ArgumentError(
                f"{name} names {wanted} but the module is on {device}; want the same (on CPU: None)"
            )
    return device if device_ids else None
