"""Algorithms by Bagua's names: `Algorithm.init("bytegrad", average=False)`, and the registry behind it."""

from __future__ import annotations

import difflib
from abc import ABC
from collections.abc import Callable
from typing import Any, NoReturn

from baguarun.comm.algorithms import Algorithm as OurAlgorithm
from baguarun.errors import UsageError

__all__ = ["Algorithm", "AlgorithmImpl", "GlobalAlgorithmRegistry", "UnknownAlgorithmError"]


class UnknownAlgorithmError(UsageError, KeyError):
    """No algorithm has that name; a `KeyError` too, which scripts written for Bagua may catch."""

    def __str__(self) -> str:
        return str(self.args[0])


class AlgorithmRegistry(dict[str, dict[str, Any]]):
    """What makes the algorithm of each name, as `{name: {"algorithm": factory, "description": text}}`."""

    def register(
        self, name: str, algorithm: Callable[..., OurAlgorithm], description: str | None = None
    ) -> None:
        """Let `Algorithm.init(name, ...)` call `algorithm(...)`.

        Raises `TypeError` for a name that is no string, `ValueError` for one that is taken.
        """
        if not isinstance(name, str):
            raise TypeError(f"register(name={name!r}): want a string")
        if name in self:
            raise ValueError(f"register(name={name!r}): the name is taken; want another one")
        self[name] = {"algorithm": algorithm, "description": description or ""}

    def get(self, name: str) -> Callable[..., OurAlgorithm]:  # type: ignore[override]
        """What `register` was given; `UnknownAlgorithmError` lists the known names and the nearest."""
        if name not in self:
            near = difflib.get_close_matches(str(name), self, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            known = ", ".join(sorted(self)) or "none"
            raise UnknownAlgorithmError(f"algorithm {name!r} is unknown; want one of {known}{hint}")
        found: Callable[..., OurAlgorithm] = self[name]["algorithm"]
        return found

    def available_algorithms(self) -> list[str]:
        """The names, in the order of registration."""
        return list(self)

    def __str__(self) -> str:
        return f"Registered Algorithms: {', '.join(self)}"


GlobalAlgorithmRegistry = AlgorithmRegistry()
"""The one registry of Bagua's API; filled when `baguarun.torch_api` is imported."""


class Algorithm(ABC):  # noqa: B024  (abstract for `register` below: a name for what is ours)
    """What all algorithms are instances of. It cannot be subclassed: Bagua's hooks have no engine here."""

    def __init_subclass__(cls) -> None:
        _refuse_subclass(cls)

    @staticmethod
    def init(name: str, **kwargs: Any) -> OurAlgorithm:
        """The algorithm registered as `name`, made with `kwargs`."""
        return GlobalAlgorithmRegistry.get(name)(**kwargs)


class AlgorithmImpl:
    """There to be imported beside `Algorithm`; as little as that can it be subclassed."""

    def __init_subclass__(cls) -> None:
        _refuse_subclass(cls)


def _refuse_subclass(cls: type) -> NoReturn:
    raise UsageError(
        f"{cls.__name__}: Bagua's Algorithm and AlgorithmImpl work on its engine, which is not here; "
        "want a subclass of baguarun.comm.algorithms.Algorithm (docs/writing_an_algorithm.md)"
    )


Algorithm.register(OurAlgorithm)  # type: ignore[type-abstract]
