"""Probe tokens: the engines' loaded weights compared with the trainer's."""

from __future__ import annotations

import asyncio
import math

import msgspec
import pytest
from fake_engine import FakeHandle

from asyncmoe.engines.pool import Pool
from asyncmoe.engines.probes import check, compare, require
from asyncmoe.engines.sglang.generation import Scored, ScoredMeta, scored
from asyncmoe.engines.types import VersionSpan
from asyncmoe.errors import Disagreement, EngineError, ProtocolError
from asyncmoe.rpc.messages import MAX_PROBED, Probe

AGREEING = Probe(((3, 1, 2), (5, 4)), ((0.0, -1.0, -2.0), (0.0, -4.0)))
"""What the fake engine says of these tokens."""


def test_the_distance_is_measured_in_nats() -> None:
    found = compare("engine.0", [((0.0, -0.5, -5.0), (0.0, -1.0, -2.0))])
    k3 = [math.exp(0.5) - 1 - 0.5, math.exp(-3.0) - 1 + 3.0]
    assert (found.tokens, found.largest, found.mean, found.divergence) == pytest.approx((2, 3.0, 1.75, sum(k3) / 2))


def test_an_engine_that_has_loaded_other_weights_ends_the_run() -> None:
    """Each engine is asked; one that does not respond samples nothing."""
    handles = [FakeHandle(f"engine.{number}") for number in range(2)]
    pool = Pool(handles, 8, 5.0, lambda *_: None)
    asyncio.run(require(pool, AGREEING, 5.0, 0.5))
    with pytest.raises(Disagreement, match=r"weights of engine\.0 against .* over 2 tokens, expected at most 0\.5"):
        asyncio.run(require(pool, Probe(((3, 1, 2),), ((0.0, -0.5, -5.0),)), 5.0, 0.5))
    handles[0].client.failures.extend([EngineError] * 2)
    asyncio.run(require(pool, AGREEING, 5.0, 0.5))
    assert [member.fenced is None for member in pool.members] == [False, True]


@pytest.mark.parametrize(
    "bad",
    [
        Probe((), ()),
        Probe(((1,),), ((0.0,),)),
        Probe(((1, 2),), ((0.0,),)),
        Probe(((1, 2),), ((0.0, math.nan),)),
        Probe(((1,) * 70_000,), ((0.0,) * 70_000,)),
        Probe(((1, 2),), ((0.0, -1.0), (0.0, -1.0))),
    ],
)
def test_a_malformed_probe_is_refused(bad: Probe) -> None:
    with pytest.raises(ProtocolError):
        check(bad)


@pytest.mark.parametrize(
    "bad",
    [
        Probe(((1, -2),), ((0.0, -1.0),)),
        Probe(((1, 2),) * (MAX_PROBED + 1), ()),
        Probe((), ((0.0,) * (MAX_PROBED + 1),)),
    ],
)
def test_numbers_out_of_bounds_are_no_message(bad: Probe) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(bad), type=Probe)


def test_impossible_tokens_have_a_finite_divergence() -> None:
    for pair in (((0.0, -1e4), (0.0, -1.0)), ((0.0, -1.0), (0.0, -1e4))):
        assert math.isfinite(compare("engine.0", [pair]).divergence)


def answer(*entries: tuple[float | None, int], spans: int = 1) -> Scored:
    return Scored(ScoredMeta([(value, token, None) for value, token in entries], [VersionSpan("4", 0, 1)] * spans))


def test_sglang_s_answer_is_read_and_checked() -> None:
    found = scored("engine.0", (7, 8, 9), answer((None, 7), (-0.5, 8), (-1.5, 0)))  # the vocabulary's last id is reported as 0
    assert found == (0.0, -0.5, -1.5)
    for bad in (
        answer((None, 7), (-0.5, 8)),
        answer((None, 7), (-0.5, 5), (-1.5, 9)),
        answer((None, 7), (None, 8), (-1.5, 9)),
        answer((None, 7), (math.nan, 8), (-1.5, 9)),
        answer((None, 7), (-0.5, 8), (-1.5, 9), spans=2),
    ):
        with pytest.raises(EngineError, match=r"^engine\.0"):
            scored("engine.0", (7, 8, 9), bad)
