"""Request placement determines the prefix-cache hits of engines."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from asyncmoe.engines.pool import Pool
from asyncmoe.engines.scheduling import ScheduledRequest
from asyncmoe.engines.sglang.process import SGLangProcess
from asyncmoe.engines.types import Sampling
from asyncmoe.rollout.episodes.interruption import respond
from tests.engine.conftest import Rig

pytestmark = pytest.mark.engine
EPISODES, TURNS, PROMPT = 3, 6, 64
"""So few that the engine with the prefix is never too busy."""


def test_of_two_engines_a_later_piece_and_a_later_turn_find_all_before_them_cached(rig: Rig, untouched: Rig) -> None:
    """The last token of what came before has not passed through the model yet, nor has that which ends a piece."""
    found = rig.run(_play([*rig.engines, *untouched.engines]))
    assert len(found) > EPISODES * TURNS
    assert all(cached >= before - 2 for before, cached in found), found


async def _play(engines: list[SGLangProcess]) -> list[tuple[int, int]]:
    """Tokens before each request that goes on, and how many of them were cached; lengths differ, so that loads do."""
    pool = Pool(engines, 64, 60.0, lambda *_: None)
    return [one for found in await asyncio.gather(*(_episode(pool, number) for number in range(EPISODES))) for one in found]


async def _episode(pool: Pool, number: int) -> list[tuple[int, int]]:
    random, said, found = Random(number), list[int](), list[tuple[int, int]]()
    for turn in range(TURNS):
        given = tuple(random.randrange(3, 60) for _ in range(PROMPT))
        request = ScheduledRequest("affinity", turn > 0, conversation=f"affinity {number}")
        sampling = Sampling(1.0, random.randrange(20, 120), ())
        for made in await respond(pool, given, tuple(said), sampling, "in_place", request, piece=32):
            if said:
                found.append((len(said), made.generation.cached_tokens))
            said += [*made.given, *made.generation.tokens.tolist()]
    return found
