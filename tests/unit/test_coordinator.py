"""Updates during which an engine dies; with real engines: tests/engine/test_weights.py and test_direct.py."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest

from asyncmoe.config.rollout import Interruption
from asyncmoe.engines.pool import Pool
from asyncmoe.engines.takeover import EngineWeights
from asyncmoe.engines.types import Sampling
from asyncmoe.errors import Disagreement, ProtocolError, WeightSyncError
from asyncmoe.rpc.messages import Committed, Engines, EnginesAsk, WeightsAbort, WeightsBegin, WeightsCommit, WeightsJoin, WeightsStage
from asyncmoe.weights.coordinator import turns
from asyncmoe.weights.sender.reshard import ReshardPublisher
from tests.unit.asynchronous import asynchronous
from tests.unit.fake_engine import FakeHandle, coordinator_of, fake, handles

HOW: tuple[Interruption, ...] = ("in_place", "retract")
"""In one call, or in a pause of several."""


async def publish(engines: int, dead: int, how: Interruption) -> tuple[Pool, list[int], Committed]:
    """Publish version 1; the processes of the last engines are found to have ended while the first one swaps it in, or ends its pause."""
    pool, published = Pool(handles(engines), 8, 5.0, lambda *_: None), list[int]()

    async def found(*_: Any) -> None:
        for member in pool.members[engines - dead :]:
            pool.fence(member, "the process ended")

    setattr(fake(pool.members[0].engine), "end_update" if how == "retract" else "command_receivers", found)
    coordinator = coordinator_of(pool, published, interruption=how)
    await coordinator.handle(WeightsStage(1))
    committed = await coordinator.handle(WeightsCommit(1, update=1))
    assert isinstance(committed, Committed)
    return pool, published, committed


@pytest.mark.parametrize("how", HOW)
@asynchronous
async def test_the_others_take_the_version(how: Interruption) -> None:
    pool, published, committed = await publish(engines=3, dead=1, how=how)
    assert len(committed.pause_ms) == 2
    assert [member.version for member in pool.members] == [1, 1, 0]
    assert [member.engine.name for member in pool.serving] == ["engine.0", "engine.1"]
    assert published == [1]


@asynchronous
async def test_after_a_failed_update_a_server_that_is_gone_is_fenced_and_one_that_hangs_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeHandle, "died", None)
    monkeypatch.setattr("asyncmoe.engines.pool._PROBE_S", 0.05)
    pool = Pool(handles(3), 8, 5.0, lambda *_: None)
    coordinator = coordinator_of(pool)

    async def ask(probe: bool) -> tuple[int, tuple[str, ...], bool]:
        found = await coordinator.handle(EnginesAsk(1.0, probe))
        assert isinstance(found, Engines)
        return found.roster, found.lost, found.silent

    asked = [await ask(False), await ask(True)]
    fake(pool.members[1].engine).dead = True
    asked += [await ask(False), await ask(True)]
    fake(pool.members[2].engine).hangs = True
    assert [*asked, await ask(True)] == [(1, (), False)] * 3 + [(2, ("engine.1",), False), (2, (), True)]


@asynchronous
async def test_an_update_that_is_being_committed_takes_no_other_end() -> None:
    pool, published = Pool(handles(2), 8, 5.0, lambda *_: None), list[int]()
    swapping, swapped = asyncio.Event(), asyncio.Event()

    async def swap(*_: Any) -> None:
        swapping.set()
        await swapped.wait()

    fake(pool.members[0].engine).command_receivers = swap  # type: ignore[method-assign]
    coordinator = coordinator_of(pool, published)
    await coordinator.handle(WeightsStage(1))
    committing = asyncio.create_task(coordinator.handle(WeightsCommit(1, update=1)))
    await swapping.wait()
    with pytest.raises(WeightSyncError, match="version 1 is being concluded already"):
        await coordinator.handle(WeightsAbort(1, "another rank failed"))
    again = asyncio.create_task(coordinator.handle(WeightsCommit(1, update=1)))
    older = WeightsStage(0)
    before = asyncio.create_task(coordinator.handle(older, lambda: turns.check(older, pool.version, 5)))
    await asyncio.sleep(0)
    swapped.set()
    with pytest.raises(WeightSyncError, match=r"version 1 is not open \(open: none\)"):
        await again
    with pytest.raises(ProtocolError, match="got version 0, expected 1 "):
        await before
    committed = await committing
    assert isinstance(committed, Committed)
    assert len(committed.pause_ms) == 2
    assert published == [1]


@pytest.mark.parametrize("call", ["command_receivers", "end_update", "resume"])
@asynchronous
async def test_one_that_hangs_in_its_pause_is_fenced_while_the_others_take_the_version(call: str) -> None:
    """All engines wait in the pause, and paused engines are not probed: the limit is that of a pause, not of an update."""
    pool, published = Pool(handles(2), 8, 5.0, lambda *_: None), list[int]()

    async def hang(*_: Any) -> None:
        await asyncio.sleep(3600.0)

    setattr(fake(pool.members[1].engine), call, hang)
    coordinator = coordinator_of(pool, published, 3600.0, interruption="retract", pause_s=0.2)
    await coordinator.handle(WeightsStage(1))
    await coordinator.handle(WeightsCommit(1, update=1))
    assert ([(m.engine.name, m.version) for m in pool.serving], published) == ([("engine.0", 1)], [1])
    assert str(pool.members[1].fenced).startswith("waited 0.2 s for engine.1: ")


@asynchronous
async def test_while_one_is_late_to_pause_the_others_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncmoe.weights.coordinator.driver.PATIENCE", 0.001)
    pool, waited, late = Pool(handles(2), 8, 5.0, lambda *_: None), asyncio.Event(), asyncio.Event()
    one, other = (fake(member.engine) for member in pool.members)
    pause = other.pause

    async def pause_late(retract: bool) -> None:
        waited.set()
        await late.wait()
        await pause(retract)

    other.pause = pause_late  # type: ignore[method-assign, assignment]
    beginning = asyncio.create_task(coordinator_of(pool, timeout_s=60.0).handle(WeightsBegin(1)))
    await waited.wait()
    await pool.generate((1,), Sampling(1.0, 1, ()))
    assert (one.paused, beginning.done()) == (False, False)
    late.set()
    await beginning
    assert (one.paused, other.paused, one.updating, other.updating, one.wrong + other.wrong) == (True, True, True, True, [])


@asynchronous
async def test_until_an_engine_serves_version_0_is_saved() -> None:
    """A controller that is lost in the first update leaves this to its successor."""
    pool, saved = Pool(handles(1), 8, 5.0, lambda *_: None), list[EngineWeights]()
    pool.members[0].waiting = True

    async def save(weights: EngineWeights) -> None:
        saved.append(weights)

    await coordinator_of(pool, note=save).handle(WeightsBegin(1))
    assert saved == [EngineWeights(changing="writing", coming=1)]


@pytest.mark.parametrize("how", HOW)
@asynchronous
async def test_a_version_that_no_engine_takes_is_not_published(how: Interruption) -> None:
    with pytest.raises(WeightSyncError, match="publishing version 1: no engine is left; the process ended"):
        await publish(engines=2, dead=2, how=how)


@asynchronous
async def test_a_roster_that_changes_while_receivers_start_does_not_concern_them() -> None:
    """A rank asks for the engines during another's request, just after an engine has ended."""
    ranks: list[int] = []
    pool = Pool(handles(2), 8, 5.0, lambda *_: None)
    coordinator = coordinator_of(pool)

    async def started(joins: Any, *_: Any) -> None:
        ranks.extend(join.rank for join in joins)
        pool.fence(pool.members[0], "it has ended")
        await coordinator.handle(EnginesAsk(0.0))

    for member in pool.members:
        fake(member.engine).command_receivers = started  # type: ignore[method-assign]
    await coordinator.handle(WeightsJoin("127.0.0.1", 1, "weights", "gloo", "reshard", 1))
    assert ranks == [1, 2]


