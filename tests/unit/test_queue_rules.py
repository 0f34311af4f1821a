"""The queue's rules through the real producer and the real queue, with engines that are functions; and configurations that are refused."""

from __future__ import annotations

import asyncio

import pytest
from test_config import refused, with_value
from test_producer import BATCH, GROUP, Numbers, alone, respond, until
from test_queue import asynchronous

from asyncmoe.queue.bounded import BoundedQueue
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId
from asyncmoe.rollout.producer import Producer
from asyncmoe.rollout.tasks import Prompt
from asyncmoe.rollout.workers.worker import Worker
from asyncmoe.trajectory import Trajectory


@asynchronous
async def test_equal_rewards_are_left_out_and_the_prompts_go_on() -> None:
    async def play(prompt: Prompt, place: EpisodeId) -> Trajectory:
        made = respond(prompt, place)
        made.__dict__["reward"] = float(place.episode) if place.group else 1.0
        return made

    held = BoundedQueue(capacity=16, batch=BATCH, group_size=GROUP, max_staleness=0)
    producing = asyncio.create_task(Producer(held, Numbers(), Worker(alone(play), GROUP), GROUP, filter_equal=True).run())
    await until(lambda: held.stats().depth == BATCH)
    assert held.stats().dropped == {"equal_rewards": GROUP}
    assert {item.group for item in (await held.lease(0, "rl", BATCH, 0, 1.0)).items} == {1, 2}
    producing.cancel()


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("queue.staleness", {"rule": "downweight", "downweight": 0.5}, "a number above queue.staleness.max_staleness"),
        ("queue.staleness", {"rule": "downweight", "downweight": 0.5, "drop_above": 1}, "more than queue.staleness.max_staleness = 1"),
        ("queue.staleness.drop_above", 3, "nothing because queue.staleness.rule is drop"),
    ],
)
def test_policies_that_cannot_be_are_refused(path: str, value: object, expected: str) -> None:
    assert expected in str(refused(with_value(path, value)))


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

    held = BoundedQueue(capacity=16, batch=BATCH, group_size=GROUP, max_staleness=1, rule="requeue")
    producing = asyncio.create_task(Producer(held, Numbers(), Worker(alone(play), GROUP), GROUP).run())
    trained: list[tuple[int, int, int]] = []
    for step in range(5):
        if step == 3:
            # Its tokens are three versions old by now.
            late.set()
            await until(lambda: held.stats().depth >= BATCH)
        leased = await held.lease(step, "rl", BATCH, step, 5.0)
        trained += sorted({(item.group, int(item.key.rpartition("t")[2]), step - item.oldest_version) for item in leased.items})
        held.commit(step)
        version = step + 1
        held.set_version(version)
    producing.cancel()
    assert held.stats().requeued == {"stale": GROUP}
    assert [(group, attempt) for group, attempt in asked if group == 1] == [(1, 0), (1, 1)]
    assert [(group, attempt) for group, attempt, _ in trained if group == 1] == [(1, 1)]
    assert all(age <= 1 for _, _, age in trained)
    again = asked.index((1, 1))
    assert max(group for group, _ in asked[:again]) < min(group for group, _ in asked[again + 1 :])
