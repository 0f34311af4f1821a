"""Scores that are useless without each other; and one alone, which needs no task."""

from __future__ import annotations

import asyncio

import pytest

from asyncmoe.rollout.scoring.gather_or_cancel import together


def test_one_runs_where_it_is_awaited() -> None:
    async def run() -> None:
        async def mine() -> asyncio.Task[None] | None:
            return asyncio.current_task()

        assert await together([mine()]) == [asyncio.current_task()]
        one, other = await together([mine(), mine()])
        assert len({one, other, asyncio.current_task()}) == 3

    asyncio.run(run())


@pytest.mark.parametrize("count", [1, 2])
def test_whoever_waits_can_be_cancelled(count: int) -> None:
    async def run() -> None:
        ended: list[bool] = []

        async def forever() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(True)

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(together([forever() for _ in range(count)]), 0.01)
        assert ended == [True] * count

    asyncio.run(run())
