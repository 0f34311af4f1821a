"""A fleet of decoding engines, each with continuous batching and a step time that grows with the batch.

An engine with B requests takes t(B) = t0 (1 + B / b0) seconds per step, and a step gives each request one token. So all requests of an
engine share a clock that counts steps. A request finishes when the clock has advanced by as many steps as it has tokens; arrivals and
departures change only the speed of the clock. The engine keeps a heap of the clock readings at which its requests finish.

Between two steps, one pass prefills all prompts that have arrived; the clock stops meanwhile. This models SGLang's scheduler without mixed
chunks. Context length has no cost of its own: `t0` and `b0` are measured at the usual length.

A heap orders the engines by their next event. A changed engine gets an entry with a newer stamp, which invalidates its former entry. A
request goes where the live pool would send it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from asyncmoe.simulate.state import SimulatedResponse

Span = tuple[float, float]
"""Clock readings at the start and end of a request's sampling."""


class DecodingEngine:
    """An engine whose step time does not depend on context lengths. Times are in seconds of engine time.

    Args:
        step_s: seconds per step, by number of requests.
        prefill_s: seconds of a pass over the prompts that have arrived.

    Attributes:
        clock: steps done, at time `since`. During a prefill `since` lies in the future.
        load: requests in slots.
        tokens, busy: tokens sampled until `since`, and seconds until then with at least one request.
    """

    __slots__ = ("_heap", "_prefill_s", "_prefilled", "_step_s", "busy", "clock", "load", "since", "tokens")

    def __init__(self, step_s: Sequence[float], prefill_s: float) -> None:
        self.clock = self.since = self.tokens = self.busy = 0.0
        self.load = 0
        self._step_s, self._prefill_s = step_s, prefill_s
        self._prefilled = -1.0
        self._heap: list[tuple[float, int, SimulatedResponse, float]] = []

    def add(self, request: SimulatedResponse, tokens: int, now: float, number: int) -> None:
        """Add a request with `tokens` to sample; later requests have higher numbers."""
        self.advance(now)
        self.load += 1
        start = self.clock
        if self._prefill_s:
            start = math.ceil(start)
            if start != self._prefilled:
                self._prefilled = start
                self.since += self._prefill_s
                self.busy += self._prefill_s
        heappush(self._heap, (start + tokens, number, request, start))

    def next_event(self) -> float:
        """Return when `happen` is due, unless the engine changes before then; inf without requests."""
        if not self._heap:
            return math.inf
        left = self._heap[0][0] - self.clock
        return self.since + (left if left > 0.0 else 0.0) * self._step_s[self.load]

    def happen(self, now: float) -> tuple[SimulatedResponse, Span]:
        """Do what `next_event` announced: finish a request and return it."""
        self.advance(now)
        end, _, request, start = heappop(self._heap)
        self.clock = max(self.clock, end)
        self.load -= 1
        return request, (start, end)

    def read_clock(self, now: float) -> float:
        """Return the steps done until now."""
        return self.clock + (max(0.0, now - self.since) * (1 / self._step_s[self.load]) if self.load else 0.0)

    def advance(self, now: float) -> None:
        """Bring the engine up to now."""
        gone = now - self.since
        if gone > 0:
            self.since = now
            if self.load:
                steps = gone / self._step_s[self.load]
                self.clock += steps
                self.tokens += steps * self.load
                self.busy += gone


class Fleet:
    """Engines with `slots` request slots each; a request goes to the engine with the fewest requests.

    Times are in seconds of engine time, which stops while the engines are paused.

    Args:
        step_s: seconds of an engine's step, by number of requests.
        limit: maximum requests in progress; None: the number of slots.

    Attributes:
        free: number of requests that may be placed now.
    """

    def __init__(self, engines: int, slots: int, step_s: Callable[[int], float], prefill_s: float = 0.0, limit: int | None = None) -> None:
        self.free = min(engines * slots, limit or engines * slots)
        seconds = [step_s(batch) for batch in range(slots + 1)]
        self._engines = [DecodingEngine(seconds, prefill_s) for _ in range(engines)]
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

    def place(self, request: SimulatedResponse, tokens: int, now: float) -> None:
        """Put a request, for which there must be room, on the engine with the fewest requests."""
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

    def happen(self) -> tuple[SimulatedResponse, int, Span]:
        """Finish the next request; return it, its engine, and its span on the engine's clock."""
        now, _, number = heappop(self._next)
        self._changed.add(number)
        request, span = self._engines[number].happen(now)
        load = self._engines[number].load
        self.free += 1
        self._by_load[load + 1].remove(number)
        self._by_load[load].add(number)
        self._lowest = min(self._lowest, load)
        return request, number, span

    def clocks(self, now: float) -> list[float]:
        """Return the number of steps each engine has done."""
        return [engine.read_clock(now) for engine in self._engines]

    def settle(self, now: float) -> None:
        """Bring `tokens` and `busy` up to now."""
        for number, engine in enumerate(self._engines):
            engine.advance(now)
            self._changed.add(number)
