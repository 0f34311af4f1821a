"""A judge ten times slower than generation, through the real queue, producer and scoring stage, on a clock of its own."""

from __future__ import annotations

import asyncio

from test_producer import Numbers, respond
from test_scoring_stage import stage, takes

from asyncmoe.queue.bounded import BoundedQueue
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId
from asyncmoe.rollout.producer import Producer
from asyncmoe.rollout.scoring.types import Sample
from asyncmoe.rollout.tasks import Prompt
from asyncmoe.rollout.workers.worker import Worker
from asyncmoe.trajectory import Trajectory
from tests.unit.virtual_time import run

SLOTS, GENERATE_S, JUDGE_S = 8, 1.0, 10.0
GROUP, BATCH, MAX_STALENESS = 2, 8, 2
SECONDS = 2000


def test_a_slow_judge_lowers_throughput_to_its_own_rate_and_nothing_else() -> None:
    judge = takes(JUDGE_S)
    scoring = stage(judge, concurrency=SLOTS, deadline_s=1e6)
    slots, generating, most_held, idle_without_need = asyncio.Semaphore(SLOTS), 0, 0, 0
    held = BoundedQueue(capacity=(MAX_STALENESS + 1) * BATCH, batch=BATCH, group_size=GROUP, max_staleness=MAX_STALENESS)

    async def play(prompt: Prompt, place: EpisodeId) -> tuple[Trajectory, ...]:
        nonlocal generating
        version = held.version
        async with slots:
            generating += 1
            await asyncio.sleep(GENERATE_S)
            generating -= 1
        await scoring.score(Sample("", "", "", (), ()))
        return (respond(prompt, place, version),)

    async def train() -> int:
        step = 0
        while True:
            leased = await held.lease(step, "rl", BATCH, step, 1e5)
            assert all(step - item.oldest_version <= MAX_STALENESS for item in leased.items)
            held.commit(step)
            step += 1
            held.set_version(step)

    async def watch() -> None:
        nonlocal most_held, idle_without_need
        for _ in range(SECONDS):
            # Between two moments at which anything changes.
            await asyncio.sleep(1.0 if asyncio.get_running_loop().time() else 0.5)
            count = held.stats()
            most_held = max(most_held, count.running + count.depth + count.leased)
            idle_without_need += generating < SLOTS and held.can_start(GROUP)

    async def play_all() -> None:
        tasks = [asyncio.create_task(part) for part in (Producer(held, Numbers(), Worker(play, GROUP), GROUP).run(), train())]
        await watch()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(play_all())
    judged = SECONDS / JUDGE_S * SLOTS
    # The judge is never without work: what is trained is what it can judge, but for the batches in hand at the ends.
    assert judged - (MAX_STALENESS + 2) * BATCH <= held.stats().trained <= judged
    assert judge.most == SLOTS
    assert idle_without_need == 0
    # Groups in all stages together are within the capacity law, whatever waits for the judge.
    assert most_held <= (MAX_STALENESS + 1) * BATCH
    assert held.stats().rejected == {}
    assert held.stats().dropped == {}
