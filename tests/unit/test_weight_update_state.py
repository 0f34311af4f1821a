"""An update of weights: its phases, and what it makes of engines when the sender or any of them fails at any call."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asyncmoe.config.rollout import Interruption
from asyncmoe.engines.member import Member
from asyncmoe.engines.pool import Pool
from asyncmoe.engines.types import EngineLost, Sampling
from asyncmoe.errors import AsyncmoeError, EngineError, TrajectoryRejected, WeightSyncError
from asyncmoe.rpc.messages import EnginesAsk, WeightsAbort, WeightsBegin, WeightsBucket, WeightsCommit, WeightsJoin, WeightsStage
from asyncmoe.weights.coordinator import state
from asyncmoe.weights.coordinator.coordinator import WeightsRequest, WeightUpdateCoordinator
from asyncmoe.weights.coordinator.state import Ending, UpdateState
from tests.unit.example_counts import examples
from tests.unit.fake_engine import fake, handles


class Phases(RuleBasedStateMachine):
    """Every order of transitions; what the update has been through is remembered beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.update: UpdateState | None = None
        self.paused = self.loaded = False
        self.version = 0

    @rule(staged=st.booleans())
    def claim(self, staged: bool) -> None:
        self.version += 1
        if self.paused:
            with pytest.raises(WeightSyncError, match=f"cannot begin version {self.version}: version .* is still open"):
                state.claim(self.update, self.version, staged)
            return
        self.update = state.claim(self.update, self.version, staged)
        self.loaded = False

    @precondition(lambda self: self.update is not None and not self.paused)
    @rule()
    def pause(self) -> None:
        self.update, self.paused = state.pause(self.update), True

    @precondition(lambda self: self.paused)
    @rule()
    def load(self) -> None:
        self.update, self.loaded = state.load(self.update), True

    @precondition(lambda self: self.paused)
    @rule()
    def load_bucket(self) -> None:
        if self.update.staged:
            with pytest.raises(WeightSyncError, match="it takes no buckets"):
                state.load_bucket(self.update)
            return
        self.update, self.loaded = state.load_bucket(self.update), True

    @precondition(lambda self: self.update is not None)
    @rule()
    def end(self) -> None:
        concluding = state.conclude(self.update)
        with pytest.raises(WeightSyncError, match="is being concluded already"):
            state.conclude(concluding)
        with pytest.raises(WeightSyncError, match="is still open"):
            state.claim(concluding, self.version + 1)
        expected = Ending.FENCE if self.loaded else Ending.RESUME if self.paused else Ending.DROP
        assert state.ending(self.update) is expected
        self.update, self.paused, self.loaded = None, False, False

    @precondition(lambda self: self.update is not None)
    @rule(pausing=st.booleans())
    def refuse(self, pausing: bool) -> None:
        if pausing == self.paused:
            with pytest.raises(AsyncmoeError, match="its engines are"):
                (state.pause if pausing else state.load)(self.update)

    @rule()
    def expect(self) -> None:
        with pytest.raises(WeightSyncError, match=r"is not open \(open: (none|version)"):
            state.expect(self.update, self.version + 1)
        if self.update is not None:
            assert state.expect(self.update, self.update.version) is self.update

    @invariant()
    def the_gate_is_closed_while_engines_pause(self) -> None:
        assert (self.update is not None and self.update.gate_closed) == self.paused


TestPhases = Phases.TestCase
TestPhases.settings = settings(max_examples=examples(100), stateful_step_count=20, deadline=None)

REQUESTS = st.sampled_from(["broadcast", "reshard", "in place", "receivers", "abort", "silence", "ask"])
FAILURES = st.lists(st.sampled_from([None, None, None, None, EngineError, EngineLost]), max_size=24)
CHECKSUMS = ({"weight": "wrong"},)


def requests(kind: str, version: int, wrong: bool) -> list[WeightsRequest]:
    """What a sender asks to publish a version, or instead of it."""
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

    coordinator = WeightUpdateCoordinator(pool, 5.0, publish, lambda *_: None, how)
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
