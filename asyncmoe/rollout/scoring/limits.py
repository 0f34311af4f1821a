"""Limits around a judge: concurrency, deadline, retries and a circuit breaker.

A sample waits for one of `concurrency` slots, then for the breaker, then for the judge. After a transient failure it backs off without a
slot and starts over. The deadline bounds all of this together. A waiting sample still holds its place under the capacity law, so the
backlog of a slow judge is bounded, and generation continues until that bound is reached.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count
from random import Random
from typing import Literal

from asyncmoe.errors import TrajectoryRejected
from asyncmoe.rollout.scoring.parse_score import Read
from asyncmoe.rollout.scoring.tracebacks import ScorerRaised, Tracebacks
from asyncmoe.rollout.scoring.types import OUT_OF_ORDER, PASSING, TIMEOUT, UNAVAILABLE, Judge, Later, Sample, Score

log = logging.getLogger(__name__)

State = Literal["closed", "open", "probing"]
Outcome = Literal["answered", "failed", "abandoned"]
"""Outcome of a call. abandoned: the caller was cancelled, which says nothing about the service."""


@dataclass(frozen=True)
class ScoringLimits:
    """See `ScoringSection`."""

    concurrency: int
    deadline_s: float
    retries: int
    backoff_s: float
    breaker_failures: int
    breaker_cooldown_s: float


@dataclass(frozen=True)
class Breaker:
    """A circuit breaker: decides whether a failing service is called. An immutable state; transitions return the next state.

        closed --`failures` consecutive calls fail--> open --`cooldown_s` later, one call--> probing --it is answered--> closed
                                                       ^----------------it fails----------------'

    Each change of state begins a new period, and a call counts only in the period it began in. Hence:
    - after a failure opens the breaker, no call begins for `cooldown_s`;
    - while probing, exactly one call that counts is in flight, and no other call begins;
    - answers to calls of an earlier period, however late, do not change the state.
    Times are seconds of one monotonic clock.

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


@dataclass(frozen=True)
class Stats:
    """Statistics of a scoring stage since its start.

    Attributes:
        in_flight: samples in a call to the judge.
        waiting: samples waiting for a slot, for the breaker or in backoff.
        scored: samples with a score.
        retried: number of retries.
        failed: samples without a score, by reason; cancelled samples excluded.
        seconds: total time that scored and failed samples spent in this stage.
        breaker: state of the circuit breaker.
        wait_seconds: the part of `seconds` outside calls: waiting for a slot, for the breaker and in backoff.
    """

    in_flight: int
    waiting: int
    scored: int
    retried: int
    failed: Mapping[str, int]
    seconds: float
    breaker: State
    wait_seconds: float = 0.0


@dataclass
class _Progress:
    """Progress of one sample. `last`: the failure of its previous attempt; `called`: seconds in calls so far."""

    doing: Literal["turn", "call", "pause"] = "turn"
    last: TrajectoryRejected | None = None
    called: float = 0.0


def backoff(base_s: float, attempt: int, draw: float) -> float:
    """Seconds to wait after attempt `attempt` (from 0): `base_s`, doubled per attempt, times 0.5 to 1.5 by a draw from [0, 1)."""
    return float(base_s * 2.0**attempt * (0.5 + draw))


