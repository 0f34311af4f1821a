"""The engines of a simulation: groups start as the capacity law allows, and turns are sampled, some after waiting for a tool.

Responses wait for slots in order of arrival.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator

from asyncmoe.simulate.fleet import Fleet, Span
from asyncmoe.simulate.state import RunState, SimulatedGroup, SimulatedResponse
from asyncmoe.simulate.workload import Episode


class SimulatedEngines:
    """The generating pool.

    Args:
        groups: episodes of the groups to sample; endless.
        sampled: receives each response whose last turn is complete.
    """

    def __init__(self, state: RunState, groups: Iterator[list[Episode]], sampled: Callable[[SimulatedResponse], None]) -> None:
        plant, engines = state.plant, state.plant.engines
        self._state, self._clock, self._groups, self._hand_over = state, state.clock, groups, sampled
        self._size, self._batch = plant.group_size, plant.batch
        self._fleet = Fleet(engines.count, engines.max_running, plant.step_s, engines.prefill_s, plant.max_concurrent)
        self._waiting: deque[SimulatedResponse] = deque()
        self._served_at: list[list[float]] = [self._fleet.clocks(0.0)]

    def start_groups(self) -> None:
        """Start as many groups as the policy allows."""
        state = self._state
        if count := self._may_start():
            state.ledger = state.ledger.start(count * self._size)
            for _ in range(count):
                self._waiting.extend(SimulatedGroup(next(self._groups)).members)
        self._place()

    def next_event(self) -> float:
        """Return the time at which the next turn is complete; inf if there is none."""
        return self._clock.at_engine_time(self._fleet.next_event())

    def happen(self) -> None:
        """Let the next event happen, at the current time."""
        response, engine, span = self._fleet.happen()
        self._count_tokens(response, engine, span)
        response.turn += 1
        if response.turn < len(response.turns):
            self._clock.after(response.tools[response.turn - 1], lambda: self._next_turn(response))
        else:
            self._hand_over(response)
        self._place()

    def land(self) -> None:
        """Begin to serve the state's version."""
        self._served_at.append(self._fleet.clocks(self._clock.engine_time))

    def read(self) -> None:
        """Bring the engines' totals in `RunState.now` up to date."""
        self._fleet.settle(self._clock.engine_time)
        self._state.now.busy, self._state.now.sampled = self._fleet.busy, self._fleet.tokens

    def _may_start(self) -> int:
        """Return how many groups may start now; in modes that start whole batches, at most as many as the current batch still lacks."""
        state, size = self._state, self._size
        if not state.law.may_start(state.ledger, size, state.version):
            return 0
        under_way = (state.ledger.accepted + state.ledger.running) % self._batch
        if state.mode != "async":
            if state.ledger.running and not under_way:
                return 0
            return self._most((self._batch - under_way) // size)
        return self._most((state.law.max_staleness + 1) * self._batch // size)

    def _most(self, bound: int) -> int:
        """Return how many groups the law admits together, up to a bound; the law is known to admit one."""
        law, ledger, version = self._state.law, self._state.ledger, self._state.version
        return 1 + bisect_left(range(2, bound + 1), True, key=lambda count: not law.may_start(ledger, count * self._size, version))

    def _place(self) -> None:
        fleet, waiting = self._fleet, self._waiting
        if not waiting or self._clock.paused:
            return
        now, version = self._clock.engine_time, self._state.version
        while waiting and fleet.free > 0:
            response = waiting.popleft()
            response.version, response.group.oldest = version, min(version, response.group.oldest)
            fleet.place(response, response.turns[response.turn], now)

    def _next_turn(self, response: SimulatedResponse) -> None:
        self._waiting.append(response)
        self._place()

    def _count_tokens(self, response: SimulatedResponse, engine: int, span: Span) -> None:
        """Split the tokens of a turn by the version that sampled them."""
        tokens, served = response.group.tokens, self._state.version
        (start, end), before = span, 0.0
        for version in range(response.version + 1, served + 1):
            until = max(0.0, min(self._served_at[version][engine], end) - start)
            tokens[version - 1] = tokens.get(version - 1, 0.0) + until - before
            before = until
        tokens[served] = tokens.get(served, 0.0) + end - start - before
