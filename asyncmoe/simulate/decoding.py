"""One engine that decodes: continuous batching with a step time that grows with the batch.

An engine with B requests takes t(B) = t0 (1 + B / b0) seconds per step, and a step gives each request one token. So all requests of an
engine share one clock that counts steps. A request finishes when the clock has advanced by as many steps as the request has tokens, and an
arrival or departure changes only the speed of the clock. The engine has a heap of clock readings at which its requests finish.

Between two steps, one pass prefills all prompts that have arrived; the clock stands still meanwhile. This models SGLang's scheduler without
mixed chunks. Contexts cost nothing: `t0` and `b0` are measured at the usual length of one.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from heapq import heappop, heappush
from typing import Generic, TypeVar

R = TypeVar("R", bound=Hashable)
Span = tuple[float, float]
"""Clock readings between which a request was sampled: start and end."""


class DecodingEngine(Generic[R]):
    """An engine whose steps cost the same whatever the contexts. Times are in seconds of engine time.

    Args:
        step_s: seconds of a step by the number of requests.
        prefill_s: seconds of a pass over the prompts that have arrived.

    Attributes:
        clock: steps done, at time `since`. During a prefill `since` lies in the future.
        load: requests that hold a slot.
        tokens, busy: tokens sampled, and seconds with a request, until `since`.
    """

    __slots__ = ("_heap", "_prefill_s", "_prefilled", "_step_s", "busy", "clock", "load", "since", "tokens")

    def __init__(self, step_s: Sequence[float], prefill_s: float) -> None:
        self.clock = self.since = self.tokens = self.busy = 0.0
        self.load = 0
        self._step_s, self._prefill_s = step_s, prefill_s
        self._prefilled = -1.0
        self._heap: list[tuple[float, int, R, float]] = []

    def add(self, request: R, tokens: int, now: float, number: int) -> None:
        """Take a request with `tokens` to sample; later requests have higher numbers."""
        if now > self.since:
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
        """Return the time of `happen`, if nothing else happens before; inf without requests."""
        if not self._heap:
            return math.inf
        left = self._heap[0][0] - self.clock
        return self.since + (left if left > 0.0 else 0.0) * self._step_s[self.load]

    def happen(self, now: float) -> tuple[R, Span]:
        """Do what `next_event` announced: finish a request and return it."""
        if now > self.since:
            self.advance(now)
        end, _, request, start = heappop(self._heap)
        if end > self.clock:
            self.clock = end
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
