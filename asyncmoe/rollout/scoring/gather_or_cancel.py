"""Wait for several scores that are useless without each other."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def together(asked: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines (at least one) concurrently and return their results. If one raises, cancel the others, then raise its error."""
    if len(asked) == 1:
        return [await asked[0]]
    tasks = [asyncio.create_task(one) for one in asked]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
