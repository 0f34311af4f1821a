"""One engine whose costs depend on contexts: attention in a step, prefill by tokens, and room for keys and values.

A step with B requests and contexts of S tokens together takes t(B) + c S seconds. S grows by B a step, so k steps take

    t(B) k + c (S k + B k^2 / 2)

seconds: contexts grow continuously here, which is right to half a token a request. The inverse is the root of a quadratic.

Room. The contexts of running requests may have K tokens together. When they reach it, the newest request is preempted, as SGLang retracts
one: it gives up its keys and values and waits. When it runs again, its prompt and all its tokens are prefilled. Requests that wait enter in
the order in which they came, once an eighth of the room would stay free for tokens to come; SGLang keeps some free too. An engine that runs
nothing takes any. The oldest request is never preempted, so all finish.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Generic

from asyncmoe.errors import ConfigError
from asyncmoe.simulate.decoding import DecodingEngine, R, Spans

_USED = 7 / 8
"""Part of the room that may be taken when a request enters."""
_ROUNDING = 1e-6
"""Steps by which a clock may be off: many more than rounding makes, and far fewer than one."""


@dataclass(frozen=True)
class ContextCosts:
    """What contexts cost an engine.

    Attributes:
        step_s: seconds a step takes longer for each token of the running requests' contexts.
        prefill_s: seconds to prefill a token.
        chunk: tokens of a prefill pass; each pass also takes the engine's seconds of a pass. inf: all that arrived.
        room: tokens of contexts that an engine has room for; inf: any number.
    """

    step_s: float = 0.0
    prefill_s: float = 0.0
    chunk: float = math.inf
    room: float = math.inf

    def scaled(self, factor: float) -> ContextCosts:
        """Return the costs of an engine that takes `factor` times as long."""
        return ContextCosts(self.step_s * factor, self.prefill_s * factor, self.chunk, self.room)


class _Sampled(Generic[R]):
    """A request at this engine. `begun` and `context` are valid while it runs: clock reading and context when it began to run."""

    __slots__ = ("begun", "context", "fresh", "left", "number", "request", "running", "spans")

    def __init__(self, request: R, number: int, left: float, context: float, fresh: float) -> None:
        self.request, self.number, self.left, self.context, self.fresh = request, number, left, context, fresh
        self.begun, self.running = 0.0, False
        self.spans: Spans = ()


class ContextEngine(DecodingEngine[R]):
    """See the module, and the base class for the interface.

    Attributes:
        contexts: tokens of the running requests' contexts, at `clock`; at most the room.
        running: requests with keys and values; the others with a slot wait.
    """

    __slots__ = ("_batch", "_by_end", "_costs", "_here", "_preempts", "_waiting", "contexts", "preemptions", "recomputed", "running")

    def __init__(self, step_s: Sequence[float], prefill_s: float, live: Container[R], costs: ContextCosts) -> None:
        super().__init__(step_s, prefill_s, live)
        self._costs = costs
        self._batch, self._preempts = 0.0, False
        self.contexts, self.running = 0.0, 0
        self.preemptions, self.recomputed = 0, 0.0
        self._here: dict[R, _Sampled[R]] = {}
        self._by_end: list[tuple[float, int, _Sampled[R]]] = []
        self._waiting: list[tuple[int, _Sampled[R]]] = []

    def add(self, request: R, tokens: int, now: float, number: int, context: float = 0.0, fresh: float = 0.0) -> None:
        """Take a request whose `context` tokens come before the `tokens` to sample; `fresh` of them are not cached.

        Raises:
            ConfigError: it would need more room than the engine has.
        """
        if context + tokens > self._costs.room:
            raise ConfigError("engines.kv_tokens", got=self._costs.room, expected=f"at least {context + tokens:.0f}, a whole context")
        self.advance(now)
        self.load += 1
        self._here[request] = found = _Sampled(request, number, tokens, context, fresh)
        heappush(self._waiting, (number, found))
        self._enter()

    def next_event(self) -> float:
        heap = self._by_end
        while heap and not self._is_current(heap[0]):
            heappop(heap)
        if not heap:
            return math.inf
        left = max(0.0, heap[0][0] - self.clock)
        room = max(0.0, (self._costs.room - self.contexts) / self.running)
        self._preempts = room < left and self.running > 1
        return self.since + self._seconds(room if self._preempts else left)

    def happen(self, now: float) -> tuple[R, Spans] | None:
        """Finish a request and return it, or preempt one and return None."""
        self.advance(now)
        if self._preempts:
            self._preempt()
            return None
        end, _, found = heappop(self._by_end)
        if end > self.clock:
            self.contexts += self.running * (end - self.clock)
            self.clock = end
        found.spans += ((found.begun, end),)
        self._leave(found)
        del self._here[found.request]
        self.load -= 1
        self._enter()
        return found.request, found.spans

    def remove(self, request: R, now: float) -> None:
        self.advance(now)
        found = self._here.pop(request)
        self.load -= 1
        if found.running:
            self._leave(found)
        else:
            self._waiting = [entry for entry in self._waiting if entry[1] is not found]
            heapify(self._waiting)
        self._enter()

    def clear(self, now: float) -> list[R]:
        self.advance(now)
        lost = list(self._here)
        self._here.clear()
        self._by_end.clear()
        self._waiting.clear()
        self.load = self.running = 0
        self.contexts = 0.0
        return lost

    def read_clock(self, now: float) -> float:
        return self.clock + self._steps(max(0.0, now - self.since))

    def recompute(self, now: float) -> None:
        self.advance(now)
        if self.running:
            self.recomputed += self.contexts
            self._prefill(self.contexts)

    def advance(self, now: float) -> None:
        gone = now - self.since
        if gone > 0:
            self.since = now
            if self.running:
                steps = self._steps(gone)
                self.clock += steps
                self.contexts += steps * self.running
                self.tokens += steps * self.running
                self.busy += gone

    # ------------------------------------------------------------ time

    def _seconds(self, steps: float) -> float:
        cost = self._costs.step_s
        return steps * (self._step_s[self.running] + cost * (self.contexts + self.running * steps / 2))

    def _steps(self, seconds: float) -> float:
        if not self.running:
            return 0.0
        cost = self._costs.step_s
        first = self._step_s[self.running] + cost * self.contexts
        return 2 * seconds / (first + math.sqrt(first * first + 2 * cost * self.running * seconds))

    def _prefill(self, tokens: float) -> None:
        """Let the clock stand still for a prefill of `tokens`: with what arrived since the last step, in passes of a chunk each."""
        start = self._next_step()
        if start != self._prefilled:
            self._prefilled, self._batch, passes = start, 0.0, 0
        else:
            passes = self._passes()
        self._batch += tokens
        seconds = self._prefill_s * (self._passes() - passes) + self._costs.prefill_s * tokens
        self.since += seconds
        self.busy += seconds

    def _next_step(self) -> float:
        """The clock's reading between this step and the next."""
        return float(math.ceil(self.clock - _ROUNDING))

    def _passes(self) -> int:
        return max(1, math.ceil(self._batch / self._costs.chunk))

    # ------------------------------------------------------------ room

    def _is_current(self, entry: tuple[float, int, _Sampled[R]]) -> bool:
        found = entry[2]
        return found.running and entry[0] == found.begun + found.left

    def _enter(self) -> None:
        """Let requests run, in the order in which they came, while there is room."""
        while self._waiting:
            found = self._waiting[0][1]
            if self.running and self.contexts + found.context > _USED * self._costs.room:
                return
            heappop(self._waiting)
            found.begun = self.clock
            if self._prefill_s or self._costs.prefill_s:
                found.begun = self._next_step()
                self._prefill(found.fresh)
            found.running = True
            self.running += 1
            self.contexts += found.context - (found.begun - self.clock)
            heappush(self._by_end, (found.begun + found.left, found.number, found))

    def _leave(self, found: _Sampled[R]) -> None:
        found.running = False
        self.running -= 1
        self.contexts = self.contexts - found.context - (self.clock - found.begun) if self.running else 0.0

    def _preempt(self) -> None:
        newest = max((found for found in self._here.values() if found.running), key=lambda found: found.number)
        sampled = self.clock - newest.begun
        self._leave(newest)
        newest.spans += ((newest.begun, self.clock),)
        newest.left -= sampled
        newest.context += sampled
        newest.fresh = newest.context
        self.preemptions += 1
        self.recomputed += newest.fresh
        heappush(self._waiting, (newest.number, newest))
        self._enter()
