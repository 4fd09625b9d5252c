"""`run`: the training function of a script that may be stopped and gone on with at any step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from baguarun.elastic.training.state import State
from baguarun.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")


def run(train: Callable[Concatenate[State, P], R]) -> Callable[Concatenate[State, P], R]:
    """Decorates the training function, whose first argument is the `State`.

    It is called with the state of the newest checkpoint, if the state has any, and so goes on where the last
    life of the job left off, on any number of workers. Checkpoints under way are finished before it returns.
    """

    @functools.wraps(train)
    def running(state: State, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if not isinstance(state, State):
            raise UsageError(
                f"baguarun.elastic.run: the first argument is a {type(state).__name__}; want a State"
            )
        state.resume()
        try:
            return train(state, *args, **kwargs)
        finally:
            state.close()

    return running
