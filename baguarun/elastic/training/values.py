"""What a `State` holds: objects with a state_dict, and plain values."""

from __future__ import annotations

import copy
import enum
import io
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

import torch

from baguarun.comm.ddp import DistributedDataParallel
from baguarun.errors import UsageError

# Exact types: what is written of a subclass (numpy's float64, an IntEnum, a namedtuple) is not read back.
_UNCHANGING: frozenset[type] = frozenset(
    {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device}
)
_DICTS: frozenset[type] = frozenset({dict, OrderedDict, Counter})
_SEQUENCES: frozenset[type] = frozenset({list, tuple, set, torch.Size})
_TENSORS: frozenset[type] = frozenset({torch.Tensor, torch.nn.Parameter})


def is_stateful(value: object) -> bool:
    """Whether `value` keeps itself by state_dict and load_state_dict."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def accepted(name: str, value: Any) -> Any:
    """`value` as a State holds it: itself, or Python's number for one of numpy's.

    Raises `UsageError` for a plain value that cannot be kept. Of a stateful one that is seen when it is kept:
    to take its state may cost much, or be collective.
    """
    if is_stateful(value):
        return value
    if isinstance(value, torch.device):
        raise UsageError(f"State: '{name}' is a device, which is each worker's own; want it outside of State")
    kept = readable(f"'{name}'", value)
    return kept if _is_numpy_scalar(value) else value


def state_of(name: str, value: Any) -> Any:
    """What is kept of `value`, called `name`, as `readable` gives it: the tensors are the live ones."""
    return readable(_place_of(name, value), _raw_state(value))


def capture(name: str, value: Any) -> Any:
    """A copy of `state_of` that later changes of `value` do not reach; tensors on the CPU."""
    return _convert(_place_of(name, value), _raw_state(value), _copy_on_cpu)


def readable(place: str, tree: Any) -> Any:
    """`tree` in containers of its own, with Python's numbers in place of numpy's; tensors are the same ones.

    Raises `UsageError`, saying where below `place`, for what could not be read back from a file or a message.
    """
    return _convert(place, tree, lambda tensor: tensor)


def _place_of(name: str, value: Any) -> str:
    return f"'{name}'.state_dict()" if is_stateful(value) else f"'{name}'"


def _raw_state(value: Any) -> Any:
    if isinstance(value, DistributedDataParallel):
        # Without the wrapper's "module." before every name: the same file serves the bare model.
        return value.module.state_dict()
    return value.state_dict() if is_stateful(value) else value


def restore(value: Any, kept: Any) -> Any:
    """`value` as it was kept: itself, loaded, or a copy of `kept` in its place."""
    if isinstance(value, DistributedDataParallel):
        value.module.load_state_dict(kept)
        return value
    if is_stateful(value):
        value.load_state_dict(_with_steps_on_cpu(kept) if isinstance(value, torch.optim.Optimizer) else kept)
        if isinstance(value, torch.amp.GradScaler):
            end_step(value)
        return value
    return _where(value, copy.deepcopy(kept))


def _where(value: Any, kept: Any) -> Any:
    """`kept` with its tensors on the devices of those that are at the same places in `value`."""
    if type(kept) in _TENSORS:
        return kept.to(value.device) if isinstance(value, torch.Tensor) else kept
    if type(kept) in _DICTS and isinstance(value, dict):
        return type(kept)({key: _where(value.get(key), item) for key, item in kept.items()})
    if type(kept) in (list, tuple) and isinstance(value, (list, tuple)):
        beside = [*value, *[None] * (len(kept) - len(value))]
        return type(kept)(_where(own, item) for own, item in zip(beside, kept, strict=False))
    return kept


def _with_steps_on_cpu(kept: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state as torch makes it: what has come over NCCL lies on the accelerator.

    torch moves counts of steps to where fused and capturable optimizers want them, and leaves those of others
    where they are. These read them on the host in each step, and would wait for the device each time.
    """

    def moved(state: Any) -> Any:
        steps = state.get("step") if isinstance(state, dict) else None
        return {**state, "step": steps.cpu()} if isinstance(steps, torch.Tensor) else state

    if not isinstance(kept.get("state"), dict):
        return kept
    return {**kept, "state": {key: moved(state) for key, state in kept["state"].items()}}


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


class _Foreign(Exception):
    """`item` cannot be read back. Private to this module."""

    def __init__(self, item: object) -> None:
        super().__init__()
        self.item = item


def _convert(place: str, tree: Any, of_tensor: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    try:
        return _converted(tree, of_tensor)
    except _Foreign as found:
        item = found.item
    where = _path_to(item, tree) or ""
    raise UsageError(
        f"State: {place}{where} is a {type(item).__name__}, which cannot be kept; want {_wanted_for(item)}"
    )


def _converted(value: Any, of_tensor: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    kind = type(value)
    if kind in _UNCHANGING:
        return value
    if kind in _TENSORS:
        return of_tensor(value)
    if kind in _DICTS:
        return kind(
            {
                key if type(key) in _UNCHANGING else _converted(key, of_tensor): (
                    item if type(item) in _UNCHANGING else _converted(item, of_tensor)
                )
                for key, item in value.items()
            }
        )
    if kind in _SEQUENCES:
        return kind([item if type(item) in _UNCHANGING else _converted(item, of_tensor) for item in value])
    if _is_numpy_scalar(value) and type(plain := value.item()) in _UNCHANGING:
        return plain
    if not _comes_back(value):
        raise _Foreign(value)
    return of_tensor(value) if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _copy_on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _comes_back(value: object) -> bool:
    """Whether torch reads `value` back: other kinds of tensors, classes that the script has named safe."""
    named = [each[0] if isinstance(each, tuple) else each for each in torch.serialization.get_safe_globals()]
    if not isinstance(value, torch.Tensor) and type(value) not in (bytearray, *named):
        return False
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:  # noqa: BLE001 - whatever `value` makes pickle or torch raise
        return False
    return True


def _is_numpy_scalar(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def _path_to(item: object, inside: Any) -> str | None:
    """Where `item` is, as one would write it behind the name of `inside`."""
    if inside is item:
        return ""
    for step, part in _parts(inside):
        rest = _path_to(item, part)
        if rest is not None:
            return step + rest
    return None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, entry in value.items():
            yield f"[{key!r}]'s key", key
            yield f"[{key!r}]", entry
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{index}]", entry) for index, entry in enumerate(value))
    elif isinstance(value, set):
        yield from (("'s element", entry) for entry in value)


def _wanted_for(value: object) -> str:
    if isinstance(value, enum.Enum):
        return "its .value"
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return "a plain tuple, or a dict as of ._asdict()"
    if type(value).__module__ == "numpy":
        return "a tensor, as of torch.as_tensor(...), or Python's own numbers"
    for base in (dict, list, tuple, set, bool, int, float, complex, str, bytes):
        if isinstance(value, base):
            return f"a plain {base.__name__}, as of {base.__name__}(...)"
    return (
        "an object with state_dict() and load_state_dict(), or numbers, strings, tensors and lists, tuples "
        "or dicts of them"
    )
