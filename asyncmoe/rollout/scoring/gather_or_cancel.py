"""Waiting for several scores of which none is of use without the others."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def together(asked: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """What each returns, side by side; at least one. When one raises, the others are cancelled before that is passed on."""
    tasks = [asyncio.create_task(one) for one in asked]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
