"""The engines together: the least-loaded choice of the live pool, and the next event of any engine.

A heap orders the engines by their next event. An engine that changed has an entry with a newer stamp, which makes its former one void.
`asyncmoe.simulate.decoding` and `contexts` model a single engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from heapq import heappop, heappush
from typing import Generic

import numpy as np

from asyncmoe.simulate.contexts import ContextCosts, ContextEngine
from asyncmoe.simulate.decoding import DecodingEngine, R, Spans, StepTime
from asyncmoe.simulate.workload import Floats


class Fleet(Generic[R]):
    """Engines with `slots` request slots each. Times are in seconds of engine time, which stops while the engines are paused.

    Args:
        costs: what contexts cost; None: nothing.
        slow: how many times as long steps and prefills of an engine take, by its number; 1 for others.

    Attributes:
        free: free request slots.
        in_flight: requests placed and not finished.
    """

    def __init__(
        self,
        engines: int,
        slots: int,
        step: StepTime,
        prefill_s: float = 0.0,
        costs: ContextCosts | None = None,
        slow: Mapping[int, float] | None = None,
    ) -> None:
        self.free, self.in_flight = engines * slots, 0
        self._slots = slots
        self._at: dict[R, int] = {}
        tables = {factor: [factor * step(batch) for batch in range(slots + 1)] for factor in {1.0, *(slow or {}).values()}}
        factors = [(slow or {}).get(number, 1.0) for number in range(engines)]
        self._engines: list[DecodingEngine[R]] = [
            DecodingEngine(tables[factor], factor * prefill_s, self._at)
            if costs is None
            else ContextEngine(tables[factor], factor * prefill_s, self._at, costs.scaled(factor))
            for factor in factors
        ]
        self._by_load: list[set[int]] = [set(range(engines)), *(set() for _ in range(slots))]
        self._lowest = 0
        self._down: set[int] = set()
        self._stamp = [0] * engines
        self._next: list[tuple[float, int, int]] = []
        self._changed: set[int] = set()
        self._placed = 0

    @property
    def tokens(self) -> float:
        """Tokens sampled so far, as of the last event of each engine."""
        return sum(engine.tokens for engine in self._engines)

    @property
    def busy(self) -> float:
        """Seconds in which an engine had requests, summed over engines, as of the last event of each engine."""
        return sum(engine.busy for engine in self._engines)

    @property
    def preemptions(self) -> int:
        """Requests that were preempted for want of room."""
        return sum(engine.preemptions for engine in self._engines)

    @property
    def recomputed(self) -> float:
        """Tokens of contexts that were prefilled again, because of a preemption or a new version."""
        return sum(engine.recomputed for engine in self._engines)

    def place(self, request: R, tokens: int, now: float, context: float = 0.0, fresh: float = 0.0) -> None:
        """Put a request on the engine with the fewest requests; a slot must be free. See `ContextEngine.add`."""
        by_load, load = self._by_load, self._lowest
        while not by_load[load]:
            load += 1
        self._lowest = load
        number = by_load[load].pop()
        by_load[load + 1].add(number)
        self._placed += 1
        self._engines[number].add(request, tokens, now, self._placed, context, fresh)
        self._at[request] = number
        self._changed.add(number)
        self.free -= 1
        self.in_flight += 1

    def next_event(self) -> float:
        """Return the time at which the next request finishes or is preempted; inf if there is none."""
        stamps, upcoming = self._stamp, self._next
        if self._changed:
            for number in self._changed:
                stamps[number] += 1
                if (at := self._engines[number].next_event()) < math.inf:
                    heappush(upcoming, (at, stamps[number], number))
            self._changed.clear()
        while upcoming and upcoming[0][1] != stamps[upcoming[0][2]]:
            heappop(upcoming)
        return upcoming[0][0] if upcoming else math.inf

    def happen(self) -> tuple[R, int, Spans] | None:
        """Finish the next request and return it, its engine, and the readings of the engine's clock between which it was sampled.

        None: a request was preempted instead.
        """
        now, _, number = heappop(self._next)
        self._changed.add(number)
        engine = self._engines[number]
        found = engine.happen(now)
        if found is None:
            return None
        request, spans = found
        del self._at[request]
        self._left(number, engine.load)
        return request, number, spans

    def cancel(self, request: R, now: float) -> None:
        """Remove a request, if an engine has it."""
        if (number := self._at.pop(request, None)) is not None:
            engine = self._engines[number]
            engine.remove(request, now)
            self._changed.add(number)
            self._left(number, engine.load)

    def serves(self, number: int) -> bool:
        """True if the engine accepts requests."""
        return number not in self._down

    def kill(self, number: int, now: float) -> list[R]:
        """Take a serving engine out of service; return its requests, which are lost."""
        engine = self._engines[number]
        load = engine.load
        # The requests of this engine alone are in its heap.
        lost = engine.clear(now)
        for request in lost:
            del self._at[request]
        self._by_load[load].remove(number)
        self.in_flight -= load
        self.free -= self._slots - load
        self._down.add(number)
        self._changed.add(number)
        return lost

    def restore(self, number: int, now: float) -> None:
        """Put an engine back into service."""
        self._down.remove(number)
        self._engines[number].since = now
        self._by_load[0].add(number)
        self._lowest = 0
        self.free += self._slots

    def clocks(self, now: float) -> Floats:
        """Return the number of steps each engine has done."""
        return np.array([engine.read_clock(now) for engine in self._engines])

    def recompute(self, now: float) -> None:
        """Prefill the contexts of all requests again."""
        for number, engine in enumerate(self._engines):
            engine.recompute(now)
            self._changed.add(number)

    def settle(self, now: float) -> None:
        """Bring `tokens` and `busy` up to now."""
        for number, engine in enumerate(self._engines):
            engine.advance(now)
            self._changed.add(number)

    def _left(self, number: int, load: int) -> None:
        self._by_load[load + 1].remove(number)
        self._by_load[load].add(number)
        if load < self._lowest:
            self._lowest = load
        self.free += 1
        self.in_flight -= 1
