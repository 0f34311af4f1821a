"""Groups succeed or fail as a whole, failures are counted, and groups spoiled by an engine start over."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from asyncmoe.engines.types import VersionSpan
from asyncmoe.errors import AsyncmoeError, TrajectoryRejected
from asyncmoe.queue.admission import Admission
from asyncmoe.queue.bounded import BoundedQueue
from asyncmoe.queue.fold import NEW
from asyncmoe.queue.records import Start
from asyncmoe.queue.rejections import WINDOW, Rejections
from asyncmoe.rollout.episodes import episode
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId, Turn, assemble
from asyncmoe.rollout.producer import Producer, demonstrate
from asyncmoe.rollout.tasks import Demonstration, Prompt
from asyncmoe.rollout.workers.worker import Worker
from asyncmoe.trajectory import Recording, Trajectory
from benchmarks.unlogged import Unlogged
from tests.unit.asynchronous import asynchronous, until
from tests.unit.generations import generation_of

GROUP, BATCH = 4, 8
Play = Callable[[Prompt, EpisodeId], Awaitable[Trajectory]]


class Numbers:
    """A task whose prompts name their group."""

    def prompt(self, group: int) -> Prompt:
        return Prompt(str(group), (group,), "")

    def demonstration(self, index: int) -> Demonstration:
        return Demonstration((index,), (1, 2))


def alone(play: Callable[[Prompt, EpisodeId], Awaitable[Trajectory]]) -> Callable[[Prompt, EpisodeId], Awaitable[tuple[Trajectory, ...]]]:
    """Episodes of a single agent."""

    async def played(prompt: Prompt, place: EpisodeId) -> tuple[Trajectory, ...]:
        return (await play(prompt, place),)

    return played


def respond(prompt: Prompt, place: EpisodeId, version: int = 0) -> Trajectory:
    generation = generation_of((7, 2), (-0.5, -0.25), (VersionSpan(str(version), 0, 2),), "stop", 0)
    return assemble([Turn(prompt.tokens, generation, version)], place, Recording(), 1.0, {})


def queue(max_staleness: int = 1, capacity: int = 16, demonstrations: int = 0) -> BoundedQueue:
    return BoundedQueue(Admission(BATCH, max_staleness), Unlogged(), capacity=capacity, group_size=GROUP, demonstrations=demonstrations)


def produce(
    play: Play,
    body: Callable[[BoundedQueue], Coroutine[Any, Any, None]],
    made: BoundedQueue | None = None,
    first: int = 0,
    start_over: frozenset[str] = frozenset(),
    max_rejected: float = 1.0,
) -> None:
    """Run `body` beside a producer."""

    async def run() -> None:
        held = made or queue()
        held.log.state.next = first
        made_by = Producer(held, Numbers(), Worker(alone(play), GROUP), GROUP, start_over=start_over, max_rejected=max_rejected)
        producing = asyncio.create_task(made_by.run())
        following = asyncio.create_task(body(held))
        await asyncio.wait({producing, following}, return_when=asyncio.FIRST_COMPLETED)
        for task in (producing, following):
            task.cancel()
        for result in await asyncio.gather(producing, following, return_exceptions=True):
            if isinstance(result, Exception):
                raise result

    asyncio.run(run())


def test_it_fills_the_queue_as_far_as_the_capacity_law_allows() -> None:
    async def play(prompt: Prompt, place: EpisodeId) -> Trajectory:
        return respond(prompt, place)

    async def body(held: BoundedQueue) -> None:
        await until(lambda: held.ledger.queued == 2 * BATCH)
        await asyncio.sleep(0.05)
        assert held.ledger.started == 2 * BATCH
        leased = await held.lease(0, "rl", BATCH, 0, 1.0)
        assert [item.key for item in leased.items] == [f"g{group}.e{e}.a0.t0" for group in (5, 6) for e in range(GROUP)]
        held.commit(0)
        held.set_version(1)
        await until(lambda: held.ledger.started == 3 * BATCH)

    produce(play, body, first=5)


def test_what_was_under_way_starts_first_and_in_its_order() -> None:
    begun: list[tuple[int, int]] = []

    async def play(prompt: Prompt, place: EpisodeId) -> Trajectory:
        begun.extend([(place.group, place.attempt)] * (place.episode == 0))
        return respond(prompt, place)

    resumed = replace(NEW, starts=(Start(1), Start(2, 1)))
    held = BoundedQueue(Admission(BATCH, 1), Unlogged(), capacity=16, group_size=GROUP, resumed=resumed)
    produce(play, lambda held: until(lambda: held.ledger.queued == 2 * BATCH), held, first=5)
    assert begun == [(1, 0), (2, 1), (5, 0), (6, 0)]


def test_a_rejected_response_takes_its_group_and_cancels_the_rest() -> None:
    cancelled: list[str] = []

    async def play(prompt: Prompt, place: EpisodeId) -> Trajectory:
        if place.group == 1 and place.episode == 2:
            raise TrajectoryRejected("scorer_nan", "the scorer returned nan")
        if place.group == 1:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append(place.key())
                raise
        return respond(prompt, place)

    async def body(held: BoundedQueue) -> None:
        await until(lambda: held.ledger.queued == 2 * BATCH)
        assert held.accounts.rejected == {"scorer_nan": GROUP}
        assert held.ledger.started == 2 * BATCH + GROUP
        leased = await held.lease(0, "rl", 2 * BATCH, 0, 1.0)
        assert {item.group for item in leased.items} == {0, 2, 3, 4}

    produce(play, body)
    assert sorted(cancelled) == ["g1.e0.a0.t0", "g1.e1.a0.t0", "g1.e3.a0.t0"]


@pytest.mark.parametrize(("reason", "attempts"), [("scorer_timeout", 3), ("scorer_nan", 1), ("engine_error", 3), ("engine_died", 2)])
def test_what_could_not_be_answered_or_where_the_user_wants_it_scored_is_started_over(reason: str, attempts: int) -> None:
    begun: set[int] = set()

    async def play(prompt: Prompt, place: EpisodeId) -> Trajectory:
        if place.group == 0:
            begun.add(place.attempt)
            if place.attempt < 2 or reason != "engine_died":
                raise TrajectoryRejected(reason, "the judge is busy")
        return respond(prompt, place)

    async def body(held: BoundedQueue) -> None:
        await until(lambda: held.ledger.queued == 2 * BATCH)
        await asyncio.sleep(0.02)
        assert held.accounts.rejected == {reason: attempts * GROUP}
        leased = await held.lease(0, "rl", 2 * BATCH, 0, 1.0)
        again = [item.key for item in leased.items if item.group == 0]
        assert again == [f"g0.e{e}.a0.t2" for e in range(GROUP if reason == "engine_died" else 0)]

    produce(play, body, start_over=frozenset({"scorer_timeout"}))
    assert begun == set(range(attempts + (reason == "engine_died")))


def test_rejecting_everything_ends_the_run_with_the_reason() -> None:
    async def play(prompt: Prompt, place: EpisodeId) -> Trajectory:
        raise TrajectoryRejected("scorer_error", "ZeroDivisionError: division by zero")

    with pytest.raises(AsyncmoeError, match=r"^32 of the last 32 groups were rejected \(scorer_error 32\), .*: ZeroDivisionError"):
        produce(play, lambda held: asyncio.sleep(10))


@asynchronous
async def test_demonstrations_keep_the_warm_up_lane_full() -> None:
    async def shown(index: int) -> tuple[Trajectory, ...]:
        return (episode.demonstration(index, Numbers().demonstration(index)),)

    held = queue(demonstrations=6)
    showing = asyncio.create_task(demonstrate(held, Worker(alone(respond), GROUP, shown=shown).show, 2, 10))
    leased = await held.lease(0, "warmup", 4, 0, 1.0)
    assert held.ledger.started == 0
    assert [item.key for item in leased.items] == ["d2.a0", "d3.a0", "d4.a0", "d5.a0"]
    assert {item.sampled for item in leased.items} == {2}
    assert not showing.done()
    held.commit(0)
    assert held.trained_steps == 1
    await asyncio.wait_for(showing, 10)
    assert len((await held.lease(1, "warmup", 4, 1, 1.0)).items) == 4


async def enough(held: BoundedQueue) -> None:
    await until(lambda: held.ledger.queued == 64 * GROUP)


def one_in_three_fails(reason: str) -> Play:
    async def play(prompt: Prompt, place: EpisodeId) -> Trajectory:
        if place.group % 3 == 0 and place.attempt == 0:
            raise TrajectoryRejected(reason, "KeyError: 'x'")
        return respond(prompt, place)

    return play


def test_more_rejected_groups_than_allowed_end_the_run_with_the_reason() -> None:
    wanted = (
        r"^\d+ of the last \d+ groups were rejected \(scorer_error \d+\), more than rollout\.max_rejected_share = 0\.25 allows; "
        r"most recently: scorer_error: KeyError: 'x'$"
    )
    with pytest.raises(AsyncmoeError, match=wanted):
        produce(one_in_three_fails("scorer_error"), enough, queue(31, 64 * GROUP), max_rejected=0.25)
    produce(one_in_three_fails("scorer_error"), enough, queue(31, 64 * GROUP), max_rejected=0.5)


def test_groups_that_are_started_over_do_not_count_as_rejected() -> None:
    produce(one_in_three_fails("engine_died"), enough, queue(31, 64 * GROUP), max_rejected=0.0)


def test_only_the_last_groups_count() -> None:
    state = Rejections(0.5)
    for _ in range(WINDOW):
        state = state.note("scorer_nan")
    assert state.exceeded
    for _ in range(WINDOW // 2):
        assert state.exceeded
        state = state.note("")
    assert not state.exceeded
    assert str(state) == f"{WINDOW // 2} of the last {WINDOW} groups were rejected (scorer_nan {WINDOW // 2})"


@asynchronous
async def test_equal_rewards_are_left_out_and_the_prompts_go_on() -> None:
    async def play(prompt: Prompt, place: EpisodeId) -> Trajectory:
        made = respond(prompt, place)
        made.__dict__["reward"] = float(place.episode) if place.group else 1.0
        return made

    held = BoundedQueue(Admission(BATCH, 0), Unlogged(), capacity=16, group_size=GROUP)
    producing = asyncio.create_task(Producer(held, Numbers(), Worker(alone(play), GROUP), GROUP, filter_equal=True).run())
    await until(lambda: held.ledger.queued == BATCH)
    assert held.accounts.all_dropped == {"equal_rewards": GROUP}
    assert {item.group for item in (await held.lease(0, "rl", BATCH, 0, 1.0)).items} == {1, 2}
    producing.cancel()


@asynchronous
async def test_a_requeued_prompt_is_asked_again_and_trained_with_newer_tokens() -> None:
    """A group that got too old in the queue goes back to the engines before any new prompt, through the real producer."""
    asked: list[tuple[int, int]] = []
    late, version = asyncio.Event(), 0

    async def play(prompt: Prompt, place: EpisodeId) -> Trajectory:
        if place.episode == 0:
            asked.append((place.group, place.attempt))
        sampled_at = version
        if (place.group, place.attempt) == (1, 0):
            await late.wait()
        return respond(prompt, place, sampled_at)

    held = BoundedQueue(Admission(BATCH, 1, rule="requeue"), Unlogged(), capacity=16, group_size=GROUP)
    producing = asyncio.create_task(Producer(held, Numbers(), Worker(alone(play), GROUP), GROUP).run())
    trained: list[tuple[int, int, int]] = []
    for step in range(5):
        if step == 3:
            # Its tokens are three versions old by now.
            late.set()
            await until(lambda: held.ledger.queued >= BATCH)
        leased = await held.lease(step, "rl", BATCH, step, 5.0)
        trained += sorted({(item.group, int(item.key.rpartition("t")[2]), step - item.oldest_version) for item in leased.items})
        held.commit(step)
        version = step + 1
        held.set_version(version)
    producing.cancel()
    assert held.accounts.requeued == {"stale": GROUP}
    assert [(group, attempt) for group, attempt in asked if group == 1] == [(1, 0), (1, 1)]
    assert [(group, attempt) for group, attempt, _ in trained if group == 1] == [(1, 1)]
    assert all(age <= 1 for _, _, age in trained)
    again = asked.index((1, 1))
    assert max(group for group, _ in asked[:again]) < min(group for group, _ in asked[again + 1 :])
