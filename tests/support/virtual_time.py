"""An event loop whose clock jumps to the next timer: seconds of waiting cost nothing and nothing is timed."""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Awaitable, Callable
from typing import Any

BOUND_S = 10_000.0
"""Virtual seconds after which a test counts as hung."""


class _Clock(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Instead of sleeping for `timeout`, says that so much time has passed."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise AssertionError("every task waits and no timer is set: the test would hang for ever")
        # As real time does, it moves a little whatever happens.
        self.now_s += max(timeout, 1e-6)
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """For code that does no I/O."""

    def __init__(self) -> None:
        self._clock = _Clock()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now_s


def in_virtual_time(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an `async def` test in a virtual-time loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def bounded() -> None:
            await asyncio.wait_for(test(*args, **kwargs), BOUND_S)

        loop = VirtualTimeLoop()
        try:
            loop.run_until_complete(bounded())
        finally:
            _cancel_all(loop)
            loop.close()

    return run


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    async def gather() -> None:
        await asyncio.gather(*tasks, return_exceptions=True)

    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    loop.run_until_complete(gather())
    loop.run_until_complete(loop.shutdown_asyncgens())
