"""New weights reach a real engine while it generates, and their effect is known for every token."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncmoe.engines.pool import PooledGeneration
from asyncmoe.errors import EngineError
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId, Turn, assemble
from asyncmoe.rpc.messages import WeightsAbort, WeightsCommit
from asyncmoe.trajectory import Recording, Trajectory
from tests.engine.conftest import PROMPT, Rig, difference, ended, family
from tests.engine.oracle import Oracle, with_others

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def checkpoints(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Oracle]:
    return with_others(Oracle(model), tmp_path_factory.mktemp("checkpoints"))


def next_version(rig: Rig) -> int:
    return rig.pool.version + 1


def record(answer: PooledGeneration) -> Trajectory:
    return assemble([Turn(PROMPT, answer.generation, answer.salt)], EpisodeId(0, 0, 0), Recording(), 0.0, {})


async def load_from_disk(rig: Rig, path: Path) -> dict[str, str]:
    """Checksums after SGLang's own loader has read a checkpoint into the running engine."""
    body: dict[str, Any] = {"model_path": str(path), "flush_cache": True}
    await rig.engine.client._post("/update_weights_from_disk", body, msgspec.Raw)
    return (await rig.engine.client.checksums(30.0))[0]


def test_what_arrives_is_what_sglangs_own_loader_would_have_read(rig: Rig, checkpoints: list[Oracle]) -> None:
    before, sent = checkpoints[:2]
    version = next_version(rig)
    committed = rig.run(rig.sender.publish(version, sent.weights, rig.expected(sent)))
    arrived = rig.run(rig.engine.client.checksums(30.0))[0]
    old = rig.run(load_from_disk(rig, before.path))
    assert rig.run(load_from_disk(rig, sent.path)) == arrived
    assert all(arrived[name] != old[name] for name in arrived)
    assert version == rig.pool.version == rig.published[-1]
    name, begin, end = rig.pauses[-1]
    assert name == "engine.0"
    assert 1e3 * (end - begin) == pytest.approx(committed.pause_ms[0])
    assert 0 < committed.pause_ms[0] < 10_000


def test_keys_and_values_of_another_version_are_never_used(rig: Rig, checkpoints: list[Oracle]) -> None:
    _, old, new = checkpoints
    rig.run(rig.sender.publish(next_version(rig), old.weights))
    rig.run(rig.generate())
    assert rig.run(rig.generate()).generation.cached_tokens > 0
    rig.run(rig.sender.publish(next_version(rig), new.weights))
    answer = rig.run(rig.generate())
    assert answer.generation.cached_tokens == 0
    assert difference(answer, new) < 1e-4
    assert record(answer).is_pure


def test_a_request_during_an_update_waits_for_the_new_version(rig: Rig, checkpoints: list[Oracle]) -> None:
    version = next_version(rig)

    async def during() -> PooledGeneration:
        await rig.sender.begin(version)
        asking = asyncio.create_task(rig.generate())
        await asyncio.sleep(0.3)
        assert not asking.done()
        assert rig.pool.members[0].in_flight == 0
        names = list(checkpoints[1].weights)
        await rig.sender.bucket(version, checkpoints[1].weights, names)
        await rig.coordinator.handle(WeightsCommit(version))
        return await asking

    answer = rig.run(during())
    assert answer.salt == version
    assert record(answer).is_pure
    assert difference(answer, checkpoints[1]) < 1e-4


def test_a_sender_that_fails_before_the_first_bucket_costs_nothing(rig: Rig, checkpoints: list[Oracle]) -> None:
    version = rig.pool.version

    async def give_up() -> PooledGeneration:
        asking = asyncio.create_task(rig.generate(400))
        await asyncio.sleep(0.2)
        await rig.sender.begin(version + 1)
        await rig.coordinator.handle(WeightsAbort(version + 1, "out of memory"))
        return await asking

    assert [span.version for span in rig.run(give_up()).generation.spans] == [str(version)]
    assert rig.pool.version == version
    assert difference(rig.run(rig.generate()), checkpoints[1]) < 1e-4
    rig.run(rig.sender.publish(version + 1, checkpoints[1].weights))


def test_a_sender_that_fails_after_a_bucket_leaves_no_mixed_engine(rig: Rig, checkpoints: list[Oracle]) -> None:
    """Must be the last test: it ends the shared engine."""
    version, server = next_version(rig), family(rig.engine)
    names = list(checkpoints[2].weights)[:3]

    async def fail() -> None:
        await rig.sender.begin(version)
        await rig.sender.bucket(version, checkpoints[2].weights, names)
        await rig.coordinator.handle(WeightsAbort(version, "the trainer lost a rank"))

    rig.run(fail())
    assert ended(server), "the fenced engine's processes are killed without a wait"
    with pytest.raises(EngineError, match=f"it may hold part of version {version}: the sender failed: the trainer lost a rank"):
        rig.run(rig.generate())
