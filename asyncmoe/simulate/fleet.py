"""The engines together: the choices of the live pool, and the next event of any engine.

A heap orders the engines by their next event. An engine that changed has an entry with a newer stamp, which makes its former one void.
`asyncmoe.simulate.decoding` and `contexts` model a single engine.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from heapq import heappop, heappush
from typing import Generic

import numpy as np

from asyncmoe.simulate.contexts import ContextCosts, ContextEngine
from asyncmoe.simulate.decoding import DecodingEngine, R, Spans, StepTime
from asyncmoe.simulate.workload import Floats

_Queued = tuple[R, int, float, float, int]
"""A request that waits at its engine: tokens, context, fresh, number."""


class Fleet(Generic[R]):
    """Engines with `slots` request slots each; beyond, requests wait at their engine.

    Times are in seconds of engine time, which stops while the engines are paused.

    Args:
        costs: what contexts cost; None: nothing.
        slow: how many times as long steps and prefills of an engine take, by its number; 1 for others.
        limit: most requests placed and not finished; None: as many as the engines that serve have slots.
        begun: called with each request that gets its slot.

    Attributes:
        free: requests that may be placed.
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
        limit: int | None = None,
        begun: Callable[[R], None] = lambda _: None,
    ) -> None:
        self.free, self.in_flight = engines * slots if limit is None else limit, 0
        self._slots, self._limited, self._begun = slots, limit is not None, begun
        self._queues: dict[int, deque[_Queued[R]]] = {}
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
        self._leaving: set[int] = set()
        self._caches = list(range(engines))
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

    def loads(self) -> dict[str, int]:
        """Return the requests of each engine that serves, by its number as a name."""
        return {str(number): load for load, numbers in enumerate(self._by_load) for number in numbers}

    def cache(self, number: int) -> int:
        """Return a name of an engine's prefix cache, which it loses when it fails."""
        return self._caches[number]

    @property
    def has_room(self) -> bool:
        """Whether a request may be placed."""
        return self.free > 0 and len(self._down) + len(self._leaving) < len(self._engines)

    def choose(self, number: int | None = None) -> int:
        """Return the engine of a request that is placed next, which must have room; None: the one with the fewest requests."""
        by_load = self._by_load
        if number is None:
            load = self._lowest
            while not by_load[load]:
                load += 1
            self._lowest = load
            number = by_load[load].pop()
        else:
            load = self._load(number)
            by_load[load].remove(number)
        if load + 1 == len(by_load):
            by_load.append(set())
        by_load[load + 1].add(number)
        return number

    def place(self, request: R, tokens: int, now: float, context: float = 0.0, fresh: float = 0.0, number: int | None = None) -> None:
        """Put a request on the engine that `choose` has returned, or the one with the fewest requests. See `ContextEngine.add`."""
        if number is None:
            number = self.choose()
        self._placed += 1
        self._at[request] = number
        self.free -= 1
        self.in_flight += 1
        if self._engines[number].load < self._slots:
            self._add(number, (request, tokens, context, fresh, self._placed), now)
        else:
            self._queues.setdefault(number, deque()).append((request, tokens, context, fresh, self._placed))

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
        self._left(number, now)
        return request, number, spans

    def cancel(self, request: R, now: float) -> None:
        """Remove a request, if an engine has it."""
        if (number := self._at.pop(request, None)) is not None:
            queued = self._queues.get(number, ())
            if (found := next((one for one in queued if one[0] == request), None)) is not None:
                self._queues[number].remove(found)
            else:
                self._engines[number].remove(request, now)
                self._changed.add(number)
            self._left(number, now)

    def serves(self, number: int) -> bool:
        """True if the engine accepts requests."""
        return number not in self._down and number not in self._leaving

    def leave(self, number: int) -> None:
        """Give a serving engine no more requests; it finishes those that it has, and is out of service then."""
        load = self._load(number)
        self._by_load[load].remove(number)
        (self._leaving if load else self._down).add(number)
        self.free -= 0 if self._limited else self._slots

    def join(self, number: int, now: float) -> None:
        """Put an engine that has left, or is leaving, into service."""
        if number not in self._leaving:
            self.restore(number, now)
            return
        self._leaving.remove(number)
        load = self._load(number)
        self._by_load[load].add(number)
        self._lowest = min(self._lowest, load)
        self.free += 0 if self._limited else self._slots

    def kill(self, number: int, now: float) -> list[R]:
        """Take a serving engine out of service; return its requests, which are lost."""
        load = self._load(number)
        # The requests of this engine alone are in its heap.
        lost = [*self._engines[number].clear(now), *(one[0] for one in self._queues.pop(number, ()))]
        for request in lost:
            del self._at[request]
        self._by_load[load].remove(number)
        self.in_flight -= load
        self.free += load - (0 if self._limited else self._slots)
        self._down.add(number)
        self._changed.add(number)
        return lost

    def restore(self, number: int, now: float) -> None:
        """Put an engine back into service."""
        self._down.remove(number)
        self._caches[number] += len(self._engines)
        self._engines[number].since = now
        self._by_load[0].add(number)
        self._lowest = 0
        self.free += 0 if self._limited else self._slots

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

    def _load(self, number: int) -> int:
        return self._engines[number].load + (len(self._queues[number]) if number in self._queues else 0)

    def _add(self, number: int, queued: _Queued[R], now: float) -> None:
        request, tokens, context, fresh, placed = queued
        self._engines[number].add(request, tokens, now, placed, context, fresh)
        self._changed.add(number)
        self._begun(request)

    def _left(self, number: int, now: float) -> None:
        """Note that a request has left an engine; the next one that waits there gets its slot."""
        load = self._load(number)
        self.free += 1
        self.in_flight -= 1
        if number not in self._leaving:
            self._by_load[load + 1].remove(number)
            self._by_load[load].add(number)
            if load < self._lowest:
                self._lowest = load
        elif not load:
            self._leaving.remove(number)
            self._down.add(number)
        if number in self._queues:
            if self._engines[number].load < self._slots and self._queues[number]:
                self._add(number, self._queues[number].popleft(), now)
            if not self._queues[number]:
                del self._queues[number]
