"""Responses over several requests: parts kept, resent, lost, and refused."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from asyncmoe.config.rollout import Interruption
from asyncmoe.engines.pool import PooledGeneration
from asyncmoe.engines.scheduling import ScheduledRequest
from asyncmoe.engines.types import ABORTED, Listener, Sampling, VersionSpan
from asyncmoe.errors import ConfigError, TrajectoryRejected
from asyncmoe.models import kept_routing
from asyncmoe.rollout.episodes.interruption import respond
from asyncmoe.rollout.episodes.trajectory_builder import Turn
from tests.configs import minimal
from tests.families import ENGINE, sized
from tests.unit.generations import generation_of


class Scripted:
    """Answers as it is told: (tokens, finish); its version goes up by one with every answer."""

    def __init__(self, *answers: tuple[int, str]) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[tuple[int, ...], int, int]] = []
        self.requests: list[ScheduledRequest] = []
        self.lost_tokens = self.recomputed_tokens = 0

    async def generate(
        self, tokens: Sequence[int], sampling: Sampling, routed: int = 0, *, request: ScheduledRequest, listener: Listener | None
    ) -> PooledGeneration:
        self.requests.append(request)
        self.asked.append((tuple(tokens), sampling.max_new_tokens, routed))
        count, finish = self.answers.pop(0)
        version = len(self.asked)
        made = tuple(range(100 * version, 100 * version + count))
        if listener is not None:
            listener.hear(made)
        return PooledGeneration(generation_of(made, (-1.0,) * count, (VersionSpan(str(version), 0, count),), finish, 0), version)


def ask(pool: Any, how: Interruption, before: Sequence[Turn] = ()) -> list[Turn]:
    return asyncio.run(
        respond(
            pool,
            (1, 2, 3),
            [t for turn in before for t in (*turn.given, *turn.generation.tokens)],
            Sampling(1.0, 10, ()),
            how,
            ScheduledRequest("p"),
        )
    )


def test_what_was_cut_short_is_sent_again_as_a_prefix() -> None:
    pool = Scripted((4, ABORTED), (0, ABORTED), (2, ABORTED), (4, "length"))
    turns = ask(pool, "abort_resume")
    assert [(turn.given, len(turn.generation.tokens), turn.salt) for turn in turns] == [((1, 2, 3), 4, 1), ((), 2, 3), ((), 4, 4)]
    first, second = tuple(range(100, 104)), (300, 301)
    assert pool.asked == [
        ((1, 2, 3), 10, 0),
        ((1, 2, 3, *first), 6, 6),
        ((1, 2, 3, *first), 6, 6),
        ((1, 2, 3, *first, *second), 4, 8),
    ]
    assert (pool.lost_tokens, pool.recomputed_tokens) == (0, 7 + 7 + 9)
    assert pool.requests == [ScheduledRequest("p"), *(ScheduledRequest("p", continues=True, sampled=n) for n in (4, 4, 6))]


def test_earlier_turns_are_part_of_the_prefix() -> None:
    earlier = Turn((7, 8), generation_of((9,), (-1.0,), (VersionSpan("0", 0, 1),), "stop", 0), 0)
    pool = Scripted((2, ABORTED), (8, "length"))
    ask(pool, "abort_resume", [earlier])
    assert pool.asked == [((7, 8, 9, 1, 2, 3), 10, 2), ((7, 8, 9, 1, 2, 3, 100, 101), 8, 7)]


def test_starting_again_loses_what_there_was() -> None:
    pool = Scripted((4, ABORTED), (6, ABORTED), (10, "length"))
    (turn,) = ask(pool, "abort_retry")
    assert (turn.given, turn.salt) == ((1, 2, 3), 3)
    assert (pool.lost_tokens, pool.recomputed_tokens) == (10, 0)
    assert set(pool.asked) == {((1, 2, 3), 10, 0)}


@pytest.mark.parametrize("how", ["in_place", "retract", "drain"])
def test_an_abort_that_nobody_asked_for_is_the_engines_fault(how: Interruption) -> None:
    with pytest.raises(TrajectoryRejected) as caught:
        ask(Scripted((4, ABORTED)), how)
    assert caught.value.reason == "engine_error"


def test_retract_is_refused_where_routing_is_kept() -> None:
    retract = {"interruption": "retract"}
    hf = sized(ENGINE, "qwen3_moe")
    with pytest.raises(ConfigError) as refused:
        kept_routing(minimal(rollout=retract), hf)
    assert (refused.value.what, refused.value.got) == ("rollout.interruption", "retract")
    assert kept_routing(minimal(rollout=retract, keep={"routing": "off"}), hf) is None
    assert kept_routing(minimal(), hf) is not None
