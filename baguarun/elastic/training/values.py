"""What a `State` holds: objects with a state_dict, and plain values."""

from __future__ import annotations

import copy
from typing import Any, TypeGuard

import torch

from baguarun.comm.ddp import DistributedDataParallel
from baguarun.errors import UsageError

_UNCHANGING: frozenset[type] = frozenset({bool, int, float, complex, str, bytes, type(None)})
_PLAIN = (*_UNCHANGING, torch.Tensor)


def is_stateful(value: object) -> bool:
    """Whether `value` keeps itself by state_dict and load_state_dict."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def require_capturable(name: str, value: object) -> None:
    """Raise `UsageError` for a value that cannot be kept."""
    if not is_stateful(value) and not _is_plain(value):
        raise UsageError(
            f"State: '{name}' is a {type(value).__name__}, which cannot be kept; want an object with "
            "state_dict() and load_state_dict(), or numbers, strings, tensors and lists, tuples or dicts of "
            "them"
        )


def capture(value: Any) -> Any:
    """A copy that later changes of `value` do not reach; tensors on the CPU."""
    if isinstance(value, DistributedDataParallel):
        # Without the wrapper's "module." before every name: the same file serves the bare model.
        return _copy(value.module.state_dict())
    return _copy(value.state_dict() if is_stateful(value) else value)


def restore(value: Any, kept: Any) -> Any:
    """`value` as it was kept: itself, loaded, or a copy of `kept` in its place."""
    if isinstance(value, DistributedDataParallel):
        value.module.load_state_dict(kept)
        return value
    if is_stateful(value):
        value.load_state_dict(kept)
        if isinstance(value, torch.amp.GradScaler):
            end_step(value)
        return value
    return copy.deepcopy(kept)


def is_usual_scaler(value: object) -> TypeGuard[torch.amp.GradScaler]:
    """Whether `tensors_of` and `settings_of` are all that `value` keeps."""
    if not isinstance(value, torch.amp.GradScaler) or not value.is_enabled():
        return False
    return type(value).state_dict is torch.amp.GradScaler.state_dict


def settings_of(scaler: torch.amp.GradScaler) -> tuple[float, float, int]:
    """What the script may set."""
    return scaler._growth_factor, scaler._backoff_factor, scaler._growth_interval


def set_settings(scaler: torch.amp.GradScaler, settings: tuple[float, float, int]) -> None:
    scaler._growth_factor, scaler._backoff_factor, scaler._growth_interval = settings


def tensors_of(scaler: torch.amp.GradScaler) -> list[torch.Tensor]:
    """What steps change of an enabled one between two `end_step`."""
    if scaler._scale is None:
        # The first `scale` makes it, which a newcomer does not call if the first step has no sample for it.
        scaler._lazy_init_scale_growth_tracker(torch.device(scaler._device))
    assert scaler._scale is not None and scaler._growth_tracker is not None
    return [scaler._scale, scaler._growth_tracker]


def end_step(scaler: torch.amp.GradScaler) -> None:
    """Forget how far the step under way has come, which is no part of its state_dict.

    A step that is done again after it was cut short in `scaler.step` would take the new gradients for
    unscaled ones, and the optimizer would be given them with the scale still in them.
    """
    if not scaler.is_enabled():
        return
    scaler._per_optimizer_states.clear()
    tensors_of(scaler)


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _copy(value: Any) -> Any:
    if type(value) in _UNCHANGING:
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: item if type(item) in _UNCHANGING else _copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy(item) for item in value]
    if isinstance(value, tuple):
        items = [_copy(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return copy.deepcopy(value)
