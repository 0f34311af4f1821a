"""Tests that are coroutines."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any


def asynchronous(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a coroutine test on its own loop, for at most sixty seconds."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments, **named), 60))

    return run


async def until(condition: Callable[[], object]) -> None:
    """Wait for a condition, for at most sixty seconds."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def settle() -> None:
    """Let the loop's other tasks run as far as they can."""
    for _ in range(10):
        await asyncio.sleep(0)
