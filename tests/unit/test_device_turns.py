"""The controller's end of devices in turn, with engines that answer at once."""

from __future__ import annotations

import asyncio

import pytest

from asyncmoe.engines.pool import Pool
from asyncmoe.occupancy import DeviceTurn, Event
from asyncmoe.weights.coordinator.device_turns import EngineTurns
from asyncmoe.weights.coordinator.driver import UpdateDriver
from tests.unit.fake_engine import fake, handles


def test_an_engine_that_woke_with_weights_nobody_wrote_is_fenced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    async def poisoned(timeout_s: float) -> tuple[dict[str, str], ...]:
        return {}, {"layer.w_kc": "7 of 7"}

    async def play() -> None:
        pool = Pool(handles(2), 8, 5.0, lambda *_: None)
        turns = EngineTurns(UpdateDriver(pool, 5.0, lambda *_: None), 5.0)
        for member in pool.members:
            member.compared = True
        for turn in (DeviceTurn.TRAINING, DeviceTurn.WAKING):
            await turns.wait_for(turn, Event.STARTED if turn is DeviceTurn.TRAINING else None)
        assert not any(member.compared for member in pool.members), "each wake may lose weights that no update writes"
        monkeypatch.setattr(fake(pool.members[1].engine), "poisoned", poisoned)
        await turns.wait_for(DeviceTurn.GENERATING)
        assert pool.members[0].fenced is None
        assert "layer.w_kc of rank 1 (7 of 7)" in str(pool.members[1].fenced)

    asyncio.run(play())
