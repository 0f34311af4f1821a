"""Weights of an engine that somebody else wrote are found before the next version hides them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from fake_engine import FakeEngine, fake, handles

from asyncmoe.errors import EngineError
from asyncmoe.rollout.engines.pool import Pool
from asyncmoe.rollout.engines.weight_updates.coordinator import WeightUpdateCoordinator
from asyncmoe.rollout.engines.weight_updates.spot_check import SpotCheck
from asyncmoe.rpc.messages import Committed, WeightsBegin, WeightsBucket, WeightsCommit, WeightsStage


class Written(FakeEngine):
    """An engine with bytes that its checksum is of."""

    weights = b"ours"

    async def checksums(self, timeout_s: float) -> tuple[dict[str, str], ...]:
        await self._called()
        return ({"weight": f"{self.version} {self.weights!r}"},)


def published(count: int, every: int, between: Callable[[list[FakeEngine], int], None], versions: int = 4) -> tuple[Pool, SpotCheck]:
    """Publish versions in turn to `count` engines, with `between` after each; return what is left."""

    async def run() -> tuple[Pool, SpotCheck]:
        made = handles(count)
        for handle in made:
            handle.client = Written(handle.name)  # type: ignore[misc, attr-defined]
        pool = Pool(made, 8, 5.0, lambda *_: None)
        spot = SpotCheck(pool, every, 1, 5.0)

        async def nothing(version: int) -> None:
            pass

        coordinator = WeightUpdateCoordinator(pool, 5.0, nothing, lambda *_: None, spot=spot)
        for version in range(1, versions + 1):
            staged = version % 2 == 0
            for request in (WeightsStage(version),) if staged else (WeightsBegin(version), WeightsBucket(version, (), (), ())):
                await coordinator.handle(request)
            found = await coordinator.handle(WeightsCommit(version))
            assert isinstance(found, Committed)
            await asyncio.sleep(0.01)
            between([fake(handle) for handle in made], version)
            await asyncio.sleep(0.01)
        await spot.end()
        return pool, spot

    return asyncio.run(asyncio.wait_for(run(), 20))


def test_versions_that_nobody_touches_pass() -> None:
    pool, spot = published(2, 2, lambda engines, version: None)
    assert (spot.passed, [member.fenced for member in pool.members]) == (2, [None, None])


@pytest.mark.parametrize("version", [1, 2])
def test_a_foreign_write_is_found_and_its_engine_fenced(version: int, caplog: pytest.LogCaptureFixture) -> None:
    """Version 1 comes in a bucket, 2 through the receivers, and the next, which would hide the write, the other way."""

    def write(engines: list[FakeEngine], at: int) -> None:
        if at == version:
            for engine in engines[:1]:
                engine.weights = b"theirs"  # type: ignore[attr-defined]

    found = published(1, 1, lambda engines, at: None, version)[1]
    assert found.passed == version
    with pytest.raises(Exception, match=r"no engine is left|is gone"):
        published(1, 1, write, version + 1)
    assert f"engine.0: somebody else wrote its weights while it served version {version}: checksums differ: weight of rank 0" in caplog.text


def test_an_engine_that_does_not_answer_the_check_is_not_accused() -> None:
    def refuse(engines: list[FakeEngine], at: int) -> None:
        if at == 1:
            engines[0].failures.append(EngineError)

    pool, spot = published(1, 1, refuse, 2)
    assert (spot.passed, pool.members[0].fenced) == (1, None)


def test_checks_are_rare_and_may_be_off() -> None:
    assert published(2, 3, lambda engines, version: None, 7)[1].passed == 2
    assert published(2, 0, lambda engines, version: None, 3)[1].passed == 0
