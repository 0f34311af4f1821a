"""The engines: continuous batching with a step time that grows with the batch, and the least-loaded choice of the live pool.

An engine with B requests takes t(B) = t0 (1 + B / b0) seconds per step, and a step gives each request one token. So all requests of an
engine share one clock that counts steps. A request finishes when the clock has advanced by as many steps as the request has tokens, and an
arrival or departure changes only the speed of the clock. Each engine has a heap of clock readings at which its requests finish; one more
heap orders the engines by their next finish.

Between two steps, one pass prefills all prompts that have arrived; the clock stands still meanwhile. This models SGLang's scheduler without
mixed chunks.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Generic, TypeVar

import numpy as np

from asyncmoe.simulate.workload import Floats

R = TypeVar("R", bound=Hashable)


@dataclass(frozen=True)
class StepTime:
    """Seconds of an engine's step with a batch of B: `t0 * (1 + B / b0)`.

    Attributes:
        t0: seconds of a step with an empty batch: the time to read the weights.
        b0: batch size at which a step takes twice as long.
    """

    t0: float
    b0: float

    def __call__(self, batch: int) -> float:
        return self.t0 * (1 + batch / self.b0)


class Fleet(Generic[R]):
    """Engines with `slots` request slots each. Times are in seconds of engine time, which stops while the engines are paused.

    Attributes:
        free: free request slots.
        in_flight: requests placed and not finished.
        tokens: tokens sampled so far, as of the last event of each engine.
        busy: seconds in which an engine had requests, summed over engines, as of the last event of each engine.
    """

    def __init__(self, engines: int, slots: int, step: StepTime, prefill_s: float = 0.0) -> None:
        self.free, self.in_flight = engines * slots, 0
        self.tokens = self.busy = 0.0
        self._slots, self._prefill_s = slots, prefill_s
        self._step_s = [step(batch) for batch in range(slots + 1)]
        # An engine's clock reads _clock at time _since. During a prefill _since lies in the future.
        self._clock, self._since, self._load = [0.0] * engines, [0.0] * engines, [0] * engines
        self._prefilled = [-1.0] * engines
        self._heaps: list[list[tuple[float, int, R]]] = [[] for _ in range(engines)]
        self._at: dict[R, tuple[int, float]] = {}
        self._by_load: list[set[int]] = [set(range(engines)), *(set() for _ in range(slots))]
        self._lowest = 0
        self._down: set[int] = set()
        self._stamp = [0] * engines
        self._next: list[tuple[float, int, int]] = []
        self._changed: set[int] = set()
        self._placed = 0

    def place(self, request: R, tokens: int, now: float) -> None:
        """Put a request on the engine with the fewest requests; a slot must be free."""
        while not self._by_load[self._lowest]:
            self._lowest += 1
        load = self._lowest
        engine = self._by_load[load].pop()
        self._advance(engine, now)
        self._by_load[load + 1].add(engine)
        self._load[engine] = load + 1
        self._placed += 1
        start = self._clock[engine]
        if self._prefill_s:
            start = math.ceil(start)
            if start != self._prefilled[engine]:
                self._prefilled[engine] = start
                self._since[engine] += self._prefill_s
                self.busy += self._prefill_s
        heappush(self._heaps[engine], (start + tokens, self._placed, request))
        self._at[request] = engine, start
        self._changed.add(engine)
        self.free -= 1
        self.in_flight += 1

    def next_finish(self) -> float:
        """Return the time at which the next request finishes; inf if there is none."""
        for engine in self._changed:
            self._stamp[engine] += 1
            heap = self._heaps[engine]
            while heap and heap[0][2] not in self._at:
                heappop(heap)
            if heap:
                left = max(0.0, heap[0][0] - self._clock[engine])
                heappush(self._next, (self._since[engine] + left * self._step_s[self._load[engine]], self._stamp[engine], engine))
        self._changed.clear()
        while self._next and self._next[0][1] != self._stamp[self._next[0][2]]:
            heappop(self._next)
        return self._next[0][0] if self._next else math.inf

    def finish(self) -> tuple[R, int, float, float]:
        """Finish the next request: return it, its engine, and the engine's clock at its start and at its end."""
        now, _, engine = heappop(self._next)
        self._advance(engine, now)
        end, _, request = heappop(self._heaps[engine])
        _, start = self._at.pop(request)
        self._clock[engine] = max(end, self._clock[engine])
        self._leave(engine)
        return request, engine, start, end

    def cancel(self, request: R, now: float) -> None:
        """Remove a request, if an engine has it."""
        if (at := self._at.pop(request, None)) is not None:
            self._advance(at[0], now)
            self._leave(at[0])

    def serves(self, engine: int) -> bool:
        """True if the engine accepts requests."""
        return engine not in self._down

    def kill(self, engine: int, now: float) -> list[R]:
        """Take a serving engine out of service; return its requests, which are lost."""
        self._advance(engine, now)
        lost = [request for _, _, request in self._heaps[engine] if self._at.get(request, (-1,))[0] == engine]
        for request in lost:
            del self._at[request]
        self._by_load[self._load[engine]].remove(engine)
        self.in_flight -= self._load[engine]
        self.free -= self._slots - self._load[engine]
        self._load[engine] = 0
        self._heaps[engine].clear()
        self._down.add(engine)
        self._changed.add(engine)
        return lost

    def restore(self, engine: int, now: float) -> None:
        """Put an engine back into service."""
        self._down.remove(engine)
        self._since[engine] = now
        self._by_load[0].add(engine)
        self._lowest = 0
        self.free += self._slots

    def clocks(self, now: float) -> Floats:
        """Return the number of steps each engine has done."""
        rate = np.array([1 / seconds for seconds in self._step_s])
        load, since = np.array(self._load), np.array(self._since)
        gone = np.where(load > 0, np.maximum(0.0, now - since) * rate[load], 0.0)
        return np.array(self._clock) + gone

    def settle(self, now: float) -> None:
        """Bring `tokens` and `busy` up to now."""
        for engine in range(len(self._load)):
            self._advance(engine, now)
            self._changed.add(engine)

    def _advance(self, engine: int, now: float) -> None:
        gone, load = now - self._since[engine], self._load[engine]
        self._since[engine] = max(now, self._since[engine])
        if load and gone > 0:
            steps = gone / self._step_s[load]
            self._clock[engine] += steps
            self.tokens += steps * load
            self.busy += gone

    def _leave(self, engine: int) -> None:
        load = self._load[engine]
        self._by_load[load].remove(engine)
        self._by_load[load - 1].add(engine)
        self._lowest = min(self._lowest, load - 1)
        self._load[engine] = load - 1
        self._changed.add(engine)
        self.free += 1
        self.in_flight -= 1
