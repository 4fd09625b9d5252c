"""The rows of the matrix: each algorithm with settings that make it do something within a few steps.

A new algorithm joins by itself with its defaults; a line in `_LISTED` gives it settings, a reference in plain
torch and an optimizer of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from baguarun.comm.algorithms import (
    ALGORITHMS,
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
from baguarun.comm.algorithms.decentralized import PeerSelection
from tests.composition.references import (
    AveragedAtTimes,
    AveragedByNode,
    AveragedGradients,
    AveragedLate,
    AveragedWithAll,
    AveragedWithPeers,
    MakeReference,
    OuterSteps,
)

ROUNDING = 2e-5
"""Of how far the weights moved: what is exact but for the order of sums in float32."""

EIGHT_BITS = 0.03
"""The same for 8 bits on the wire. A gradient that is lost or counted twice differs ten times as much."""

UNEVEN = 0.15
"""The same where what is sent is no smooth function of gradients: which numbers are largest, which way a
matrix points, what is divided by a small variance. Rounding is magnified; a lost gradient differs more still.
"""

SIGNS = 0.5
"""The same for a sign per number, where a feature rounds gradients or moves numbers to other blocks: momentum
near zero changes its sign. A training that exchanges nothing is off by all of the way."""


NODES = (2, 1)
"""The least that goes by rail: one rail, whose owner on the first node sums up for two."""


def make_sgd(params: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
    """With momentum, so that a step that one side leaves out is seen in all later ones."""
    return torch.optim.SGD(params, **{"lr": 0.1, "momentum": 0.5, **options})


def make_qadam(params: Iterable[Any], lr: float = 0.01, **options: Any) -> QAdamOptimizer:
    """With a warm-up that ends in the middle of a short program."""
    return QAdamOptimizer(params, lr, warmup_steps=2, **options)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One algorithm with settings."""

    title: str
    algorithm: Algorithm
    reference: MakeReference | None = None
    """None: held against itself in a program that does without the feature."""
    tolerance: float = ROUNDING
    """Greatest difference from the reference, as a share of how far weights moved."""
    tolerances: Mapping[str, float] = field(default_factory=dict)
    """The same for features, by their titles, that want more."""
    replicas_meet_every: int | None = None
    """After so many steps, counted from the first, replicas are equal bit for bit; None: never."""
    shares_buffers: Callable[[int], bool] = lambda _step: True
    """Whether rank 0's buffers overwrite the others' before the forward of a step, counted from 0."""
    make_optimizer: Callable[..., torch.optim.Optimizer] = make_sgd
    """(parameters, **options) -> the optimizer; options are torch's lr, foreach, fused."""
    knows_scaler: bool = False
    """The optimizer has to know of a GradScaler, as `grad_scaler`."""
    bucket_cap_mb: float = 0.0005
    """Most models of the matrix have several buckets then."""
    nodes: tuple[int, ...] = ()
    """Workers of each node that the ranks take themselves to be on; empty: all are on one."""


