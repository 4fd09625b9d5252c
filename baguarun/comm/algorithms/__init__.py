"""The algorithms by name. Settings are fields: `ByteGrad(average=False)` instead of the string "bytegrad"."""

from __future__ import annotations

import difflib

from baguarun.comm.algorithms.async_model_average import AsyncModelAverage
from baguarun.comm.algorithms.base import Algorithm, Operation, OperationKind, Wire
from baguarun.comm.algorithms.bytegrad import ByteGrad
from baguarun.comm.algorithms.decentralized import Decentralized
from baguarun.comm.algorithms.diloco import DiLoCo
from baguarun.comm.algorithms.gradient_allreduce import GradientAllReduce
from baguarun.comm.algorithms.local_sgd import LocalSGD
from baguarun.comm.algorithms.low_precision_decentralized import LowPrecisionDecentralized
from baguarun.comm.algorithms.pending import PendingAverages, PendingExchange, PendingReduction
from baguarun.comm.algorithms.power_sgd import PowerSGD
from baguarun.comm.algorithms.qadam import QAdam
from baguarun.comm.algorithms.qadam_optimizer import QAdamOptimizer
from baguarun.comm.algorithms.sparse import Sparse
from baguarun.comm.algorithms.stepper import StepContext, Stepper, require_range
from baguarun.errors import UsageError

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "AsyncModelAverage",
    "ByteGrad",
    "Decentralized",
    "DiLoCo",
    "GradientAllReduce",
    "LocalSGD",
    "LowPrecisionDecentralized",
    "Operation",
    "OperationKind",
    "PendingAverages",
    "PendingExchange",
    "PendingReduction",
    "PowerSGD",
    "QAdam",
    "QAdamOptimizer",
    "StepContext",
    "Stepper",
    "Sparse",
    "Wire",
    "require_range",
    "resolve",
]

_KINDS: tuple[type[Algorithm], ...] = (
    GradientAllReduce,
    ByteGrad,
    Sparse,
    QAdam,
    PowerSGD,
    Decentralized,
    LowPrecisionDecentralized,
    LocalSGD,
    DiLoCo,
    AsyncModelAverage,
)

ALGORITHMS: dict[str, type[Algorithm]] = {kind.name: kind for kind in _KINDS} | {"async": AsyncModelAverage}

DEFAULT = GradientAllReduce.name


def resolve(algorithm: str | Algorithm | None, from_launcher: str | None = None) -> Algorithm:
    """The algorithm meant by the script, else by the command line, else the default.

    Raises `UsageError` for an unknown name, listing all and the nearest.
    """
    if isinstance(algorithm, Algorithm):
        return algorithm
    name = algorithm or from_launcher or DEFAULT
    if not isinstance(name, str):
        raise UsageError(f"algorithm={name!r}: want a name or an Algorithm object")
    kind = ALGORITHMS.get(name)
    if kind is None:
        near = difflib.get_close_matches(name, ALGORITHMS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"algorithm={name!r} is unknown; want one of {', '.join(sorted(ALGORITHMS))}{hint}")
    return kind()
