"""A weight update: its phases, and the state of engines after the sender or an engine fails at any call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asyncmoe.config.rollout import Interruption
from asyncmoe.engines.member import Member
from asyncmoe.engines.pool import Pool
from asyncmoe.engines.types import EngineLost, Sampling
from asyncmoe.errors import AsyncmoeError, EngineError, InvariantBroken, TrajectoryRejected, WeightSyncError
from asyncmoe.rpc.messages import EnginesAsk, WeightsAbort, WeightsBegin, WeightsBucket, WeightsCommit, WeightsJoin, WeightsStage
from asyncmoe.weights.coordinator import state
from asyncmoe.weights.coordinator.coordinator import WeightsRequest, WeightUpdateCoordinator
from asyncmoe.weights.coordinator.driver import UpdateDriver
from asyncmoe.weights.coordinator.state import UpdateState
from tests.unit.example_counts import examples
from tests.unit.fake_engine import fake, handles

ARRIVING = state.claim(None, 3)
PAUSED = state.pause(ARRIVING)
LOADING = state.load(PAUSED)


@pytest.mark.parametrize("update", [ARRIVING, PAUSED, LOADING, state.load_bucket(LOADING)])
def test_what_each_phase_allows(update: UpdateState) -> None:
    assert state.expect(update, 3) is update
    assert update.gate_closed == (update != ARRIVING)
    concluding, staged = state.conclude(update), replace(update, staged=True)
    refused: list[Callable[[], object]] = [
        lambda: state.conclude(concluding),
        lambda: state.claim(concluding, 4),
        lambda: state.expect(update, 4),
        lambda: state.expect(None, 3),
        lambda: state.load_bucket(staged),
    ]
    if update.gate_closed:
        refused.append(lambda: state.claim(update, 4))
    else:
        assert state.claim(update, 4) == UpdateState(4)
    for act in refused:
        with pytest.raises(WeightSyncError, match="version"):
            act()
    with pytest.raises(InvariantBroken, match="its engines are"):
        (state.pause if update.gate_closed else state.load)(update)


REQUESTS = st.sampled_from(["broadcast", "reshard", "in place", "receivers", "abort", "silence", "ask"])
FAILURES = st.lists(st.sampled_from([None, None, None, None, EngineError, EngineLost]), max_size=24)
CHECKSUMS = ({"weight": "wrong"},)


def requests(kind: str, version: int, wrong: bool) -> list[WeightsRequest]:
    """The requests of a sender to publish or abort a version."""
    checksums = CHECKSUMS if wrong else ()
    bucket = WeightsBucket(version, ("w",), ("float32",), ((1,),))
    commit = WeightsCommit(version, checksums, update=1)
    match kind:
        case "broadcast":
            return [WeightsBegin(version), bucket, bucket, commit]
        case "reshard" | "in place":
            return [WeightsStage(version, in_place=kind == "in place"), commit]
        case "receivers":
            return [WeightsJoin("h", 1, "g", "gloo", method="reshard", senders=1)]
        case "abort":
            return [WeightsBegin(version), *([bucket] if wrong else []), WeightsAbort(version, "out of memory")]
        case "silence":
            return [WeightsBegin(version), *([bucket] if wrong else [])]
    return [EnginesAsk(1.0)]


@settings(max_examples=examples(150), deadline=None)
@given(
    kinds=st.lists(st.tuples(REQUESTS, st.booleans()), min_size=1, max_size=4),
    failures=st.lists(FAILURES, min_size=1, max_size=3),
    how=st.sampled_from(["in_place", "retract", "abort_resume", "abort_retry"]),
)
@example(kinds=[("reshard", False)], failures=[[], [None, None, EngineError]], how="in_place").via("one of two engines refuses to swap")
def test_whatever_fails_no_engine_serves_part_of_a_version(
    kinds: list[tuple[str, bool]], failures: list[list[type[EngineError] | None]], how: Interruption
) -> None:
    asyncio.run(play(kinds, failures, how))


async def play(kinds: list[tuple[str, bool]], failures: list[list[type[EngineError] | None]], how: Interruption) -> None:
    engines, published = handles(len(failures)), [0]
    for engine, results in zip(engines, failures, strict=True):
        fake(engine).failures.extend(results)
    pool = Pool(engines, 8, 5.0, lambda *_: None)

    async def publish(version: int) -> None:
        assert all(member.version == version for member in pool.present), "published before every engine serves it"
        published.append(version)

    coordinator = WeightUpdateCoordinator(UpdateDriver(pool, 5.0, lambda *_: None, how), publish)
    coordinator.engines_started()

    async def fall_silent() -> None:
        coordinator._fell_silent()
        if coordinator._ending is not None:
            await coordinator._ending

    asking = [asyncio.create_task(generate(pool)) for _ in range(2)]
    for version, (kind, wrong) in enumerate(kinds, 1):
        with suppress(AsyncmoeError):
            for request in requests(kind, version, wrong):
                await coordinator.handle(request)
        if kind == "silence":
            await fall_silent()
    await fall_silent()
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    assert [fake(engine).wrong for engine in engines] == [[]] * len(engines)
    for member in pool.present:
        check(member, published[-1])
    assert pool._gate._open.is_set(), "requests would wait for ever"
    if pool.serving:
        await asyncio.wait_for(pool.generate((1,), Sampling(1.0, 1, ())), 1.0)


async def generate(pool: Pool) -> None:
    """Ask for one response after another."""
    while True:
        await asyncio.sleep(0)
        with suppress(AsyncmoeError, TrajectoryRejected):
            await pool.generate((1,), Sampling(1.0, 3, ()))


def check(member: Member, version: int) -> None:
    engine = fake(member.engine)
    assert (engine.paused, engine.partial, engine.updating) == (False, False, False), "left behind"
    assert (engine.version, member.version) == (version, version), "the ledger says what it serves"
