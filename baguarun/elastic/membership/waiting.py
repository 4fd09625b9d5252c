"""Waiting with a bound, exactly: no cancellation is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def within(timeout_s: float | None, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, or `asyncio.TimeoutError` (and `work` cancelled) after `timeout_s`.

    `asyncio.wait_for` before Python 3.12 drops a cancellation that arrives together with the result
    (https://github.com/python/cpython/issues/86296); an agent that is told to stop would then go on.
    """
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait((task,), timeout=timeout_s)
    finally:
        if not task.done():
            task.cancel()
    if not done:
        raise asyncio.TimeoutError
    return task.result()


async def first_of(*work: Coroutine[Any, Any, Any]) -> None:
    """Run all; when one ends, cancel the rest, wait for them, and raise what the first one raised."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if task in done:
            task.result()
