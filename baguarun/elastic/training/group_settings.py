"""What an optimizer's parameter groups hold besides parameters: learning rates, betas and other settings."""

from __future__ import annotations

from typing import Any

import torch

from baguarun.comm.extension import load_extension

Settings = dict[str, Any]
"""Of one group, by name. Not to be changed: they may be given out again."""


class GroupSettings:
    """Looks at an optimizer's groups several times in every step, where seldom anything has changed.

    Threads: the one that trains.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._known = load_extension().KnownValues()
        self._settings: list[Settings] = []

    def read(self) -> list[Settings]:
        """Of each group, as they are now; tensors are copied. The same list as last time if all are."""
        groups = self._optimizer.param_groups
        if not self._known.are(groups):
            self._settings = [
                {name: _copy(value) for name, value in group.items() if name != "params"} for group in groups
            ]
            if any(isinstance(value, torch.Tensor) for each in self._settings for value in each.values()):
                # It may change in its place.
                self._known.forget()
        return self._settings

    def put_back(self, settings: list[Settings]) -> None:
        """Make them what they were when `read` returned `settings`."""
        for group, kept in zip(self._optimizer.param_groups, settings, strict=True):
            for name, value in kept.items():
                if isinstance(value, torch.Tensor) and isinstance(group.get(name), torch.Tensor):
                    group[name].copy_(value)
                else:
                    group[name] = _copy(value)


def changed(before: Settings, now: Settings) -> Settings:
    """Those of `now` that were others before; not the learning rate, which is not looked at, as to compare
    tensors waits for an accelerator."""
    names = (name for name in before if name != "lr")
    return {name: now[name] for name in names if not _same(now[name], before[name])}


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    return bool(one == other)
