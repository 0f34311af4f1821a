"""Probe tokens: engine and trainer compared at the same version."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import kept_trajectory
import msgspec
import pytest
from fake_engine import FakeHandle

from asyncmoe import config as configuration
from asyncmoe.engines.pool import Pool
from asyncmoe.engines.probes import Prober, check, compare
from asyncmoe.engines.sglang.generation import Scored, ScoredMeta, scored
from asyncmoe.engines.types import VersionSpan
from asyncmoe.errors import Disagreement, EngineError, ProtocolError
from asyncmoe.queue.group_buffer import describe
from asyncmoe.rpc.messages import MAX_PROBED, Probe
from asyncmoe.trainer import probe

ROOT = Path(__file__).parents[2]
AGREEING = Probe(0, ((3, 1, 2), (5, 4)), ((0.0, -1.0, -2.0), (0.0, -4.0)))
"""What the fake engine says of these tokens."""


def pool_of(*engines: Any) -> Pool:
    return Pool(engines, 8, 5.0, lambda *_: None)


async def probed(prober: Prober, *probes: Probe, until: int) -> None:
    """Run until `until` probes are compared or missed."""
    running = asyncio.create_task(prober.run())
    for one in probes:
        prober.take(one)
    try:
        async with asyncio.timeout(5):
            while prober.totals.versions + prober.totals.missed < until:
                await asyncio.sleep(0.01)
    finally:
        running.cancel()


def test_engine_and_trainer_are_compared_at_the_probe_s_version() -> None:
    prober = Prober(pool_of(FakeHandle("engine.0")), 0, 5.0, 1.0)
    asyncio.run(probed(prober, AGREEING, until=1))
    assert (prober.totals.tokens, prober.totals.versions, prober.totals.missed) == (3, 1, 0)
    assert prober.totals.last is not None
    assert (prober.totals.last.largest, prober.totals.last.divergence) == (0.0, 0.0)


def test_an_engine_with_other_weights_is_named(caplog: pytest.LogCaptureFixture) -> None:
    other = Probe(0, ((3, 1, 2),), ((0.0, -0.5, -5.0),))
    prober = Prober(pool_of(FakeHandle("engine.0")), 0, 5.0, 0.5)
    asyncio.run(probed(prober, other, until=1))
    found = prober.totals.last
    assert found is not None
    k3 = [math.exp(0.5) - 1 - 0.5, math.exp(-3.0) - 1 + 3.0]
    assert (found.largest, found.mean, found.divergence) == pytest.approx((3.0, 1.75, sum(k3) / 2))
    assert "engine.0 and trainer at version 0" in caplog.text
    assert "weights are not the trainer's" in caplog.text


def test_an_engine_that_has_loaded_other_weights_ends_the_run() -> None:
    """Each engine is asked; one that does not answer samples nothing."""
    handles = [FakeHandle(f"engine.{number}") for number in range(2)]
    pool = pool_of(*handles)
    prober = Prober(pool, 0, 5.0, 0.5)
    asyncio.run(prober.require(AGREEING))
    with pytest.raises(Disagreement, match=r"engine\.0 with what it has loaded, .* over 2 tokens, expected at most 0\.5"):
        asyncio.run(prober.require(Probe(0, ((3, 1, 2),), ((0.0, -0.5, -5.0),))))
    handles[0].client.failures.extend([EngineError] * 2)
    asyncio.run(prober.require(AGREEING))
    assert [member.fenced is None for member in pool.members] == [False, True]


def test_a_probe_waits_for_its_version_and_is_missed_when_the_next_is_served() -> None:
    async def run() -> None:
        handle = FakeHandle("engine.0")
        pool = pool_of(handle)
        prober = Prober(pool, 0, 5.0, None)
        running = asyncio.create_task(prober.run())
        prober.take(Probe(1, AGREEING.tokens, AGREEING.logprobs))
        await asyncio.sleep(0.2)
        assert prober.totals.versions == prober.totals.missed == 0
        pool.members[0].version = 1
        handle.client.version = 2  # a swap during the probe: the ledger follows
        await asyncio.sleep(0.2)
        assert (prober.totals.versions, prober.totals.missed) == (0, 1)
        pool.members[0].version = 2
        prober.take(Probe(1, AGREEING.tokens, AGREEING.logprobs))
        await asyncio.sleep(0.2)
        assert (prober.totals.versions, prober.totals.missed) == (0, 2)
        prober.take(Probe(2, AGREEING.tokens, AGREEING.logprobs))
        await asyncio.sleep(0.2)
        assert (prober.totals.versions, prober.totals.missed) == (1, 2)
        running.cancel()

    asyncio.run(run())


def test_an_engine_that_refuses_costs_its_probe_only() -> None:
    handle = FakeHandle("engine.0")
    handle.client.failures.append(EngineError)
    prober = Prober(pool_of(handle), 0, 5.0, None)
    asyncio.run(probed(prober, AGREEING, until=1))
    assert (prober.totals.versions, prober.totals.missed) == (0, 1)
    asyncio.run(probed(prober, AGREEING, until=2))
    assert (prober.totals.versions, prober.totals.missed) == (1, 1)


@pytest.mark.parametrize(
    "bad",
    [
        Probe(0, (), ()),
        Probe(0, ((1,),), ((0.0,),)),
        Probe(0, ((1, 2),), ((0.0,),)),
        Probe(0, ((1, 2),), ((0.0, math.nan),)),
        Probe(0, ((1,) * 70_000,), ((0.0,) * 70_000,)),
        Probe(0, ((1, 2),), ((0.0, -1.0), (0.0, -1.0))),
    ],
)
def test_a_malformed_probe_is_refused(bad: Probe) -> None:
    with pytest.raises(ProtocolError):
        check(bad)


@pytest.mark.parametrize(
    "bad",
    [
        Probe(-1, ((1, 2),), ((0.0, -1.0),)),
        Probe(0, ((1, -2),), ((0.0, -1.0),)),
        Probe(0, ((1, 2),) * (MAX_PROBED + 1), ()),
        Probe(0, (), ((0.0,) * (MAX_PROBED + 1),)),
    ],
)
def test_numbers_out_of_bounds_are_no_message(bad: Probe) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(bad), type=Probe)


def test_impossible_tokens_have_a_finite_divergence() -> None:
    for pair in (((0.0, -1e4), (0.0, -1.0)), ((0.0, -1.0), (0.0, -1e4))):
        assert math.isfinite(compare(0, "engine.0", [pair]).divergence)


def test_probe_tokens_come_from_many_groups_and_are_bounded() -> None:
    items = [describe(kept_trajectory.trajectory(length, n)[0]) for n, length in enumerate((200, 90, 300, 2))]
    chosen = probe.choose(items, 256)
    assert sum(one.tokens for one in chosen) == 256
    assert [one.tokens for one in chosen] == [128, 90, 38]
    assert probe.choose(items, 2) == (probe.Chosen(0, 2),)
    assert probe.choose([], 256) == ()
    assert sum(one.tokens for one in probe.choose(items, 10_000)) == 128 + 90 + 128 + 2


def test_a_version_in_ten_that_is_published_is_probed() -> None:
    given = ["warmup.steps=5", "sync.every=2", "queue.staleness.max_staleness=2", "verify.probe_every=10"]
    loaded = configuration.load(ROOT / "examples" / "demo.yaml", given)
    assert [step for step in range(50) if probe.due(loaded, step)] == [5, 25, 45]
    never = configuration.load(ROOT / "examples" / "demo.yaml", ["verify.probe_every=0"])
    assert not any(probe.due(never, step) for step in range(1000))


def answer(*entries: tuple[float | None, int], spans: int = 1) -> Scored:
    return Scored(ScoredMeta([(value, token, None) for value, token in entries], [VersionSpan("4", 0, 1)] * spans))


def test_sglang_s_answer_is_read_and_checked() -> None:
    found = scored("engine.0", (7, 8, 9), answer((None, 7), (-0.5, 8), (-1.5, 0)))  # the vocabulary's last id is reported as 0
    assert (found.logprobs, found.version) == ((0.0, -0.5, -1.5), "4")
    for bad in (
        answer((None, 7), (-0.5, 8)),
        answer((None, 7), (-0.5, 5), (-1.5, 9)),
        answer((None, 7), (None, 8), (-1.5, 9)),
        answer((None, 7), (math.nan, 8), (-1.5, 9)),
        answer((None, 7), (-0.5, 8), (-1.5, 9), spans=2),
    ):
        with pytest.raises(EngineError, match=r"^engine\.0"):
            scored("engine.0", (7, 8, 9), bad)
