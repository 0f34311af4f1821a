"""Weights reach real engines as files: written by real Megatron ranks, read by SGLang's workers while those generate."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncmoe.rollout.engines.sglang.process import SGLangProcess
from asyncmoe.rpc.messages import WeightsStage
from asyncmoe.version_store import Folder, VersionId, VersionStore, of_run
from tests.disks import mounted
from tests.engine.conftest import Rig, make, settings
from tests.engine.oracle import Oracle, perturbed
from tests.engine.test_direct import Stage, difference, generate, wrong

pytestmark = [pytest.mark.engine, pytest.mark.ranks]


@pytest.fixture(scope="module")
def stage(model: Path, runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """An engine of two ranks."""
    folder = tmp_path_factory.mktemp("stored")
    first = Oracle(model)
    config = settings(model, folder / "run", max_total_tokens=8192, tp=2)

    async def start() -> Rig:
        rig = await make(config, [SGLangProcess("engine.0", config, 0, config.run.dir)], runner.run)
        await rig.engine.wait_ready()
        rig.coordinator.engines_started()
        return rig

    rig = runner.run(start())
    try:
        checkpoints = [first, perturbed(first, folder / "a", 1), perturbed(first, folder / "b", 2)]
        yield Stage(rig, checkpoints, folder, runner.run(rig.engine.client.checksums(30.0)))
    finally:
        runner.run(rig.engine.stop())


def through(stage: Stage, **more: Any) -> dict[str, Any]:
    return {"method": "store", "store": {"url": str(stage.folder / "versions"), "keep": 2}, **more}


def test_every_parameter_is_what_sglangs_loader_makes_of_the_checkpoint(stage: Stage) -> None:
    _, a, b = stage.checkpoints
    several = list(zip((a, b, a), stage.versions(3), strict=True))
    found = stage.rig.run(stage.publish(2, {"tp=2": several}, sync=through(stage)))
    assert not found.failed, found.failed
    assert [outcome["error"] for outcome in found.outcomes[0]] == [None] * 3
    assert list(found.arrived) == [version for _, version in several]
    want = {oracle: stage.expected(oracle) for oracle in (a, b)}
    assert not any(names for oracle, version in several for names in wrong(found.arrived[version], want[oracle]))
    assert want[a] != want[b]
    assert difference(stage.rig.run(generate(stage)), a) < 1e-4
    store = VersionStore(Folder(stage.folder / "versions"), of_run.run_of(stage.rig.config.run.dir))
    newest = store.newest()
    assert newest is not None
    assert newest.version == VersionId(0, several[-1][1])
    assert all(len(rank) > 0 for rank in newest.ranks), "both ranks wrote a part"
    print(f"pauses {[round(outcome['pause_ms']) for outcome in found.outcomes[0]]} ms, {newest.nbytes} bytes")


def test_deltas_end_at_the_same_parameters(stage: Stage, tmp_path: Path) -> None:
    """The engine reads what changed since the version it serves; of another trainer, which begins with everything, whole weights."""
    a = stage.checkpoints[1]
    few = [perturbed(a, tmp_path / "few1", 3, share=0.01)]
    few += [perturbed(few[0], tmp_path / "few2", 4, share=0.02)]
    several = list(zip((a, *few, a, few[0], few[0]), stage.versions(6), strict=True))
    sync = through(stage, delta="auto", verify_every=1)
    found = stage.rig.run(stage.publish(2, {"tp=2": several[:3], "pp=2": several[3:]}, sync=sync))
    assert not found.failed, found.failed
    assert [outcome["error"] for outcome in found.outcomes[0]] == [None] * 6
    want = {oracle: stage.expected(oracle) for oracle in (a, *few)}
    assert not any(names for oracle, version in several for names in wrong(found.arrived[version], want[oracle]))
    assert difference(stage.rig.run(generate(stage)), few[0]) < 1e-4
    (whole, _), (first, sparse), (second, _), again, (third, _), last = [outcome["traffic"] for outcome in found.outcomes[0]]
    assert again == [whole, None]
    assert 0.008 < sparse < 0.012
    assert last == [0, 0.0], "nothing changed, nothing is written"
    assert max(first, third) < whole / 8
    assert second < whole / 4
    store = VersionStore(Folder(stage.folder / "versions"), of_run.run_of(stage.rig.config.run.dir))
    newest = store.newest()
    assert newest is not None
    assert any(one.deltas for rank in newest.ranks for one in rank)
    print(f"of {whole} bytes {first} at 1 %, pauses {[round(outcome['pause_ms']) for outcome in found.outcomes[0]]} ms")


@pytest.mark.thorough
def test_a_damaged_version_costs_one_update_and_nothing_of_it_is_served(stage: Stage) -> None:
    """An object that is altered once it is there: the engine goes on with what it has, and the next version arrives."""
    _, a, b = stage.checkpoints
    kept, lost, again = stage.versions(3)
    folder = stage.folder / "versions" / "objects"

    async def spoil() -> Any:
        publishing = asyncio.create_task(stage.publish(1, {"tp=1": [(a, kept), (b, lost), (a, again)]}, sync=through(stage)))
        before: set[Path] = set()
        while stage.rig.pool.version < kept:
            before = set(folder.rglob("*"))
            await asyncio.sleep(0.001)
        before = set(folder.rglob("*"))
        while not (new := [path for path in folder.rglob("*") if path not in before and path.is_file() and path.name[0] != "."]):
            await asyncio.sleep(0)
        path = max(new, key=lambda one: one.stat().st_size)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        return await publishing

    found = stage.rig.run(spoil())
    assert not found.failed, found.failed
    fine, damaged, last = [outcome["error"] for outcome in found.outcomes[0]]
    assert fine is None
    assert "expected the object as it was written (engine.0 rank" in damaged
    assert "\n" not in damaged
    assert last is None
    assert sorted(found.arrived) == [kept, again]
    assert not any(wrong(found.arrived[again], stage.expected(a)))


@pytest.mark.thorough
@pytest.mark.parametrize("delta", ["off", "auto"])
def test_a_killed_writer_leaves_the_engine_with_the_version_it_serves(stage: Stage, tmp_path: Path, delta: str) -> None:
    """kill -9 of a rank with a part of the version written: it does not exist, and the next trainer goes on."""
    _, a, b = stage.checkpoints
    kept, lost, again = stage.versions(3)
    half = perturbed(a, tmp_path / "few", 3, share=0.01)
    sync = through(stage, delta=delta)
    found = stage.rig.run(stage.publish(2, {"tp=2": [(a, kept), (half, lost)]}, {1: (1, "killed")}, sync=sync))
    assert found.failed
    assert list(found.arrived) == [kept]
    store = VersionStore(Folder(stage.folder / "versions"), of_run.run_of(stage.rig.config.run.dir))
    assert store.versions()[-1] == VersionId(0, kept)
    assert not any(wrong(stage.held(), stage.expected(a)))
    assert [span.version for span in stage.rig.run(generate(stage)).generation.spans] == [str(kept)]
    found = stage.rig.run(stage.publish(2, {"tp=2": [(b, again)]}, sync=sync))
    assert not found.failed, found.failed
    assert not any(wrong(stage.held(), stage.expected(b)))


@pytest.mark.thorough
def test_a_full_store_says_the_same_on_every_rank(stage: Stage, tmp_path: Path) -> None:
    _, a, _ = stage.checkpoints
    held = stage.held()
    with mounted(tmp_path / "small", "1m") as place:
        sync = through(stage) | {"store": {"url": str(place)}}
        found = stage.rig.run(stage.publish(2, {"tp=2": [(a, stage.versions(1)[0])]}, sync=sync))
        assert not VersionStore(Folder(place), "").versions()
    assert not found.failed, found.failed
    zero, one = ([outcome["error"] for outcome in several] for several in found.outcomes)
    assert zero == one
    assert re.fullmatch(r"the version store: cannot write .*: No space left on device .* \(trainer rank [01] on .*, cpu\)", zero[0])
    assert stage.held() == held


@pytest.mark.thorough
def test_a_store_of_another_run_is_refused_before_an_engine_is_asked(stage: Stage) -> None:
    other = stage.folder / "others"
    VersionStore(Folder(other), "somebody").claim()
    stage.asked.clear()
    found = stage.rig.run(stage.publish(1, {"tp=1": [(stage.checkpoints[0], 99)]}, sync=through(stage) | {"store": {"url": str(other)}}))
    assert "versions of run somebody, expected of run" in found.failed
    assert WeightsStage not in stage.asked
    assert stage.rig.pool.serving