@asynchronous
@pytest.mark.parametrize("kept", [False, True])
async def test_what_engines_have_loaded_is_compared_with_the_trainers_before_they_sample(kept: bool) -> None:
    """Those that join later too, if it stays under their adapters; one that is lost meanwhile ends nothing."""
    pool, expected = Pool(handles(3), 8, 5.0, lambda *_: None), ({"weight": "0", "other": "1"},)
    coordinator = coordinator_of(pool)
    with pytest.raises(Disagreement, match=r"engine\.0 has loaded other weights .* checksums differ: other of rank 0"):
        await coordinator.compare_loaded(expected, kept)
    fake(pool.members[1].engine).dead = True
    await coordinator.compare_loaded(({"weight": "0"},), kept)
    assert [member.fenced is None for member in pool.members] == [True, False, True]
    later = FakeHandle("engine.3")
    later.client.version = 1
    pool.join(later)
    await coordinator.handle(EnginesAsk(1.0))
    assert ("checksums differ: weight of rank 0" in str(pool.members[-1].fenced)) == kept


@pytest.mark.parametrize(("wrong", "error"), [(1, WeightSyncError), (2, Disagreement)])
@asynchronous
async def test_only_if_no_engine_has_the_trainers_weights_the_run_ends_at_once(wrong: int, error: type[Exception]) -> None:
    """Else the version is sent again to those that are left."""

    async def checksums(*_: Any) -> tuple[dict[str, str], ...]:
        return ({"weight": "other"},)

    pool, published = Pool(handles(2), 8, 5.0, lambda *_: None), list[int]()
    for member in pool.members[2 - wrong :]:
        fake(member.engine).checksums = checksums
    coordinator = coordinator_of(pool, published)
    await coordinator.handle(WeightsStage(1))
    with pytest.raises(error, match="checksums differ: weight of rank 0") as found:
        await coordinator.handle(WeightsCommit(1, ({"weight": "1"},), update=1))
    assert type(found.value) is error
    assert published == [1] * (2 - wrong)
    assert [member.fenced is not None for member in pool.members] == [wrong == 2, True]


@pytest.mark.parametrize(("failure", "attempts"), [(WeightSyncError("engine.0 is gone"), 2), (Disagreement("checksums differ"), 1)])
def test_weights_that_differ_are_not_sent_again(failure: Exception, attempts: int) -> None:
    sender = Mock(send=Mock(side_effect=[failure, 0.0]), needed_again=Mock(return_value=False), doubted=False)
    publisher = Mock(_together=Mock(return_value=sender))
    with nullcontext() if attempts > 1 else pytest.raises(Disagreement):
        ReshardPublisher._send(Mock(_publish=lambda *send: ReshardPublisher._publish(publisher, *send)), 1, ())
    assert sender.send.call_count == attempts
