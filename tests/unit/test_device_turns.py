"""Both ends of devices in turn, with engines and ranks that fail on the way; whole runs are in tests/system/test_colocated.py."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from asyncmoe.engines import engine_stay
from asyncmoe.engines.membership import RemoteEngine
from asyncmoe.engines.pool import Pool
from asyncmoe.errors import WaitTimeout
from asyncmoe.occupancy import TRAINER, DeviceTurn, Event
from asyncmoe.rpc.messages import Done, EngineJoin, EngineStarts, TurnAwaited, TurnTaken
from asyncmoe.trainer import device_turns as trainers
from asyncmoe.trainer.device_turns import TrainerTurns
from asyncmoe.weights.coordinator import device_turns
from asyncmoe.weights.coordinator.device_turns import EngineTurns
from asyncmoe.weights.coordinator.driver import UpdateDriver
from tests.configs import demo
from tests.unit.asynchronous import asynchronous
from tests.unit.fake_engine import fake, handles

LIMIT_S = 0.1


def turns_of(engines: int) -> tuple[EngineTurns, Pool]:
    pool = Pool(handles(engines), 8, 5.0, lambda *_: None)
    return EngineTurns(UpdateDriver(pool, LIMIT_S, lambda *_: None, "abort_resume"), LIMIT_S), pool


async def hang(*_: Any) -> None:
    raise WaitTimeout("engine.1", "/resume_memory_occupation", LIMIT_S)


def fenced(pool: Pool) -> dict[str, str]:
    return {member.engine.name: member.fenced for member in pool.members if member.fenced is not None}


@pytest.mark.parametrize(("call", "state"), [("release_memory", DeviceTurn.ASLEEP), ("resume_memory", DeviceTurn.WAKING)])
@asynchronous
async def test_an_engine_that_keeps_or_does_not_take_its_memory_is_fenced_and_the_state_named(call: str, state: DeviceTurn) -> None:
    turns, pool = turns_of(2)
    setattr(fake(pool.members[1].engine), call, hang)
    await turns.wait_for(DeviceTurn.TRAINING)
    await turns.wait_for(DeviceTurn.WAKING)
    assert fenced(pool) == {"engine.1": f"{state.value}: {WaitTimeout('engine.1', '/resume_memory_occupation', LIMIT_S)}"}


@asynchronous
async def test_what_engines_do_is_told_by_part() -> None:
    turns, _ = turns_of(1)
    parts = [(await turns.wait_for(turn)).keys() for turn in (DeviceTurn.TRAINING, DeviceTurn.WAKING, DeviceTurn.GENERATING)]
    assert parts == [{"engines_drain", "engines_out"}, {"engines_in"}, {"engines_in"}]


@asynchronous
async def test_an_engine_that_does_not_end_its_responses_is_fenced() -> None:
    turns, pool = turns_of(2)
    pool.members[1].entered()
    await turns.wait_for(DeviceTurn.TRAINING)
    assert [*fenced(pool)] == ["engine.1"]
    assert "draining" in fenced(pool)["engine.1"]


@asynchronous
async def test_the_turn_passes_on_only_once_a_fenced_engine_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, pool = turns_of(2)
    lost: Any = pool.members[1].engine
    lost.pid, looked = 7, list[DeviceTurn]()
    pool.fence(pool.members[1], "it hangs")
    monkeypatch.setattr(device_turns, "lives", lambda pid: pid == 7)
    with pytest.raises(WaitTimeout, match=r"engine\.1"):
        await turns.wait_for(DeviceTurn.TRAINING)

    def lives(pid: int) -> bool:
        looked.append(turns.turn)
        return len(looked) < 3

    monkeypatch.setattr(device_turns, "lives", lives)
    await turns.wait_for(DeviceTurn.TRAINING)
    assert DeviceTurn.TRAINING not in looked[:3]
    assert turns.turn is DeviceTurn.TRAINING


@asynchronous
async def test_without_engines_the_run_waits_for_one_as_long_as_none_may_start(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, pool = turns_of(1)
    await turns.wait_for(DeviceTurn.TRAINING)
    now = [0.0]
    monkeypatch.setattr("asyncmoe.engines.pool.time", Mock(monotonic=lambda: now[0]))
    pool.returns = lambda alone_s: alone_s < LIMIT_S
    pool.fence(pool.members[0], "it is lost")
    assert pool.awaited
    now[0] += 2 * LIMIT_S
    assert pool.awaited
    pool.asleep = False
    now[0] += 2 * LIMIT_S
    assert not pool.awaited


@asynchronous
async def test_an_engine_waits_to_start_as_long_as_the_trainer_works_and_then_no_turn_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, _ = turns_of(1)
    await turns.wait_for(DeviceTurn.TRAINING)
    asked = list[EngineStarts]()

    async def ask(request: EngineStarts, _: float) -> tuple[TurnTaken | Done, list[Any]]:
        asked.append(request)
        if len(asked) == 3:
            turns.turn = DeviceTurn.ASLEEP
        return TurnTaken({}) if await turns.may_start(request.name, 0.0) else Done(), []

    monkeypatch.setattr(engine_stay, "AsyncClient", Mock(return_value=Mock(ask=ask)))
    monkeypatch.setattr(engine_stay, "controller", AsyncMock())
    assert await engine_stay.may_start(demo(), "engine.1")
    assert len(asked) == 3
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(turns.wait_for(DeviceTurn.TRAINING), LIMIT_S)


@asynchronous
async def test_a_fenced_engine_whose_memory_is_needed_is_killed_at_once_and_no_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started, killed = {7: 1, 8: 1}, list[int]()
    monkeypatch.setattr("asyncmoe.telemetry.processes.started", started.get)
    monkeypatch.setattr("os.killpg", lambda pid, _: killed.append(pid))
    engines = [RemoteEngine(EngineJoin("engine.0", "http://127.0.0.1:1", "k", "h", 1, 1, "", pid=pid), 30.0, None) for pid in started]
    started[8] = 2
    for engine in engines:
        engine.kill("it hangs")
        assert "it hangs" in (await engine.ask(0.0)).why
    assert killed == [7]


def test_a_trainer_whose_weights_no_engine_took_gives_them_up_before_it_trains_on_or_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    happened = list[Any]()

    def ask(asked: TurnAwaited, _: float) -> tuple[TurnTaken, list[Any]]:
        happened.append(asked)
        return TurnTaken({"engines_in": 2.0}), []

    monkeypatch.setattr(trainers, "keys", Mock())
    monkeypatch.setattr(trainers, "Client", Mock(return_value=Mock(ask=ask)))
    monkeypatch.setattr(trainers, "collectives", Mock(everyones=lambda mine: [mine]))
    turns = TrainerTurns(demo(), Mock(rank=0))
    turns.wait_for(DeviceTurn.WAKING)
    turns.sleeper = Mock(hold=happened.append)
    turns.wait_for(DeviceTurn.TRAINING)
    assert happened[1:] == [set(), TurnAwaited(DeviceTurn.TRAINING, Event.YIELDED), TRAINER]
    seconds = turns.seconds()
    assert seconds.keys() == {"trainer_out", "engines_in", "trainer_in"}
    assert seconds["engines_in"] == 4.0, "of both turns"
    assert turns.seconds() == {}


@asynchronous
async def test_an_engine_that_woke_with_weights_nobody_wrote_is_fenced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    async def poisoned(timeout_s: float) -> tuple[dict[str, str], ...]:
        return {}, {"layer.w_kc": "7 of 7"}

    turns, pool = turns_of(2)
    for member in pool.members:
        member.compared = True
    await turns.wait_for(DeviceTurn.TRAINING, Event.STARTED)
    await turns.wait_for(DeviceTurn.WAKING)
    assert not any(member.compared for member in pool.members), "each wake may lose weights that no update writes"
    monkeypatch.setattr(fake(pool.members[1].engine), "poisoned", poisoned)
    await turns.wait_for(DeviceTurn.GENERATING)
    assert "layer.w_kc of rank 1 (7 of 7)" in fenced(pool)["engine.1"]
    assert [*fenced(pool)] == ["engine.1"]
