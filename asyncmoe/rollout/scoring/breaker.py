"""A circuit breaker: whether a service that keeps failing is to be called.

    closed --`failures` calls in a row fail--> open --`cooldown_s` later, one call--> probing --it is answered--> closed
                                                ^--------------------------------it fails--'

Each change of state begins a new period, and a call counts only in the period it began in. Hence:
- between a change to open and `cooldown_s` later no call begins;
- while probing exactly one call is under way that counts, and no other begins;
- answers to calls of an earlier period, however late, neither close nor open anything.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

State = Literal["closed", "open", "probing"]
Outcome = Literal["answered", "failed", "abandoned"]
"""Of a call. abandoned: whoever called has lost interest, which says nothing about the service."""


@dataclass(frozen=True)
class Breaker:
    """One state; every method gives the next. Times are seconds of one clock that does not go back.

    Attributes:
        failures: calls in a row that fail before it opens; > 0.
        cooldown_s: how long it stays open.
        in_a_row: failures since the last answer, while closed.
        until: when the cool-down ends, while open.
        period: number of changes of state so far; the name of a call that begins now.
    """

    failures: int
    cooldown_s: float
    state: State = "closed"
    in_a_row: int = 0
    until: float = 0.0
    period: int = 0

    def begin(self, now: float) -> tuple[Breaker, int | None]:
        """Ask to call. Returns the next state, and the period to give to `end`; None: not now."""
        if self.state == "closed":
            return self, self.period
        if self.state == "open" and now >= self.until:
            probing = self._to("probing")
            return probing, probing.period
        return self, None

    def end(self, period: int, outcome: Outcome, now: float) -> Breaker:
        """The call that began in `period` has ended."""
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
        """How long until `begin` may give a call; 0: it does now; None: only after another call has ended."""
        if self.state == "probing":
            return None
        return max(self.until - now, 0.0) if self.state == "open" else 0.0

    def _to(self, state: State, until: float = 0.0) -> Breaker:
        return Breaker(self.failures, self.cooldown_s, state, 0, until, self.period + 1)
