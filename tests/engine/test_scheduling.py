"""Where requests go decides what the engines find in their prefix caches."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from asyncmoe.config.rollout import Balance
from asyncmoe.engines.pool import Pool
from asyncmoe.engines.scheduling import ScheduledRequest
from asyncmoe.engines.sglang.process import SGLangProcess
from asyncmoe.engines.types import Sampling
from tests.engine.conftest import Rig

pytestmark = pytest.mark.engine
GROUPS, MEMBERS, PROMPT = 12, 3, 96


def test_prefix_affinity_raises_prefix_reuse(rig: Rig, untouched: Rig) -> None:
    pair = [*rig.engines, *untouched.engines]
    cached = {balance: rig.run(_cached(pair, balance, first)) for balance, first in (("least_loaded", 0), ("prefix_affine", GROUPS))}
    print(f"cached tokens of {GROUPS * MEMBERS * PROMPT} given: {cached}")
    # All but the first member of each group find all of their prompt but its last token, which must be computed for its logits.
    whole = GROUPS * (MEMBERS - 1) * (PROMPT - 1)
    assert cached["prefix_affine"] >= 0.95 * whole
    assert cached["least_loaded"] <= 0.8 * whole


async def _cached(engines: list[SGLangProcess], balance: Balance, first: int) -> int:
    """Tokens found in caches when the members of each group come one after the other, among those of the other groups."""
    pool, random = Pool(engines, 64, 60.0, lambda *_: None, balance=balance, slack=GROUPS), Random(0)
    prompts = {group: tuple(Random(group).randrange(3, 60) for _ in range(PROMPT)) for group in range(first, first + GROUPS)}
    cached = 0
    for _ in range(MEMBERS):
        order = random.sample(list(prompts), GROUPS)
        asked = (pool.generate(prompts[group], Sampling(1.0, 8, ()), request=ScheduledRequest(f"episode {group}")) for group in order)
        cached += sum(answer.generation.cached_tokens for answer in await asyncio.gather(*asked))
    return cached
