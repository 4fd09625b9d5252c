"""Names of Bagua's that are not here say so where they are imported, and what stands in their place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn

from baguarun.errors import UsageError


class LeftOutError(UsageError, ImportError):
    """Bagua has that name, and it is not here; an `ImportError` too, as of any name that is not there."""


def left_out(module: str, instead: Mapping[str, str]) -> Callable[[str], NoReturn]:
    """The `__getattr__` of a `module` without the names in `instead`, which says why and what to use."""

    def __getattr__(name: str) -> NoReturn:
        if name in instead:
            raise LeftOutError(f"{module} has no {name}: {instead[name]}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return __getattr__