class LimitedScorer:
    """A scorer that calls a judge within limits.

    Args:
        name: used in errors and the log.
        judge: computes the answers; enforces the timeout of a single call itself.
        read: converts an answer to a score.
        seed: seed of the backoff jitter.

    Attributes:
        tracebacks: what the user's scorer raised.
    """

    def __init__(self, name: str, judge: Judge, read: Read, limits: ScoringLimits, seed: int = 0) -> None:
        self.name, self._judge, self._read, self._limits = name, judge, read, limits
        self._random = Random(f"{seed} {name}")
        self._slots = asyncio.Semaphore(min(limits.concurrency, judge.width or limits.concurrency))
        self._breaker = Breaker(limits.breaker_failures, limits.breaker_cooldown_s)
        self._changed = asyncio.Event()
        self._here = self._in_flight = self._scored = self._retried = 0
        self._failed: Counter[str] = Counter()
        self._seconds = self._wait_seconds = 0.0
        self._last_outage = ""
        self.tracebacks = Tracebacks()

    async def score(self, sample: Sample) -> Score:
        """See `Scorer`."""
        begin, progress = _now(), _Progress()
        self._here += 1
        try:
            try:
                async with asyncio.timeout(self._limits.deadline_s):
                    score = await self._attempts(sample, progress, begin + self._limits.deadline_s)
            except TimeoutError as error:
                raise self._late(progress) from error
        except TrajectoryRejected as rejected:
            self._failed[rejected.reason] += 1
            self._took(begin, progress)
            raise
        finally:
            self._here -= 1
        self._scored += 1
        self._took(begin, progress)
        return score

    async def attempt(self, sample: Sample) -> Score:
        """Score a sample by a single call, without retries, breaker and counts; only the judge's own timeout limits it.

        Raises:
            TrajectoryRejected: as `Scorer.score`.
        """
        try:
            return self._read(await self._judge.call(sample), sample)
        except ScorerRaised as error:
            self.tracebacks.note(error.raised)
            raise

    async def close(self) -> None:
        """See `Scorer`."""
        await self._judge.close()

    def stats(self) -> Stats:
        """See `Stats`."""
        waiting = self._here - self._in_flight
        failed = dict(self._failed)
        counts = (self._in_flight, waiting, self._scored, self._retried, failed)
        return Stats(*counts, self._seconds, self._breaker.state, self._wait_seconds)

    def _took(self, begin: float, progress: _Progress) -> None:
        seconds = _now() - begin
        self._seconds += seconds
        self._wait_seconds += max(0.0, seconds - progress.called)

    async def _attempts(self, sample: Sample, progress: _Progress, deadline: float) -> Score:
        for attempt in count():
            try:
                return self._read(await self._call(sample, progress), sample)
            except TrajectoryRejected as rejected:
                if isinstance(rejected, ScorerRaised):
                    self.tracebacks.note(rejected.raised)
                delay = backoff(self._limits.backoff_s, attempt, self._random.random())
                if isinstance(rejected, Later):
                    delay = max(delay, rejected.after_s)
                if rejected.reason not in PASSING or attempt >= self._limits.retries or _now() + delay >= deadline:
                    raise
                progress.doing, progress.last = "pause", rejected
            await asyncio.sleep(delay)
            progress.doing = "turn"
            self._retried += 1
        raise AssertionError

    async def _call(self, sample: Sample, progress: _Progress) -> object:
        async with self._slots:
            period = await self._admitted()
            progress.doing = "call"
            outcome: Outcome = "abandoned"
            self._in_flight += 1
            begin = _now()
            try:
                answer = await self._judge.call(sample)
                outcome = "answered"
            except TrajectoryRejected as rejected:
                outcome = "failed" if rejected.reason in OUT_OF_ORDER else "answered"
                self._last_outage = str(rejected) if outcome == "failed" else self._last_outage
                raise
            finally:
                self._in_flight -= 1
                progress.called += _now() - begin
                self._ended(period, outcome)
        return answer

    async def _admitted(self) -> int:
        """Wait until the breaker admits a call; return its period."""
        while True:
            before = self._breaker.state
            self._breaker, period = self._breaker.begin(_now())
            if period is not None:
                if before == "open":
                    log.info("probing %s", self.name)
                return period
            # Wakes at each state change, and when the cool-down ends.
            changed, wait_s = self._changed, self._breaker.wait_s(_now())
            try:
                async with asyncio.timeout(wait_s):
                    await changed.wait()
            except TimeoutError:
                continue

    def _ended(self, period: int, outcome: Outcome) -> None:
        before = self._breaker
        self._breaker = before.end(period, outcome, _now())
        if self._breaker.state == before.state:
            return
        self._changed.set()
        self._changed = asyncio.Event()
        if self._breaker.state == "open" and outcome == "failed":
            log.warning("%s: circuit breaker open for %g s: %s", self.name, self._limits.breaker_cooldown_s, self._last_outage)
        elif self._breaker.state == "closed":
            log.info("%s recovered", self.name)

    def _late(self, progress: _Progress) -> TrajectoryRejected:
        """Build the rejection for a missed deadline, with its cause."""
        within = f"within scoring.deadline_s = {self._limits.deadline_s:g} s"
        if progress.doing == "turn" and self._breaker.state != "closed":
            return TrajectoryRejected(UNAVAILABLE, f"{self.name} did not recover {within}: {self._last_outage}")
        before = "" if progress.last is None else f"; before: {progress.last}"
        if progress.doing == "call":
            return TrajectoryRejected(TIMEOUT, f"{self.name} did not answer {within}{before}")
        return TrajectoryRejected(TIMEOUT, f"no free slot of {self.name} {within}; raise scoring.concurrency{before}")


def _now() -> float:
    return asyncio.get_running_loop().time()
