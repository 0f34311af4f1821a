"""The engines together: the choice of the live pool, and the next event of any engine.

A heap orders the engines by their next event. An engine that changed has an entry with a newer stamp, which makes its former one void.
`asyncmoe.simulate.decoding` models a single engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Generic

from asyncmoe.simulate.decoding import DecodingEngine, R, Span


class Fleet(Generic[R]):
    """Engines with `slots` request slots each; a request goes to the one with the fewest.

    Times are in seconds of engine time, which stops while the engines are paused.

    Args:
        step_s: seconds of an engine's step by the number of its requests.
        limit: most requests placed and not finished; None: as many as there are slots.

    Attributes:
        free: requests that may be placed.
    """

    def __init__(self, engines: int, slots: int, step_s: Callable[[int], float], prefill_s: float = 0.0, limit: int | None = None) -> None:
        self.free = min(engines * slots, limit or engines * slots)
        seconds = [step_s(batch) for batch in range(slots + 1)]
        self._engines: list[DecodingEngine[R]] = [DecodingEngine(seconds, prefill_s) for _ in range(engines)]
        self._by_load: list[set[int]] = [set(range(engines)), *(set() for _ in range(slots))]
        self._lowest = 0
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

    def place(self, request: R, tokens: int, now: float) -> None:
        """Put a request, for which there must be room, on the engine with the fewest."""
        by_load, load = self._by_load, self._lowest
        while not by_load[load]:
            load += 1
        self._lowest = load
        number = by_load[load].pop()
        by_load[load + 1].add(number)
        self._placed += 1
        self.free -= 1
        self._engines[number].add(request, tokens, now, self._placed)
        self._changed.add(number)

    def next_event(self) -> float:
        """Return the time at which the next request finishes; inf if there is none."""
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

    def happen(self) -> tuple[R, int, Span]:
        """Finish the next request and return it, its engine, and the readings of the engine's clock between which it was sampled."""
        now, _, number = heappop(self._next)
        self._changed.add(number)
        request, span = self._engines[number].happen(now)
        self._left(number)
        return request, number, span

    def clocks(self, now: float) -> list[float]:
        """Return the number of steps each engine has done."""
        return [engine.read_clock(now) for engine in self._engines]

    def settle(self, now: float) -> None:
        """Bring `tokens` and `busy` up to now."""
        for number, engine in enumerate(self._engines):
            engine.advance(now)
            self._changed.add(number)

    def _left(self, number: int) -> None:
        load = self._engines[number].load
        self.free += 1
        self._by_load[load + 1].remove(number)
        self._by_load[load].add(number)
        self._lowest = min(self._lowest, load)
