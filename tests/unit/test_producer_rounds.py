"""Tail batching through the real producer and queue: the slowest groups are put off, and whatever fails, counts and prompts add up."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_config import refused, with_value
from test_producer import GROUP, Numbers, alone, respond, until

from asyncmoe.errors import TrajectoryRejected
from asyncmoe.queue.bounded import BoundedQueue
from asyncmoe.queue.group_buffer import Group
from asyncmoe.queue.queue_log import QueueLog
from asyncmoe.queue.rounds import Rounds
from asyncmoe.queue.start_order import Start
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId
from asyncmoe.rollout.producer import Producer
from asyncmoe.rollout.tasks import Prompt
from asyncmoe.rollout.workers.worker import Worker
from asyncmoe.trajectory import Trajectory

NEEDED = 2
BATCH = NEEDED * GROUP


def test_the_slowest_are_put_off_and_have_a_batch_of_their_own() -> None:
    """Of three prompts a batch trains two; the slow one of the first batch and that of the second make the third, alone."""
    asked: list[list[tuple[int, int]]] = [[]]
    cancelled: Counter[int] = Counter()

    async def play(prompt: Prompt, place: EpisodeId) -> Trajectory:
        if place.episode == 0:
            asked[-1].append((place.group, place.attempt))
        if place.group % 3 == 0 and place.attempt == 0 and place.episode == 1:
            try:
                await asyncio.sleep(60)
            finally:
                cancelled[place.group] += 1
        return respond(prompt, place, held.version)

    async def body() -> list[set[int]]:
        producing = asyncio.create_task(Producer(held, Numbers(), Worker(alone(play), GROUP), GROUP, rounds=Rounds(NEEDED, 1.5)).run())
        trained = []
        for step in range(4):
            items = (await held.lease(step, "rl", BATCH, step, 10.0)).items
            trained.append({item.group for item in items})
            await until(lambda: held.stats().running == 0)
            if step == 0:
                assert held.stats().dropped == {"deferred": GROUP}
                assert held.stats().started == BATCH + GROUP
            asked.append([])
            held.commit(step)
            held.set_version(step + 1)
        await until(lambda: held.stats().depth == BATCH and not held.stats().running)
        producing.cancel()
        return trained

    held = BoundedQueue(capacity=BATCH, batch=BATCH, group_size=GROUP, max_staleness=0)
    assert asyncio.run(body()) == [{1, 2}, {4, 5}, {0, 3}, {7, 8}]
    assert asked[:4] == [[(0, 0), (1, 0), (2, 0)], [(3, 0), (4, 0), (5, 0)], [(0, 1), (3, 1)], [(6, 0), (7, 0), (8, 0)]]
    assert dict(cancelled) == {0: 1, 3: 1, 6: 1, 9: 1}


class Noted(QueueLog):
    """Knows what became of each group last."""

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[int, tuple[str, int]] = {}

    def begun(self, group: Start) -> None:
        self.last[group.number] = "begun", group.attempt

    async def finished(self, group: Group) -> None:
        self.last[group.number] = "queued", group.attempt

    def ended(self, number: int) -> None:
        self.last[number] = "ended", 0

    def again(self, group: Start) -> None:
        self.last[group.number] = "again", group.attempt


class Life:
    """A run of some steps in which responses take random times and some fail; what was put off or runs at its end is kept.

    Attributes:
        started: attempts of each group, in order.
        trained: how often each group was.
        last, to_start, under_way, stats: what became of each group, starts that wait, groups that run, and counts, at the end.
    """

    def __init__(self, seed: int, max_staleness: int, options: dict[str, Any]) -> None:
        self.random, self.options, self.notes = random.Random(seed), options, Noted()
        self.started: dict[int, list[int]] = {}
        self.trained: Counter[int] = Counter()
        self.queue = BoundedQueue(capacity=3 * BATCH, batch=BATCH, group_size=GROUP, max_staleness=max_staleness, log=self.notes)

    async def run(self, steps: int, rounds: Rounds[Start]) -> None:
        producer = Producer(
            self.queue, Numbers(), Worker(alone(self._play), GROUP), GROUP, rounds=rounds, queue_log=self.notes, **self.options
        )
        producing = asyncio.create_task(producer.run())
        for step in range(steps):
            leased = asyncio.create_task(self.queue.lease(step, "rl", BATCH, step, 20.0))
            await asyncio.wait({leased, producing}, return_when=asyncio.FIRST_COMPLETED)
            assert not producing.done(), producing.exception()
            items = (await leased).items
            assert len(items) == BATCH
            self.trained.update({item.group for item in items})
            await asyncio.sleep(self.random.random() * 0.002)
            self.queue.commit(step)
            self.queue.set_version(step + 1)
        self.to_start = [*producer._rounds.now.deferred, *producer._line.groups]
        self.under_way = {start.number for start, flight in producer._flights.items() if flight.round_end == "running"}
        self.last, self.stats = dict(self.notes.last), self.queue.stats()
        producing.cancel()
        await asyncio.wait({producing})

    async def _play(self, prompt: Prompt, place: EpisodeId) -> Trajectory:
        attempts = self.started.setdefault(place.group, [])
        if place.attempt not in attempts:
            attempts.append(place.attempt)
        version, kind = self.queue.version, self.random.random()
        await asyncio.sleep(self.random.random() ** 8 * 0.01)
        if kind < 0.03:
            raise TrajectoryRejected("engine_died", "engine.0")
        if kind < 0.05:
            raise TrajectoryRejected("scorer_nan", "no score")
        made = respond(prompt, place, version)
        made.__dict__["reward"] = 1.0 if place.group % 7 == 3 else float(place.episode)
        return made


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    factor=st.sampled_from([1.5, 2.0, 4.0]),
    max_staleness=st.sampled_from([0, 1]),
    oversample=st.integers(0, 2),
    filter_equal=st.booleans(),
)
def test_no_prompt_is_trained_twice_or_forgotten_and_the_ledger_adds_up(
    seed: int, factor: float, max_staleness: int, oversample: int, filter_equal: bool
) -> None:
    """The ledger checks itself at every change; the queue refuses any start against the capacity law, and any token that is too old."""
    life = Life(seed, max_staleness, {"oversample": oversample, "filter_equal": filter_equal})
    asyncio.run(life.run(8, Rounds(NEEDED, factor)))
    stats = life.stats
    assert set(life.trained.values()) == {1}
    assert sum(life.trained.values()) == 8 * NEEDED
    assert all(attempts == list(range(len(attempts))) for attempts in life.started.values()), "no attempt is made twice or left out"
    ended = sum(sum(one.values()) for one in (stats.dropped, stats.rejected, stats.requeued))
    assert stats.started == stats.running + stats.depth + stats.leased + stats.trained + ended
    again = {number: attempt for number, (what, attempt) in life.last.items() if what == "again"}
    assert {start.number: start.attempt for start in life.to_start} == again
    assert len(life.to_start) == len(again)
    begun = {number for number, (what, _) in life.last.items() if what == "begun"}
    assert life.under_way <= begun
    assert sum(what == "queued" for what, _ in life.last.values()) == 8 * NEEDED + stats.depth // GROUP
    assert set(life.started) <= set(life.last)


@pytest.mark.parametrize(
    ("tail", "mode", "unit", "why"),
    [
        (1.25, "async", "group", "expected 1 because run.mode is async"),
        (1.25, "sync", "trajectory", "expected 1 because queue.admission is trajectory"),
        (0.5, "sync", "group", "at least 1"),
    ],
)
def test_rounds_that_cannot_be_are_refused(tail: float, mode: str, unit: str, why: str) -> None:
    values = with_value("rollout.tail_batching", tail)
    values["run"]["mode"] = mode
    values["queue"] = {"admission": unit}
    assert why in refused(values)
