"""Engines with contexts that cost time and room, against closed sums and against an engine that goes step by step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmoe.errors import ConfigError
from asyncmoe.simulate.contexts import ContextCosts, ContextEngine
from asyncmoe.simulate.decoding import Spans, StepTime
from asyncmoe.simulate.fleet import Fleet
from tests.unit.example_counts import examples

STEP = StepTime(0.01, 64.0)
requests = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 300)), min_size=1, max_size=12)
"""Tokens of the context before, and tokens to sample."""


def fleet_of(costs: ContextCosts, prefill_s: float = 0.0, slow: dict[int, float] | None = None, engines: int = 1) -> Fleet[int]:
    return Fleet(engines, 16, STEP, prefill_s, costs, slow)


def run(fleet: Fleet[int], most: int = 100_000) -> dict[int, tuple[float, Spans]]:
    """Let everything happen; when each request finished, and between which readings of the clock it was sampled."""
    found: dict[int, tuple[float, Spans]] = {}
    for _ in range(most):
        if (now := fleet.next_event()) == math.inf:
            return found
        if (done := fleet.happen()) is not None:
            found[done[0]] = now, done[2]
    raise AssertionError(f"more than {most} events")


def step_by_step(asked: Sequence[tuple[int, int]], cost: float) -> dict[int, float]:
    """When each request finishes: all start at 0, and a token attends to the tokens before it and half of itself."""
    left = {number: (float(context), tokens) for number, (context, tokens) in enumerate(asked)}
    now, found = 0.0, {}
    while left:
        now += STEP(len(left)) + cost * sum(context + 0.5 for context, _ in left.values())
        left = {number: (context + 1, tokens - 1) for number, (context, tokens) in left.items()}
        found |= {number: now for number, (_, tokens) in left.items() if not tokens}
        left = {number: one for number, one in left.items() if one[1]}
    return found


@given(context=st.integers(0, 100_000), tokens=st.integers(1, 100_000), cost=st.floats(1e-9, 1e-3))
def test_one_request_takes_the_closed_sum(context: int, tokens: int, cost: float) -> None:
    fleet = fleet_of(ContextCosts(step_s=cost))
    fleet.place(0, tokens, 0.0, context)
    assert run(fleet)[0][0] == pytest.approx(tokens * STEP(1) + cost * (context * tokens + tokens**2 / 2), rel=1e-9)
    assert fleet.tokens == pytest.approx(tokens)


@given(asked=requests, cost=st.sampled_from([0.0, 1e-6, 1e-4, 1e-2]))
def test_many_requests_finish_when_they_do_step_by_step(asked: list[tuple[int, int]], cost: float) -> None:
    fleet = fleet_of(ContextCosts(step_s=cost, room=1e9))
    for number, (context, tokens) in enumerate(asked):
        fleet.place(number, tokens, 0.0, context)
    assert {number: now for number, (now, _) in run(fleet).items()} == pytest.approx(step_by_step(asked, cost), rel=1e-9)


@given(asked=requests, later=st.floats(0, 2), cost=st.sampled_from([0.0, 1e-5]))
def test_an_interruption_in_the_middle_of_steps_changes_nothing(asked: list[tuple[int, int]], later: float, cost: float) -> None:
    """Reading an engine at any time leaves its future as it was."""
    plain, read = fleet_of(ContextCosts(step_s=cost, room=1e9)), fleet_of(ContextCosts(step_s=cost, room=1e9))
    for fleet in (plain, read):
        for number, (context, tokens) in enumerate(asked):
            fleet.place(number, tokens, 0.0, context)
    first = plain.next_event()
    if later < first:
        assert read.clocks(later)[0] <= min(tokens for _, tokens in asked)
        read.settle(later)
    assert {n: now for n, (now, _) in run(read).items()} == pytest.approx({n: now for n, (now, _) in run(plain).items()}, rel=1e-9)


class Watched(ContextEngine[int]):
    """Looks at its room whenever something has happened."""

    def happen(self, now: float) -> tuple[int, Spans] | None:
        found = super().happen(now)
        self.look()
        return found

    def add(self, *arguments: float) -> None:
        super().add(*arguments)  # type: ignore[arg-type]
        self.look()

    def look(self) -> None:
        running = [one for one in self._here.values() if one.running]
        assert self.running == len(running)
        assert self.contexts == pytest.approx(sum(one.context + self.clock - one.begun for one in running), abs=1e-6)
        assert self.contexts <= self._costs.room + 1e-6
        # Requests run in the order in which they came: those that wait are the newest.
        waiting = [one.number for one in self._here.values() if not one.running]
        assert not waiting or not running or max(one.number for one in running) < min(waiting)


@settings(max_examples=examples(200))
@given(
    asked=requests,
    room=st.integers(600, 2000),
    cost=st.sampled_from([0.0, 1e-5]),
    prefill=st.sampled_from([0.0, 1e-4]),
    cancelled=st.integers(0, 11),
)
def test_contexts_never_exceed_the_room_and_preempted_work_is_redone(
    asked: list[tuple[int, int]], room: int, cost: float, prefill: float, cancelled: int
) -> None:
    fleet = fleet_of(ContextCosts(cost, prefill, room=room))
    engine = Watched([STEP(batch) for batch in range(17)], 0.0, fleet._at, ContextCosts(cost, prefill, room=room))
    fleet._engines[0] = engine
    for number, (context, tokens) in enumerate(asked):
        fleet.place(number, tokens, 0.0, context, context)
    gone = cancelled if cancelled < len(asked) > 1 else -1
    if gone >= 0:
        fleet.cancel(gone, min(0.5, fleet.next_event()))
        engine.look()
    found = run(fleet)
    assert set(found) == set(range(len(asked))) - {gone}
    for number, (_, spans) in found.items():
        assert sum(end - start for start, end in spans) == pytest.approx(asked[number][1], abs=1e-6)
    assert sum(len(spans) - 1 for _, spans in found.values()) <= engine.preemptions
    oldest = min(found)
    assert len(found[oldest][1]) == 1, "the oldest is never preempted"
    assert (fleet.in_flight, fleet.free, engine.contexts, engine.running) == (0, 16, 0.0, 0)
    if gone < 0:
        # All time is steps and prefills: of each context once, and of each preempted one again.
        assert engine.recomputed > 0 or not engine.preemptions
        spent = (sum(context for context, _ in asked) + engine.recomputed) * prefill
        # A request that comes in the middle of a step holds its place until the next one.
        assert 0 <= engine.tokens - sum(tokens for _, tokens in asked) + 1e-6 <= (len(asked) + engine.preemptions if prefill else 1e-5)
        assert max(now for now, _ in found.values()) == pytest.approx(engine.busy)
        if not cost:
            least = sum(tokens for _, tokens in asked) * STEP(16) / 16
            assert engine.busy >= least + spent - 1e-9


def test_the_newest_is_preempted_and_prefilled_again() -> None:
    """Two requests of 100 tokens fill a room of 120 after 60 steps each: the newer one waits until the older is done."""
    fleet = fleet_of(ContextCosts(prefill_s=0.001, room=120))
    fleet.place(0, 100, 0.0)
    fleet.place(1, 100, 0.0)
    found = run(fleet)
    assert found[0] == (pytest.approx(60 * STEP(2) + 40 * STEP(1)), ((0.0, 100.0),))
    assert found[1] == (pytest.approx(found[0][0] + 60 * 0.001 + 40 * STEP(1)), ((0.0, 60.0), (100.0, 140.0)))
    assert (fleet.preemptions, fleet.recomputed) == (1, pytest.approx(60))


def test_a_context_that_no_engine_has_room_for_is_refused_by_name() -> None:
    fleet = fleet_of(ContextCosts(room=100))
    with pytest.raises(ConfigError, match=r"engines\.kv_tokens: got 100, expected at least 150"):
        fleet.place(0, 100, 0.0, 50)


@given(fresh=st.lists(st.integers(0, 5000), min_size=1, max_size=8), chunk=st.sampled_from([512, 2048, math.inf]))
def test_prompts_that_come_together_share_passes_of_a_chunk(fresh: list[int], chunk: float) -> None:
    fleet = fleet_of(ContextCosts(prefill_s=0.001, chunk=chunk), prefill_s=0.5)
    for number, tokens in enumerate(fresh):
        fleet.place(number, 10, 0.0, tokens, tokens)
    passes = max(1, math.ceil(sum(fresh) / chunk))
    assert max(now for now, _ in run(fleet).values()) == pytest.approx(0.5 * passes + 0.001 * sum(fresh) + 10 * STEP(len(fresh)))


@given(factor=st.floats(1, 100), room=st.sampled_from([math.inf, 150.0]))
def test_a_slow_engine_takes_its_factor_as_long_for_everything(factor: float, room: float) -> None:
    costs = ContextCosts(1e-5, 1e-3, 64, room)
    ends = []
    for slow in ({}, {0: factor}):
        fleet = fleet_of(costs, 0.1, slow)
        for number in range(3):
            fleet.place(number, 40 + number, 0.0, 30, 30)
        ends.append([now for now, _ in run(fleet).values()])
    assert ends[1] == pytest.approx([factor * now for now in ends[0]])


def test_a_new_version_recomputes_what_is_running() -> None:
    fleet = fleet_of(ContextCosts(prefill_s=0.01))
    fleet.place(0, 100, 0.0, 50, 0)
    fleet.recompute(20 * STEP(1))
    assert run(fleet)[0][0] == pytest.approx(100 * STEP(1) + 70 * 0.01)
    assert fleet.recomputed == pytest.approx(70)
