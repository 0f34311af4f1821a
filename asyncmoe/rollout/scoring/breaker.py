"""A circuit breaker: decides whether a failing service is called.

    closed --`failures` consecutive calls fail--> open --`cooldown_s` later, one call--> probing --it is answered--> closed
                                                   ^----------------it fails----------------'

Each change of state begins a new period, and a call counts only in the period it began in. Hence:
- after a failure opens the breaker, no call begins for `cooldown_s`;
- while probing, exactly one call that counts is in flight, and no other call begins;
- answers to calls of an earlier period, however late, do not change the state.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

State = Literal["closed", "open", "probing"]
Outcome = Literal["answered", "failed", "abandoned"]
"""Outcome of a call. abandoned: the caller was cancelled, which says nothing about the service."""


@dataclass(frozen=True)
class Breaker:
    """An immutable state; transitions return the next state. Times are seconds of one monotonic clock.

    Attributes:
        failures: consecutive failures that open the breaker; > 0.
        cooldown_s: time it stays open.
        in_a_row: consecutive failures since the last answer, while closed.
        until: end of the cool-down, while open.
        period: number of state changes so far; identifies calls that begin now.
    """

    failures: int
    cooldown_s: float
    state: State = "closed"
    in_a_row: int = 0
    until: float = 0.0
    period: int = 0

    def begin(self, now: float) -> tuple[Breaker, int | None]:
        """Request a call. Returns the next state and the period to pass to `end`; None: no call may begin now."""
        if self.state == "closed":
            return self, self.period
        if self.state == "open" and now >= self.until:
            probing = self._to("probing")
            return probing, probing.period
        return self, None

    def end(self, period: int, outcome: Outcome, now: float) -> Breaker:
        """Record the outcome of a call that began in `period`."""
        if period != self.period:
            return self
        if outcome == "answered":
            return replace(self, in_a_row=0) if self.state == "closed" else self._to("closed")
        if outcome == "abandoned":
            return self if self.state == "closed" else self._to("open", until=now)
        if self.state == "closed" and self.in_a_row + 1 < self.failures:
            return replace(self, in_a_row=self.in_a_row + 1)
        return self._to("open", until=now + self.cooldown_s)

    def wait_s(self, now: float) -> float | None:
        """Seconds until `begin` may admit a call; 0: now; None: not before the call in flight ends."""
        if self.state == "probing":
            return None
        return max(self.until - now, 0.0) if self.state == "open" else 0.0

    def _to(self, state: State, until: float = 0.0) -> Breaker:
        return Breaker(self.failures, self.cooldown_s, state, 0, until, self.period + 1)
