"""Tests written as coroutines."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

BOUND_S = 120.0
"""Against hangs; no test measures time."""


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an `async def` test in an event loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def bounded() -> None:
            await asyncio.wait_for(test(*args, **kwargs), BOUND_S)

        asyncio.run(bounded())

    return run