_LISTED = (
    Row(
        title="gradient_allreduce",
        algorithm=GradientAllReduce(),
        reference=AveragedGradients,
        replicas_meet_every=1,
    ),
    Row(
        title='gradient_allreduce, wire="bf16"',
        algorithm=GradientAllReduce(wire="bf16"),
        reference=AveragedGradients,
        tolerance=EIGHT_BITS,
        replicas_meet_every=1,
    ),
    Row(
        title="bytegrad",
        algorithm=ByteGrad(),
        reference=AveragedGradients,
        tolerance=EIGHT_BITS,
        replicas_meet_every=1,
    ),
    Row(
        title="bytegrad, error_feedback=True",
        algorithm=ByteGrad(error_feedback=True),
        reference=AveragedGradients,
        tolerance=EIGHT_BITS,
        replicas_meet_every=1,
    ),
    Row(
        title="bytegrad, hierarchical=True",
        algorithm=ByteGrad(hierarchical=True),
        reference=AveragedGradients,
        tolerance=EIGHT_BITS,
        replicas_meet_every=1,
        nodes=NODES,
    ),
    Row(
        title="sparse",
        algorithm=Sparse(warmup_steps=0, density=0.1),
        tolerance=UNEVEN,
        replicas_meet_every=1,
    ),
    Row(
        title="sparse, hierarchical=True",
        algorithm=Sparse(warmup_steps=0, density=0.1, hierarchical=True),
        tolerance=UNEVEN,
        # What is owed when the scale is halved counts double, once: 0.154. Where the scale hardly changes, by
        # a thousandth, it is 0.0003.
        tolerances={"GradScaler": 0.2},
        replicas_meet_every=1,
        nodes=NODES,
    ),
    Row(
        title="power_sgd, start_step=2",
        algorithm=PowerSGD(start_step=2),
        tolerance=UNEVEN,
        replicas_meet_every=1,
    ),
    Row(
        title="power_sgd, start_step=2, hierarchical=True",
        algorithm=PowerSGD(start_step=2, hierarchical=True),
        tolerance=UNEVEN,
        replicas_meet_every=1,
        nodes=NODES,
    ),
    Row(
        title="qadam, warmup_steps=2",
        algorithm=QAdam(),
        tolerance=UNEVEN,
        replicas_meet_every=1,
        make_optimizer=make_qadam,
        knows_scaler=True,
    ),
    Row(
        title="qadam, warmup_steps=2, hierarchical=True",
        algorithm=QAdam(hierarchical=True),
        tolerance=UNEVEN,
        replicas_meet_every=1,
        make_optimizer=make_qadam,
        knows_scaler=True,
        nodes=NODES,
        # A bucket for each parameter, for the reason below.
        bucket_cap_mb=1e-6,
    ),
    Row(
        title="qadam, bits=1, warmup_steps=2",
        algorithm=QAdam(bits=1),
        tolerance=UNEVEN,
        tolerances={"bf16 model": SIGNS, "channels_last": SIGNS},
        replicas_meet_every=1,
        # No number is divided by less than the usual, which would magnify a change of sign.
        make_optimizer=partial(make_qadam, variance_floor=1.0),
        knows_scaler=True,
        # A bucket for each parameter: what shares a block does not depend on what else is in the model.
        bucket_cap_mb=1e-6,
    ),
    Row(
        title="low_precision_decentralized",
        algorithm=LowPrecisionDecentralized(),
        tolerance=EIGHT_BITS,
    ),
    Row(
        title="low_precision_decentralized, bits=4",
        algorithm=LowPrecisionDecentralized(bits=4),
        tolerance=UNEVEN,
    ),
    Row(title="decentralized", algorithm=Decentralized(), reference=AveragedWithAll),
    Row(
        title='decentralized, "shift_one"',
        algorithm=Decentralized(peer_selection_mode="shift_one"),
        reference=lambda: AveragedWithPeers(PeerSelection.SHIFT_ONE),
    ),
    Row(
        title='decentralized, "exponential"',
        algorithm=Decentralized(peer_selection_mode="exponential"),
        reference=lambda: AveragedWithPeers(PeerSelection.EXPONENTIAL),
    ),
    Row(
        title='decentralized, "shift_one", hierarchical=True',
        algorithm=Decentralized(peer_selection_mode="shift_one", hierarchical=True),
        reference=lambda: AveragedByNode(PeerSelection.SHIFT_ONE, NODES),
        nodes=NODES,
    ),
    Row(
        title="local_sgd, local_steps=2",
        algorithm=LocalSGD(local_steps=2),
        reference=lambda: AveragedAtTimes(2),
        replicas_meet_every=2,
        shares_buffers=lambda step: step % 2 == 0,
    ),
    Row(
        title="local_sgd, local_steps=2, warmup_steps=2",
        algorithm=LocalSGD(local_steps=2, warmup_steps=2),
        reference=lambda: AveragedAtTimes(2, warmup_steps=2),
        replicas_meet_every=2,
        shares_buffers=lambda step: step < 2 or step % 2 == 0,
    ),
    Row(
        title="diloco, local_steps=2",
        algorithm=DiLoCo(local_steps=2),
        reference=lambda: OuterSteps(2),
        replicas_meet_every=2,
        shares_buffers=lambda step: step % 2 == 0,
    ),
    Row(
        title='diloco, local_steps=2, wire="int8"',
        algorithm=DiLoCo(local_steps=2, wire="int8"),
        reference=lambda: OuterSteps(2),
        tolerance=EIGHT_BITS,
        replicas_meet_every=2,
        shares_buffers=lambda step: step % 2 == 0,
    ),
    Row(
        title='diloco, local_steps=2, wire="bf16"',
        algorithm=DiLoCo(local_steps=2, wire="bf16"),
        reference=lambda: OuterSteps(2),
        tolerance=EIGHT_BITS,
        replicas_meet_every=2,
        shares_buffers=lambda step: step % 2 == 0,
    ),
    Row(
        title="diloco, local_steps=2, fragments=2, delay_steps=1",
        algorithm=DiLoCo(local_steps=2, fragments=2, delay_steps=1),
        shares_buffers=lambda step: step % 2 == 0,
    ),
    Row(
        # The only setting in which the network does not decide when an average arrives.
        title="async_model_average, max_staleness_steps=1",
        algorithm=AsyncModelAverage(sync_interval_ms=0, max_staleness_steps=1),
        reference=AveragedLate,
        shares_buffers=lambda step: step == 0,
    ),
)


def all_rows() -> tuple[Row, ...]:
    """The listed ones, and every other algorithm that has a name."""
    listed = {type(row.algorithm) for row in _LISTED}
    others = [kind for kind in dict.fromkeys(ALGORITHMS.values()) if kind not in listed]
    return _LISTED + tuple(
        Row(
            title=kind.name,
            algorithm=kind(),
            replicas_meet_every=None if kind.exchanges_weights else 1,
        )
        for kind in others
    )


ROWS = all_rows()
