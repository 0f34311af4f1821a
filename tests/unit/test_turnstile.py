"""Tasks that compute pass in order, a few in each turn of the event loop."""

from __future__ import annotations

import asyncio

import pytest

from asyncmoe.engines import turnstile as module
from asyncmoe.engines.turnstile import turnstile


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the turnstile's clock shows."""
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def play(clock: list[float], seconds: float, count: int, cancelled: frozenset[int] = frozenset()) -> list[tuple[int, int]]:
    """Have tasks compute for so many seconds each; return (task, turn of the loop), in the order in which they passed."""

    async def run() -> list[tuple[int, int]]:
        passed: list[tuple[int, int]] = []
        turns = 0

        async def task(number: int) -> None:
            await turnstile().wait()
            passed.append((number, turns))
            clock[0] += seconds

        tasks = [asyncio.create_task(task(number)) for number in range(count)]
        while not all(one.done() for one in tasks):
            await asyncio.sleep(0)
            turns += 1
            if turns == 1:
                for number in cancelled:
                    tasks[number].cancel()
        return passed

    return asyncio.run(run())


def test_quick_tasks_pass_in_one_turn(clock: list[float]) -> None:
    assert len({turn for _, turn in play(clock, 0.0, 50)}) == 1


def test_slow_tasks_pass_one_in_a_turn_and_in_order(clock: list[float]) -> None:
    passed = play(clock, 2 * module.BUDGET_S, 6)
    assert [number for number, _ in passed] == list(range(6))
    assert len({turn for _, turn in passed}) == 6


def test_a_cancelled_task_keeps_nobody_waiting(clock: list[float]) -> None:
    passed = play(clock, 2 * module.BUDGET_S, 6, frozenset({2, 3}))
    assert [number for number, _ in passed] == [0, 1, 4, 5]


def test_each_event_loop_has_its_own(clock: list[float]) -> None:
    async def one() -> module.Turnstile:
        assert turnstile() is turnstile()
        return turnstile()

    assert asyncio.run(one()) is not asyncio.run(one())
