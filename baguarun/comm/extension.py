"""Loads `baguarun._C`, the compiled engine, or says what to run when it cannot be loaded."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from baguarun.errors import SetupError

if TYPE_CHECKING:
    from baguarun.comm.algorithms import Operation

REMEDY = "run `make setup` (in a checkout) or `pip install --no-build-isolation .` again"


@functools.cache
def load_extension() -> ModuleType:
    """The compiled engine, built for the torch of this process.

    Raises `SetupError` when it is missing, or was built for another Python or another torch.
    """
    if importlib.util.find_spec("baguarun._C") is None:
        raise SetupError(f"the compiled engine baguarun._C is missing{_other_builds()}: {REMEDY}")
    check_build(_built_for(), torch.__version__)
    try:
        return importlib.import_module("baguarun._C")
    except ImportError as error:
        raise SetupError(f"the compiled engine baguarun._C cannot be loaded ({error}): {REMEDY}") from error


def operation_spec(operation: Operation) -> Any:
    """What the engine calls it."""
    extension = load_extension()
    spec = extension.OperationSpec(
        kind=getattr(extension.OperationKind, operation.kind.value),
        wire=getattr(extension.Wire, operation.wire.value),
        average=operation.average,
        keep=operation.keep,
        error_feedback=operation.error_feedback,
    )
    spec.matrix_rank = operation.matrix_rank
    return spec


def check_build(built_for: str, found: str) -> None:
    """Compare two torch versions by what fixes the binary interface: major.minor, and CPU or which CUDA."""
    if _minor(built_for) != _minor(found):
        raise SetupError(
            f"baguarun._C was built for torch {_minor(built_for)}, this is {_minor(found)}: {REMEDY}"
        )
    if _variant(built_for) != _variant(found):
        raise SetupError(f"baguarun._C was built for torch {built_for}, this is {found}: {REMEDY}")


def _built_for() -> str:
    try:
        info = importlib.import_module("baguarun._build_info")
    except ImportError as error:
        raise SetupError(f"baguarun._C is there but the record of its build is not: {REMEDY}") from error
    return str(info.TORCH_VERSION)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _variant(version: str) -> str:
    """The local part of a version: "cpu", "cu130", or "" for a torch that does not say."""
    return version.partition("+")[2]


def _other_builds() -> str:
    package = Path(__file__).resolve().parent.parent
    others = sorted(file.name for file in package.glob("_C.*.so"))
    return f" for this Python (found {', '.join(others)})" if others else ""
