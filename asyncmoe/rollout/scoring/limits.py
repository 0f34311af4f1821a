"""Limits around a judge: concurrency, deadline and retries.

A sample waits for one of `concurrency` slots, then for the judge. After a transient failure it backs off without a slot and starts over; an
unreachable judge is retried until the deadline, any other failure at most `retries` times. The deadline bounds all of this together. A
waiting sample still counts under the capacity law, so the backlog of a slow judge is bounded, and generation continues until that bound is
reached.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass
from itertools import count
from random import Random

from asyncmoe.config.scoring import ScoringSection
from asyncmoe.errors import TrajectoryRejected
from asyncmoe.rollout.scoring.parse_score import Read
from asyncmoe.rollout.scoring.types import PASSING, TIMEOUT, UNAVAILABLE, Judge, Later, Sample, Score, ScorerRaised
from asyncmoe.telemetry.rollout_schema import Scoring

log = logging.getLogger(__name__)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0


@dataclass
class _Progress:
    """Progress of one sample.

    Attributes:
        calling: True during a call, and after one that scored the sample.
        last: the failure of its previous attempt.
        called: seconds in calls so far.
    """

    calling: bool = False
    last: TrajectoryRejected | None = None
    called: float = 0.0


def backoff(attempt: int, draw: float) -> float:
    """Seconds to wait after attempt `attempt` (from 0): `_FIRST_PAUSE_S`, doubled per attempt up to half a minute, times 0.5 to 1.5 by a
    draw from [0, 1)."""
    return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(attempt, 60)) * (0.5 + draw)


class LimitedScorer:
    """A scorer that calls a judge within limits.

    Args:
        name: used in errors and the log.
        judge: computes the answers; enforces the timeout of a single call itself.
        read: converts an answer to a score.
        concurrency, section: limits; `section` has the deadline and the retries.
        seed: seed of the backoff jitter.
    """

    def __init__(self, name: str, judge: Judge, read: Read, concurrency: int, section: ScoringSection, seed: int = 0) -> None:
        self.name, self._judge, self._read, self._deadline_s, self._retries = name, judge, read, section.deadline_s, section.retries
        self._random = Random(f"{seed} {name}")
        self._slots = asyncio.Semaphore(concurrency)
        self._here = self._in_flight = self._scored = self._retried = 0
        self._failed: Counter[str] = Counter()
        self._seconds = self._wait_seconds = 0.0
        self._unreachable = False
        self._places: set[str] = set()

    async def score(self, sample: Sample) -> Score:
        """See `Scorer`."""
        begin, progress = _now(), _Progress()
        self._here += 1
        try:
            try:
                async with asyncio.timeout(self._deadline_s):
                    score = await self._attempts(sample, progress, begin + self._deadline_s)
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
        """Score a sample by a single call, without retries and counts; only the judge's own timeout limits it.

        Raises:
            TrajectoryRejected: as `Scorer.score`.
        """
        try:
            answer = await self._judge.call(sample)
        except ScorerRaised as error:
            self._log(error)
            raise
        if self._unreachable:
            self._unreachable = False
            log.info("%s answers again", self.name)
        return self._read(answer, sample)

    async def close(self) -> None:
        """See `Scorer`."""
        await self._judge.close()

    def stats(self) -> Scoring:
        """Return the statistics since the start. They exclude cancelled samples."""
        return Scoring(
            in_flight=self._in_flight,
            waiting=self._here - self._in_flight,
            scored=self._scored,
            retried=self._retried,
            failed=dict(self._failed),
            seconds=self._seconds,
            wait_seconds=self._wait_seconds,
        )

    def _took(self, begin: float, progress: _Progress) -> None:
        seconds = _now() - begin
        self._seconds += seconds
        self._wait_seconds += max(0.0, seconds - progress.called)

    async def _attempts(self, sample: Sample, progress: _Progress, deadline: float) -> Score:
        for attempt in count():
            try:
                return await self._in_slot(sample, progress)
            except TrajectoryRejected as rejected:
                delay = backoff(attempt, self._random.random())
                delay = max(delay, rejected.after_s) if isinstance(rejected, Later) else delay
                if not self._again(rejected.reason, attempt) or _now() + delay >= deadline:
                    raise
                if rejected.reason == UNAVAILABLE and not self._unreachable:
                    self._unreachable = True
                    log.warning("%s is asked again until scoring.deadline_s: %s", self.name, rejected)
                progress.last, progress.calling = rejected, False
            await asyncio.sleep(delay)
            self._retried += 1
        raise AssertionError

    def _again(self, reason: str, attempt: int) -> bool:
        return reason in PASSING and (attempt < self._retries or (reason == UNAVAILABLE and self._retries > 0))

    async def _in_slot(self, sample: Sample, progress: _Progress) -> Score:
        async with self._slots:
            progress.calling, begin = True, _now()
            self._in_flight += 1
            try:
                return await self.attempt(sample)
            finally:
                self._in_flight -= 1
                progress.called += _now() - begin

    def _log(self, raised: ScorerRaised) -> None:
        """Log what the user's scorer raised, once for each line of code."""
        if raised.at not in self._places:
            self._places.add(raised.at)
            log.warning("%s raised at %s, which is logged once:\n%s", self.name, raised.at, raised.trace.rstrip())

    def _late(self, progress: _Progress) -> TrajectoryRejected:
        """Build the rejection for a missed deadline, with its cause."""
        within = f"within scoring.deadline_s = {self._deadline_s:g} s"
        before = "" if progress.last is None else f"; last failure: {progress.last}"
        if progress.calling:
            return TrajectoryRejected(TIMEOUT, f"{self.name} did not answer {within}{before}")
        return TrajectoryRejected(TIMEOUT, f"no free slot of {self.name} {within}; raise scoring.concurrency{before}")


def _now() -> float:
    return asyncio.get_running_loop().time()
