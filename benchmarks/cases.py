"""Who takes part where models are trained: torch DDP, its hooks and every algorithm of ours, by name.

A new algorithm joins by one line. Settings are those of a short run: what is exchanged every 500 steps in
earnest would not be exchanged at all here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import baguarun
from baguarun.comm.algorithms import (
    Algorithm,
    AsyncModelAverage,
    ByteGrad,
    Decentralized,
    DiLoCo,
    GradientAllReduce,
    LocalSGD,
    LowPrecisionDecentralized,
    PowerSGD,
    QAdam,
    QAdamOptimizer,
    Sparse,
)

Parameters = list[nn.Parameter]

_POWERSGD_RANK = 8
"""Of 1, 2, 4 and 8 the one with which torch's PowerSGD is first at the target of `time_to_loss.py`."""
_SGD_BY_ADAM = 250.0
"""With this momentum; with more of one of the two, 200 and 0.8 or 400 and 0.5, charlm diverges for a seed."""
_SGD_MOMENTUM = 0.7
"""What comes late acts as more momentum (Mitliagkas et al., arXiv 1605.09774), and error feedback delays:
with 0.9, and a learning rate of 100 times Adam's, DDP ends a little lower and `sparse` further behind it."""


def adam(parameters: Parameters, learning_rate: float) -> torch.optim.Optimizer:
    """In one pass over the memory; the default takes several, which all contestants would wait for."""
    return torch.optim.Adam(parameters, lr=learning_rate, fused=True)


def qadam(parameters: Parameters, learning_rate: float, warmup_steps: int = 40) -> torch.optim.Optimizer:
    """By default a fifth of a run of 200 steps in full precision."""
    return QAdamOptimizer(parameters, learning_rate, warmup_steps=warmup_steps)


def sgd(parameters: Parameters, learning_rate: float) -> torch.optim.Optimizer:
    """With momentum. The learning rate is Adam's, whose steps are of that size whatever the gradient's."""
    return torch.optim.SGD(parameters, lr=_SGD_BY_ADAM * learning_rate, momentum=_SGD_MOMENTUM)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One contestant."""

    algorithm: Algorithm | None = None
    """None: a `torch.nn.parallel.DistributedDataParallel`."""
    hook: str = ""
    """DDP's communication hook: fp16 or powersgd."""
    synchronous: bool = True
    """All replicas are equal after every step, as DDP's are."""
    optimizer: Callable[[Parameters, float], torch.optim.Optimizer] = adam
    """Made from parameters and learning rate."""
    peers: tuple[str, ...] = ("ddp",)
    """Cases that this one's loss and memory are compared with, the first one for memory: with the optimizer
    that a user would have otherwise, and with this very one, where that is another."""

    @property
    def is_stock(self) -> bool:
        """Torch's own."""
        return self.algorithm is None


CASES: dict[str, Case] = {
    "ddp": Case(),
    "ddp_fp16": Case(hook="fp16"),
    "ddp_powersgd": Case(hook="powersgd"),
    "ddp_qadam": Case(optimizer=qadam),
    "ddp_sgd": Case(optimizer=sgd),
    "gradient_allreduce": Case(algorithm=GradientAllReduce()),
    "bytegrad": Case(algorithm=ByteGrad()),
    "bytegrad_feedback": Case(algorithm=ByteGrad(error_feedback=True)),
    # The peer of both is DDP with Adam, which they replace, frozen variance and all; and DDP with the same
    # optimizer, which shows what few bits alone cost.
    "qadam": Case(algorithm=QAdam(), optimizer=qadam, peers=("ddp", "ddp_qadam")),
    "qadam_1bit": Case(algorithm=QAdam(bits=1), optimizer=qadam, peers=("ddp", "ddp_qadam")),
    # The most that travels: with less, numbers come too late for so few steps. Adam would divide what comes
    # seldom by what it takes for its usual size: it is for SGD.
    "sparse": Case(algorithm=Sparse(density=1 / 8, warmup_steps=40), optimizer=sgd, peers=("ddp_sgd",)),
    # With the peer's rank neither comes within a standard deviation of DDP's loss.
    "power_sgd": Case(algorithm=PowerSGD(rank=2 * _POWERSGD_RANK, start_step=10)),
    "low_precision_decentralized": Case(algorithm=LowPrecisionDecentralized(), synchronous=False),
    "low_precision_decentralized_4bit": Case(algorithm=LowPrecisionDecentralized(bits=4), synchronous=False),
    "decentralized": Case(algorithm=Decentralized(), synchronous=False),
    "decentralized_shift_one": Case(
        algorithm=Decentralized(peer_selection_mode="shift_one"), synchronous=False
    ),
    "local_sgd": Case(algorithm=LocalSGD(local_steps=4), synchronous=False),
    # With the paper's momentum of 0.9 the first outer steps, of which a short run has few others, are short.
    "diloco": Case(algorithm=DiLoCo(local_steps=20, outer_momentum=0.5, wire="bf16"), synchronous=False),
    # As in `algorithms.py` but for momentum and rounds of 20 and 40 steps in place of 100: a fragment's
    # average is applied 20 steps after it set out, as there.
    "diloco_int8": Case(algorithm=DiLoCo(local_steps=20, outer_momentum=0.5, wire="int8"), synchronous=False),
    "diloco_overlapped": Case(
        algorithm=DiLoCo(local_steps=40, outer_momentum=0.5, wire="int4", fragments=4, delay_steps=20),
        synchronous=False,
    ),
    "async_model_average": Case(algorithm=AsyncModelAverage(sync_interval_ms=100), synchronous=False),
}


def chosen(words: str) -> list[str]:
    """The cases named in a list with commas, after `ddp`, to which all are compared."""
    names = ["ddp", *(name for name in words.split(",") if name != "ddp")]
    unknown = [name for name in names if name.removesuffix("@gloo") not in CASES]
    if unknown:
        raise SystemExit(f"--cases: {', '.join(unknown)}: want some of {', '.join(CASES)}")
    return names


def with_peers(names: Iterable[str]) -> list[str]:
    """And those that they are compared with, first."""
    names = list(names)
    peers = (peer for name in names for peer in case_of(name).peers)
    return list(dict.fromkeys(("ddp", *peers, *names)))


def is_on_gloo(name: str) -> bool:
    """DDP is, and ours is with `@gloo` behind the name; without, it is on baguarun's own transport."""
    return name.startswith("ddp") or name.endswith("@gloo")


def case_of(name: str) -> Case:
    return CASES[name.removesuffix("@gloo")]


def wrap(
    case: Case, model: nn.Module, learning_rate: float, group: dist.ProcessGroup | None
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """`model` made distributed over `group` (None: the default one) as `case` does it, and its optimizer."""
    optimizer = case.optimizer(list(model.parameters()), learning_rate)
    if case.algorithm is not None:
        return baguarun.DistributedDataParallel(
            model,
            optimizers=[optimizer],
            algorithm=case.algorithm,
            process_group=group,
        ), optimizer
    # On Gloo the collectives that torch's PowerSGD starts in callbacks of several buckets cross.
    cap_mb = 1024 if case.hook == "powersgd" else None
    wrapped = DistributedDataParallel(
        model, process_group=group, gradient_as_bucket_view=True, bucket_cap_mb=cap_mb
    )
    if case.hook == "fp16":
        wrapped.register_comm_hook(group, fp16_compress_hook)
    elif case.hook == "powersgd":
        state = PowerSGDState(group, matrix_approximation_rank=_POWERSGD_RANK, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook)
    return wrapped, optimizer
