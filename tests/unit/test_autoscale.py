"""How many engines there should be: bounds, patience, and an end to every change."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmoe.engines.autoscale import Advice, EngineLoad, Scaling, advise
from asyncmoe.engines.gate import Gate
from asyncmoe.engines.scheduling import UNKNOWN, Lengths, Waiting
from asyncmoe.errors import ConfigError
from tests.unit.example_counts import examples

SCALING = Scaling(2, 6, low=0.75, high=1.5, patience_s=60)
FULL, AHEAD, LEVEL = EngineLoad(0, 0.0, 1.0, 4), EngineLoad(0, 2.0, 1.0, 4), EngineLoad(0, 0.9, 1.0, 4)
loads = st.builds(
    EngineLoad, st.just(0.0), st.sampled_from([0.0, 0.4, 0.5, 0.9, 1.0, 3.0]), st.sampled_from([0.0, 0.99, 1.0, 2.0]), st.integers(0, 9)
)


def after(*told: tuple[float, EngineLoad]) -> int:
    advice = Advice()
    for now, load in told:
        advice = advise(advice, replace(load, now=now), SCALING)
    return advice.engines


def test_a_reason_is_followed_when_it_has_held_long_enough() -> None:
    assert [after((0, load), (59, load)) for load in (FULL, AHEAD, LEVEL)] == [4, 4, 4]
    assert [after((0, load), (60, load)) for load in (FULL, AHEAD, LEVEL)] == [5, 3, 4]
    assert after((0, FULL), (30, AHEAD), (60, FULL), (119, FULL)) == 4, "a break begins anew"
    assert after((0, FULL), (60, FULL), (300, LEVEL), (359, LEVEL)) == 5, "nor is it given up at once"
    assert after((0, FULL), (60, FULL), (300, LEVEL), (360, LEVEL)) == 4


def test_a_queue_that_is_taken_as_soon_as_it_is_a_batch_means_that_the_trainer_waits() -> None:
    saw = [(float(second), replace(FULL, depth=second % 10 / 10)) for second in range(300)]
    assert after(*saw) == 5


def test_where_an_engine_less_could_run_all_requests_one_is_too_many() -> None:
    assert after((0, replace(LEVEL, busy=0.75)), (60, replace(LEVEL, busy=0.75))) == 3
    assert after((0, replace(LEVEL, busy=0.8)), (60, replace(LEVEL, busy=0.8))) == 4


def test_a_queue_that_moves_the_right_way_is_left_alone() -> None:
    growing, shrinking = replace(FULL, depth=0.3), replace(AHEAD, depth=1.7)
    assert after((0, FULL), (60, growing)) == 4
    assert after((0, AHEAD), (60, shrinking)) == 4
    assert after((0, FULL), (60, growing), (300, growing), (360, growing)) == 5, "it moves no more"


def test_after_a_change_the_reason_must_hold_again() -> None:
    more = replace(FULL, engines=5)
    assert after((0, FULL), (60, FULL), (65, more), (124, more)) == 5
    assert after((0, FULL), (60, FULL), (65, more), (125, more)) == 6


def test_no_engine_is_missing_where_those_there_are_have_room() -> None:
    """The queue is empty because nothing may start."""
    idle = replace(FULL, busy=0.9)
    assert after((0, idle), (1000, idle)) == 4


@settings(max_examples=examples(50), deadline=None)
@given(told=st.lists(st.tuples(st.floats(0, 100), loads), min_size=1, max_size=40))
def test_advice_is_within_the_bounds_and_one_from_what_serves(told: list[tuple[float, EngineLoad]]) -> None:
    advice, now, held = Advice(), 0.0, 0.0
    for gone, load in told:
        now += gone
        before, advice = advice, advise(advice, replace(load, now=now), SCALING)
        assert SCALING.least <= advice.engines <= SCALING.most
        inside = SCALING.least <= load.engines <= SCALING.most
        if inside:
            assert abs(advice.engines - load.engines) <= 1
        held = held + gone if (load.engines, advice.reason) == (before.serving, before.reason) else 0.0
        if inside and advice.engines != before.engines and load.engines == before.serving:
            assert held >= SCALING.patience_s - 1e-6, "no change of mind before its time"


@settings(max_examples=20, deadline=None)
@given(needed=st.integers(1, 8), start=st.integers(2, 6), depth=st.floats(0, 4))
def test_followed_it_comes_to_rest_at_what_is_needed(needed: int, start: int, depth: float) -> None:
    """A queue that grows with more engines than needed, and shrinks with fewer, between nothing and four batches."""
    advice, engines, seen = Advice(), start, []
    for step in range(1000):
        depth = min(max(depth + 0.05 * (engines - needed), 0.0), 4.0)
        advice = advise(advice, EngineLoad(10.0 * step, depth, 1.0, engines), SCALING)
        engines = advice.engines
        seen.append(engines)
    inside = min(max(needed, SCALING.least), SCALING.most)
    assert set(seen[-500:]) <= {inside - 1, inside, inside + 1}


def test_bounds_in_the_wrong_order_are_refused() -> None:
    for bad in ({"least": 0}, {"most": 1}, {"low": 1.5}, {"low": -1.0}):
        with pytest.raises(ConfigError, match="autoscaling"):
            replace(SCALING, **bad)


def test_requests_count_from_their_arrival_until_they_leave() -> None:
    async def body() -> list[int]:
        gate, seen, leave = Gate(1, Waiting("fifo", 0, Lengths())), [], asyncio.Event()

        async def ask() -> None:
            async with gate.place(UNKNOWN):
                await leave.wait()

        asked = [asyncio.create_task(ask()) for _ in range(3)]
        await asyncio.sleep(0)
        seen.append(gate.present)
        asked[2].cancel()
        await asyncio.wait({asked[2]})
        seen.append(gate.present)
        leave.set()
        await asyncio.gather(*asked[:2])
        return [*seen, gate.present]

    assert asyncio.run(body()) == [3, 2, 0]
