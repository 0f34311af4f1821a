"""The stage around a judge, on a clock of its own: bounds, retries and the deadline."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest

from asyncmoe.config.scoring import ScoringSection
from asyncmoe.errors import TrajectoryRejected
from asyncmoe.rollout.scoring.limits import LimitedScorer, backoff
from asyncmoe.rollout.scoring.types import Sample, Score
from tests.unit.virtual_time import run


class Judge:
    """Responds to call number i as specified, and records the time."""

    def __init__(self, answer: Callable[[int], Awaitable[object]]) -> None:
        self.begun: list[float] = []
        self.under_way = self.most = 0
        self._answer = answer

    async def call(self, sample: Sample) -> object:
        self.begun.append(now())
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            return await self._answer(len(self.begun) - 1)
        finally:
            self.under_way -= 1

    async def close(self) -> None:
        pass


def now() -> float:
    return asyncio.get_running_loop().time()


def read(answer: object, sample: Sample) -> Score:
    return Score(answer)  # type: ignore[arg-type]


def stage(judge: Judge, concurrency: int = 4, deadline_s: float = 100.0, retries: int = 2) -> LimitedScorer:
    section = ScoringSection(timeout_s=1.0, deadline_s=deadline_s, retries=retries)
    return LimitedScorer("the judge", judge, read, concurrency, section, seed=1)


def takes(seconds: float) -> Judge:
    async def answer(number: int) -> float:
        await asyncio.sleep(seconds)
        return float(number)

    return Judge(answer)


def test_waiting_is_counted_apart_from_calls() -> None:
    """Two samples, one slot, calls of 2 s: the second waits for 2 s."""
    made = stage(takes(2.0), concurrency=1)

    async def body() -> None:
        await asyncio.gather(outcome(made), outcome(made))

    run(body())
    assert (made.stats().seconds, made.stats().wait_seconds) == (pytest.approx(6.0), pytest.approx(2.0))


def fails(*reasons: str | None) -> Judge:
    """For each call a reason or None; the last for all others."""

    async def answer(number: int) -> float:
        reason = reasons[min(number, len(reasons) - 1)]
        if reason is not None:
            raise TrajectoryRejected(reason, f"call {number}")
        return 1.0

    return Judge(answer)


SAMPLE = Sample("", "", "")


async def outcome(made: LimitedScorer) -> float | str:
    try:
        return (await made.score(SAMPLE)).reward
    except TrajectoryRejected as rejected:
        return str(rejected)


def test_a_slow_judge_is_used_to_the_full_and_never_more() -> None:
    judge = takes(2.0)
    made = stage(judge, deadline_s=1000.0)

    async def body() -> None:
        scoring = [asyncio.create_task(outcome(made)) for _ in range(40)]
        await asyncio.sleep(3.0)
        assert (made.stats().scored, made.stats().in_flight, made.stats().waiting) == (4, 4, 32)
        await asyncio.gather(*scoring)
        assert now() == pytest.approx(20.0)

    run(body())
    assert judge.most == 4
    assert (made.stats().failed, made.stats().in_flight, made.stats().waiting) == ({}, 0, 0)


@pytest.mark.parametrize("reason", ["scorer_error", "scorer_timeout", "scorer_unavailable"])
def test_what_may_pass_is_tried_again_after_a_pause_that_doubles(reason: str) -> None:
    judge = fails(reason, reason, None)
    made = stage(judge)
    assert run(outcome(made)) == 1.0
    first, second = judge.begun[1] - judge.begun[0], judge.begun[2] - judge.begun[1]
    assert 0.25 <= first <= 0.75
    assert 0.5 <= second <= 1.5
    assert (made.stats().retried, made.stats().scored, made.stats().failed) == (2, 1, {})
    assert made.stats().seconds == pytest.approx(judge.begun[2])
    assert made.stats().wait_seconds == pytest.approx(judge.begun[2]), "the calls took no time"


def test_pauses_are_the_same_for_the_same_seed() -> None:
    begun = []
    for _ in range(2):
        judge = fails("scorer_error")
        run(outcome(stage(judge)))
        begun.append(judge.begun)
    assert begun[0] == begun[1]
    assert [backoff(attempt, 0.5) for attempt in (0, 1, 2, 6, 2000)] == [0.5, 1.0, 2.0, 30.0, 30.0]


@pytest.mark.parametrize(("reason", "calls"), [("scorer_error", 2), ("scorer_nan", 1), ("scorer_garbage", 1)])
def test_after_the_last_retry_the_reason_stays_and_garbage_is_not_asked_for_again(reason: str, calls: int) -> None:
    judge = fails(reason)
    made = stage(judge, retries=1)
    assert run(outcome(made)) == f"{reason}: call {calls - 1}"
    assert (made.stats().failed, made.stats().retried, len(judge.begun)) == ({reason: 1}, calls - 1, calls)


def test_waiting_for_a_turn_counts_towards_the_deadline() -> None:
    made = stage(takes(6.0), concurrency=1, deadline_s=10.0)

    async def body() -> None:
        begun = now()
        found = await asyncio.gather(*(outcome(made) for _ in range(4)))
        assert now() == begun + 10.0
        assert found[0] == 0.0
        assert [str(text).partition(":")[0] for text in found[1:]] == ["scorer_timeout"] * 3
        assert "the judge did not answer within scoring.deadline_s = 10 s" in str(found[1])
        assert "no free slot of the judge within" in str(found[2])

    run(body())
    assert made.stats().failed == {"scorer_timeout": 3}
    assert (made.stats().in_flight, made.stats().waiting) == (0, 0)


def test_a_judge_that_comes_back_scores_all_that_waited(caplog: pytest.LogCaptureFixture) -> None:
    async def answer(number: int) -> float:
        if now() < 300.0:
            raise TrajectoryRejected("scorer_unavailable", "status 503")
        return 1.0

    judge = Judge(answer)
    made = stage(judge, concurrency=8, deadline_s=600.0)

    async def body() -> None:
        assert await asyncio.gather(*(outcome(made) for _ in range(33))) == [1.0] * 33
        assert now() < 350.0

    with caplog.at_level(logging.INFO):
        run(body())
    # After the first pauses each asks once in half a minute or so.
    assert len(judge.begun) < 33 * 26
    assert [record.message for record in caplog.records] == [
        "the judge is asked again until scoring.deadline_s: scorer_unavailable: status 503",
        "the judge answers again",
    ]


def test_a_judge_that_stays_away_is_asked_until_the_deadline_and_without_retries_once() -> None:
    for retries, least, most in ((2, 4, 20), (0, 1, 1)):
        judge = fails("scorer_unavailable")
        assert str(run(outcome(stage(judge, retries=retries, deadline_s=200.0)))).startswith("scorer_unavailable: call ")
        assert least <= len(judge.begun) <= most
        assert judge.begun[-1] < 200.0


def test_a_group_that_falls_frees_the_slot() -> None:
    made = stage(takes(50.0), concurrency=1)

    async def body() -> None:
        first = asyncio.create_task(outcome(made))
        await asyncio.sleep(1.0)
        second = asyncio.create_task(outcome(made))
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert await second == 1.0

    run(body())
    assert made.stats().failed == {}
