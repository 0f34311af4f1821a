"""A system's clock that jumps changes what no run decides, and no duration that a process records."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from asyncmoe.engines.pool import Pool
from asyncmoe.engines.types import Sampling
from asyncmoe.queue.accounts import QueueStats
from asyncmoe.rollout.recorder import Recorder
from asyncmoe.rpc.messages import Committed, WeightsCommit, WeightsStage
from asyncmoe.telemetry.records import Tail
from asyncmoe.telemetry.rollout_schema import Rollout
from asyncmoe.telemetry.schema import CONTROLLER_SPANS, ROLLOUT, Span
from asyncmoe.weights.coordinator.coordinator import WeightUpdateCoordinator
from tests.unit.fake_engine import handles


@pytest.fixture
def jumping(monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour back at every look."""
    times = iter(range(2 * 10**9, 0, -3600))
    monkeypatch.setattr("time.time", lambda: float(next(times)))


@pytest.mark.usefixtures("jumping")
def test_durations_and_rates_do_not_jump(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)

    async def run() -> Committed:
        pool = Pool(handles(2), 8, 5.0, recorder.generated)

        async def published(_: int) -> None:
            recorder.write(QueueStats(0, 0, 0, 0, 0, 0, 0, {}, {}, {}, 0), ["engine.0", "engine.1"], pool)

        coordinator = WeightUpdateCoordinator(pool, 5.0, published, recorder.paused)
        await asyncio.gather(*(pool.generate((1,), Sampling(1.0, 50, ())) for _ in range(4)))
        await coordinator.handle(WeightsStage(1))
        committed = await coordinator.handle(WeightsCommit(1, update=1))
        assert isinstance(committed, Committed)
        return committed

    assert all(0.0 <= pause < 5e3 for pause in asyncio.run(run()).pause_ms)
    recorder.close()
    (record,) = Tail(tmp_path / ROLLOUT).poll_as(Rollout)
    assert record.tokens_per_s is not None
    assert 0.0 < record.tokens_per_s < 1e6
    assert all(0.0 < share <= 1.0 for share in record.engine_utilization.values())
    assert all(0.0 <= span.end - span.begin < 5.0 for span in Tail(tmp_path / CONTROLLER_SPANS).poll_as(Span))
