"""`run`: the training function of a script that may be stopped and gone on with at any step."""

from __future__ import annotations

import faulthandler
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, TypeVar

from baguarun.comm.groups import read_worker_env
from baguarun.contract import STACKS_SIGNAL
from baguarun.elastic.training import comparison
from baguarun.elastic.training.default_group import has_others
from baguarun.elastic.training.in_place import InPlaceRun, control_channel
from baguarun.elastic.training.state import State
from baguarun.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")

_RUNNING = threading.Lock()
"""One training function at a time: a process has one place in its job."""

_HAS_TRAINED_IN_PLACE = threading.Event()
"""Set once this process has begun to train in place, which it does a single time."""


def run(train: Callable[Concatenate[State, P], R]) -> Callable[Concatenate[State, P], R]:
    """Decorates the training function, whose first argument is the `State`.

    It is called with the state of the newest checkpoint, if the state has any, and so goes on where the last
    life of the job left off, on any number of workers. Checkpoints under way are finished before it returns.

    Under `baguarun run --elastic in-place` it is called again, in the same process, whenever workers came or
    went, and goes on behind the last step that was committed. What communication raises when a worker is lost
    is caught here: let it pass, and do all training in one call, for a second one is refused.

    Raises `UsageError` while another one runs in this process, and on every worker if those that begin
    together hold different things in their State.
    """

    @functools.wraps(train)
    def running(state: State, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if not isinstance(state, State):
            raise UsageError(
                f"baguarun.elastic.run: the first argument is a {type(state).__name__}; want a State"
            )
        with _the_only_one(train):
            channel = control_channel(read_worker_env())
            try:
                if channel is not None:
                    _require_first(train)
                    # To the descriptor, which is the log: sys.stderr may be anything.
                    faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True)
                    in_place = InPlaceRun(state, channel, read_worker_env())
                    if in_place.is_newcomer:
                        in_place.prepare([*args, *kwargs.values()])
                    _HAS_TRAINED_IN_PLACE.set()
                    return in_place.train(lambda: train(state, *args, **kwargs))
                if has_others():
                    comparison.require_equal(state._captured)
                state.resume()
                return train(state, *args, **kwargs)
            finally:
                state.close()

    return running


@contextmanager
def _the_only_one(train: Callable[..., object]) -> Iterator[None]:
    if not _RUNNING.acquire(blocking=False):
        raise UsageError(
            f"baguarun.elastic.run: '{train.__qualname__}' is called while another training function runs; "
            "want one at a time in a process"
        )
    try:
        yield
    finally:
        _RUNNING.release()


def _require_first(train: Callable[..., object]) -> None:
    if _HAS_TRAINED_IN_PLACE.is_set():
        raise UsageError(
            f"baguarun.elastic.run: '{train.__qualname__}' is called after another training function has "
            "run; a worker that joins would begin with that one. Want all training in one function under "
            "`--elastic in-place`, with what is done already in State"
        )
