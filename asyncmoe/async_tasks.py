"""Groups of asyncio tasks: all-or-nothing ones, those of which the first ends the wait, and background ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")


async def together(asked: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently and return their results. If one raises, cancel the others, then raise its error."""
    tasks = [asyncio.create_task(one) for one in asked]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancelled(tasks)


@asynccontextmanager
async def first_of(*work: Awaitable[Any]) -> AsyncIterator[tuple[asyncio.Future[Any], ...]]:
    """Run awaitables concurrently; enter the block with their futures once one is done, and cancel the others at its end."""
    futures = tuple(map(asyncio.ensure_future, work))
    try:
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        yield futures
    finally:
        await cancelled(futures)


def begun(one: Coroutine[Any, Any, T], among: set[asyncio.Task[T]]) -> asyncio.Task[T]:
    """Start a task and keep it in a set until it ends: the event loop holds only a weak reference."""
    task = asyncio.create_task(one)
    among.add(task)
    task.add_done_callback(among.discard)
    return task


async def cancelled(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Cancel tasks and wait until all have ended, ignoring their results and errors."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
