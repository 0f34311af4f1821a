"""A run whose policy writes 1 endless program in 100, and other bad ones, rejects no group."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from asyncmoe.engines.pool import PooledGeneration
from asyncmoe.engines.types import Sampling, VersionSpan
from asyncmoe.queue.admission import Admission
from asyncmoe.queue.bounded import BoundedQueue
from asyncmoe.rollout.episodes import episode
from asyncmoe.rollout.episodes.environment import Bounds
from asyncmoe.rollout.episodes.environments.tools import WithTools
from asyncmoe.rollout.episodes.episode import RolloutContext
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId
from asyncmoe.rollout.scoring.exact import Exact
from asyncmoe.rollout.tasks import Prompt
from asyncmoe.rollout.tokenizer import Tokenizer
from asyncmoe.trajectory import Trajectory
from benchmarks.unlogged import Unlogged
from tests.unit.generations import generation_of
from tests.unit.test_producer import BATCH, GROUP, produce
from tests.unit.test_tools_sandbox import pytestmark as pytestmark

EPISODES = 13 * BATCH


def call(tool: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


AGAIN = call("calculator", expression="6 * 7 + 0")
BAD = ["while True: pass", "print('x' * 10**6)", "import ctypes; ctypes.string_at(0)", "raise SystemExit(3)"]
FIRST = [*(call("python", code=code) for code in (*BAD, "print(42)")), AGAIN]


class Policy:
    """Engines whose policy calls a tool first, badly in the first episodes, and then says 42, unless it calls `AGAIN` without end."""

    def __init__(self, known: Tokenizer) -> None:
        self.known, self.first = known, [*FIRST, *[call("calculator", expression="6 * 7")] * (EPISODES - len(FIRST))]

    async def generate(self, tokens: Sequence[int], sampling: Sampling, routed: int = 0, **_: object) -> PooledGeneration:
        begins, text = len(tokens) == 1, self.known.decode(tokens)
        said = (*self.known.encode(self.first.pop(0) if begins else AGAIN if AGAIN in text else "42"), self.known.eos)
        return PooledGeneration(generation_of(said, (-0.5,) * len(said), (VersionSpan("0", 0, len(said)),), "stop", 0), 0)


def test_a_policy_that_misbehaves_loses_no_group(known: Tokenizer) -> None:
    limits = {"python": {"cpu_s": 1.0, "wall_s": 60.0, "timeout_s": 120.0}}
    environment, rewards = WithTools(("calculator", "python"), chat=False, options=limits), Counter[float]()
    pool: Any = Policy(known)
    stage = RolloutContext(pool, Sampling(1.0, 512, (known.eos,)), known, Exact(), environment, Bounds(8, 1 << 15))
    held = BoundedQueue(Admission(BATCH, EPISODES // BATCH - 1), Unlogged(), capacity=EPISODES, group_size=GROUP)

    async def play(prompt: Prompt, place: EpisodeId) -> Trajectory:
        (made,) = await episode.run(stage, replace(prompt, answer="42"), place)
        rewards[made.reward] += 1
        return made

    async def body(held: BoundedQueue) -> None:
        async with asyncio.timeout(300):
            while held.ledger.queued + held.ledger.rejected < EPISODES:
                await asyncio.sleep(0.05)
        await environment.close()

    produce(play, body, held)
    assert (held.ledger.queued, held.accounts.rejected) == (EPISODES, {})
    assert rewards == {1.0: EPISODES - 1, 0.0: 1}, "the call that the policy ended with is no answer"
    assert environment.counts["python"].failures == dict.fromkeys(("tool_timeout", "tool_flood", "tool_killed", "tool_error"), 1)
