"""Weights are sent shard to shard from real Megatron ranks to real engines while these generate."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from asyncmoe.config.model import MadeModel
from asyncmoe.engines.pool import PooledGeneration
from asyncmoe.engines.sglang.process import SGLangProcess
from asyncmoe.models.make import make_model
from asyncmoe.rpc.messages import Reply, Request, WeightsCommit, WeightsFiles, WeightsJoin, WeightsStage
from tests.disks import mounted
from tests.engine.conftest import PROMPT, Rig, difference, family, running, settings
from tests.engine.oracle import Oracle, largest_difference, perturbed, with_others

pytestmark = [pytest.mark.engine, pytest.mark.ranks]
LAYOUTS = {1: ["tp=1"], 2: ["tp=2", "pp=2", "ep=2", "pp=2,vpp=2"], 4: ["tp=2,ep=2", "pp=2,ep=2"]}
Checksums = tuple[dict[str, str], ...]


@dataclass
class Published:
    """What happened around the trainer's publications."""

    outcomes: list[list[dict[str, Any]]] = field(default_factory=list)
    """By rank, by publication."""
    arrived: dict[int, Checksums] = field(default_factory=dict)
    """By version, checksums of engine 0 when it was published."""
    failed: str = ""
    """How the worker ended, if not well."""


@dataclass
class Stage:
    """An engine rig that trainers can reach over the wire."""

    rig: Rig
    checkpoints: list[Oracle]
    folder: Path
    loaded: Checksums
    """What SGLang's own loader made of the first checkpoint."""
    asked: dict[type, float] = field(default_factory=dict)
    """Kind of a request -> `time.monotonic()` when the last came."""
    next: int = 1

    def versions(self, count: int) -> list[int]:
        self.next += count
        return list(range(self.next - count, self.next))

    def held(self) -> Checksums:
        """The current weights of engine 0."""
        found: Checksums = self.rig.run(self.rig.engine.client.checksums(30.0))
        return found

    def published(self, ranks: int, publications: Mapping[str, Sequence[tuple[Oracle, int]]], *faults: Any, **how: Any) -> Published:
        """Publish (see `publish`); all weights arrive as SGLang's own loader would load them."""
        found: Published = self.rig.run(self.publish(ranks, publications, *faults, **how))
        everything = [each for several in publications.values() for each in several]
        assert not found.failed, found.failed
        assert [outcome["error"] for outcome in found.outcomes[0]] == [None] * len(everything)
        assert list(found.arrived) == [version for _, version in everything]
        want = {oracle: self.rig.expected(oracle) for oracle, _ in everything}
        assert not any(names for oracle, version in everything for names in wrong(found.arrived[version], want[oracle]))
        return found

    async def publish(
        self,
        ranks: int,
        publications: Mapping[str, Sequence[tuple[Oracle, int]]],
        faults: Mapping[int, Any] = {},
        limit_s: float = 300.0,
        in_place: bool = False,
        stale: tuple[int, Path] | None = None,
        **changes: Any,
    ) -> Published:
        """Have a trainer of `ranks` ranks publish checkpoints; faults and `in_place` as in tests/ranks/publish.py, by place among all
        publications.

        Args:
            stale: with sync.method disk, a version in whose directory engines find another checkpoint.
        """
        found = Published()

        async def answer(request: Request) -> Reply:
            self.asked[type(request)] = time.monotonic()
            if isinstance(request, WeightsFiles) and stale is not None and request.version == stale[0]:
                shutil.rmtree(request.folder)
                shutil.copytree(stale[1], request.folder)
            reply = await self.rig.coordinator.handle(request)  # type: ignore[arg-type]  # only those of weights are sent
            if isinstance(request, WeightsCommit | WeightsFiles):
                found.arrived[request.version] = await self.rig.engine.client.checksums(30.0)
            return reply

        out = self.folder / f"publish-{time.monotonic_ns()}"
        values = self.rig.config.model_dump(mode="json")
        sync = {"method": "reshard", "bucket_bytes": 40_000, "timeout_s": 30.0, "verify_every": 2} | changes.pop("sync", {})
        job = {
            "config": {**values, "sync": sync, **changes},
            "publications": {layout: [(str(c.path), version) for c, version in several] for layout, several in publications.items()},
            "faults": {str(place): fault for place, fault in faults.items()},
            "in_place": in_place,
        }
        try:
            await self.rig.publish_by_ranks(answer, out, ranks, limit_s, **job)
        except pytest.fail.Exception as error:
            found.failed = str(error)
        files = [out / f"publish-{ranks}.json.{rank}" for rank in range(ranks)]
        found.outcomes = [json.loads(file.read_text()) if file.exists() else [] for file in files]
        return found


SIZES: dict[str, dict[str, int]] = {"one": {}, "two": {"tp": 2}, "pair": {"count": 2}}
Stages = Callable[[str], Stage]


@pytest.fixture(scope="module")
def stages(model: Path, runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stages]:
    """One engine of one rank, one of two ranks, and two engines; each is started when a test first asks for it."""
    folder = tmp_path_factory.mktemp("direct")
    checkpoints = with_others(Oracle(model), folder)
    with ExitStack() as stack:

        @cache
        def stage(name: str) -> Stage:
            rig = stack.enter_context(running(settings(model, folder / f"run-{name}", max_total_tokens=8192, **SIZES[name]), runner))
            return Stage(rig, checkpoints, folder, runner.run(rig.engine.client.checksums(30.0)))

        yield stage


def wrong(found: Checksums, expected: Checksums) -> list[list[str]]:
    """Return the unexpected parameters by rank."""
    return [[name for name, checksum in e.items() if f.get(name) != checksum] for f, e in zip(found, expected, strict=True)]


def on_disk(folder: Path) -> dict[str, Any]:
    return {"method": "disk", "directory": str(folder), "verify_every": 1}


def ways() -> list[Any]:
    """An engine, the number of sending ranks, and their method; by default tests/engine/test_nodes.py sends to an engine of
    two ranks."""
    few = [("one", 1, "default"), ("pair", 4, "shm in place"), ("pair", 4, "disk")]
    every = [(engine, ranks, "default") for engine in ("one", "two", "pair") for ranks in LAYOUTS]
    every += [(engine, 4, how) for engine in ("two", "pair") for how in ("gloo", "gloo in place", "shm in place")]
    return [*few, *(pytest.param(*one, marks=pytest.mark.thorough) for one in every if one not in few)]


@pytest.mark.parametrize(("engine", "ranks", "how"), ways())
def test_parameters_are_those_sglangs_loader_makes(stages: Stages, tmp_path: Path, engine: str, ranks: int, how: str) -> None:
    stage = stages(engine)
    first, a, b = stage.checkpoints
    publications = {layout: list(zip((a, b, a, first), stage.versions(4), strict=True)) for layout in LAYOUTS[ranks]}
    transport, _, place = how.partition(" ")
    sync = {"default": {}, "disk": on_disk(tmp_path)}.get(how, {"transport": transport})
    found = stage.published(ranks, publications, in_place=place == "in place", sync=sync)
    assert stage.rig.expected(a) != stage.rig.expected(b) != stage.rig.expected(first)
    held = [stage.rig.run(member.engine.client.checksums(30.0)) for member in stage.rig.pool.members]
    assert all(engine_held == stage.loaded for engine_held in held)
    answer, last = stage.rig.run(stage.rig.generate()), list(found.arrived)[-1]
    assert difference(answer, first) < 1e-4
    assert [span.version for span in answer.generation.spans] == [str(last)]
    assert [path.name for path in tmp_path.glob("*/*")] == ([f"version_{last}"] if how == "disk" else [])
    pauses = [outcome["pause_ms"] for outcome in found.outcomes[0]]
    print(f"{ranks} ranks to {engine}, {how}: pause median {statistics.median(pauses):.0f} ms, all {[round(p) for p in pauses]}")


@pytest.mark.parametrize("in_place", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_deltas_end_at_the_same_parameters(stages: Stages, tmp_path: Path, in_place: bool) -> None:
    """After a damaged delta, and first from another trainer, a full update is sent."""
    stage = stages("pair")
    a = stage.checkpoints[1]
    few = [perturbed(a, tmp_path / "few1", 3, share=0.01)]
    few += [perturbed(few[0], tmp_path / "few2", 4, share=0.05)]
    versions = stage.versions(6)
    several = list(zip((a, few[0], few[1], a, few[0], few[0]), versions, strict=True))
    sync = {"delta": "auto", "verify_every": 1}
    layouts = {"tp=2,ep=2": several[:3], "pp=2,ep=2": several[3:]}
    found = stage.published(4, layouts, {2: (1, "damaged")}, sync=sync, in_place=in_place)
    held = [stage.rig.run(member.engine.client.checksums(30.0)) for member in stage.rig.pool.members]
    assert not any(names for engine_held in held for names in wrong(engine_held, stage.rig.expected(few[0])))
    assert difference(stage.rig.run(stage.rig.generate()), few[0]) < 1e-4
    (whole, _), (_, sparse), resent, again, (nbytes, _), (nothing, none) = [outcome["traffic"] for outcome in found.outcomes[0]]
    assert resent == [whole, None]
    assert again == [whole, None]
    assert 0.008 < sparse < 0.012
    assert nbytes < whole / 10
    assert (nothing < nbytes / 10, none) == (True, 0.0)
    print(f"in place {in_place}: of {whole} bytes {nbytes} at 1 %, pauses {[round(outcome['pause_ms']) for outcome in found.outcomes[0]]}")


def test_the_engine_generates_while_it_stages_and_says_which_token_is_whose(stages: Stages) -> None:
    stage = stages("one")
    _, old, new = stage.checkpoints
    before, after = stage.versions(2)
    short: list[PooledGeneration] = []

    async def across() -> tuple[Published, PooledGeneration, list[PooledGeneration]]:
        publishing = asyncio.create_task(stage.publish(1, {"tp=1": [(old, before), (new, after)]}, {1: (0, "slow")}))
        while stage.rig.pool.version < before:
            await asyncio.sleep(0.01)
        while stage.asked[WeightsStage] < stage.asked[WeightsCommit]:
            await asyncio.sleep(0.01)
        while stage.asked[WeightsCommit] < stage.asked[WeightsStage]:
            # Responses of half a second and more; the new version interrupts the last one.
            short.append(await stage.rig.generate(150))
        return await publishing, await stage.rig.generate(), short

    found, later, during = stage.rig.run(across())
    assert not found.failed, found.failed
    assert found.outcomes[0][1]["seconds"] > 4.0
    assert len(during) >= 2
    assert all([span.version for span in answer.generation.spans] == [str(before)] for answer in during[:-1])
    spans = during[-1].generation.spans
    if len(spans) == 2:
        assert [span.version for span in spans] == [str(before), str(after)]
        reference = old.logprobs(PROMPT, during[-1].generation.tokens, 1.0, spans[0].end, new)
        assert largest_difference(during[-1].generation.logprobs, reference) < 1e-4
    assert difference(during[0], old) < 1e-4
    assert later.salt == after
    assert difference(later, new) < 1e-4


def test_what_goes_wrong_while_staging_costs_one_update_and_says_the_same_on_every_rank(stages: Stages) -> None:
    stage = stages("one")
    _, a, b = stage.checkpoints
    versions = stage.versions(4)
    timeout_s = 4.0
    several = list(zip((a, b, b, b), versions, strict=True))
    faults = {1: (1, "stall"), 2: (1, "corrupt")}
    found = stage.rig.run(stage.publish(2, {"pp=2": several}, faults, sync={"timeout_s": timeout_s}))
    assert not found.failed, found.failed
    zero, one = found.outcomes
    assert [outcome["error"] for outcome in zero] == [outcome["error"] for outcome in one]
    fine, stall, corrupt, again = [outcome["error"] for outcome in zero]
    assert fine is None
    assert re.fullmatch(
        r"from trainer rank 1 to engine\.0 rank 0: message 1 of \d+ arrived with another digest than it was sent with, "
        r"or is of another plan \(engine\.0 rank 0 on .+, cpu\)",
        corrupt,
    )
    assert stall.startswith("waited")
    assert "trainer rank 1" in stall
    assert again is None
    assert sorted(found.arrived) == [versions[0], versions[3]]
    assert not any(wrong(found.arrived[versions[3]], stage.rig.expected(b)))
    assert stage.rig.pool.serving


@pytest.mark.parametrize("how", ["reshard", "disk"])
def test_a_killed_trainer_leaves_the_engine_with_the_version_it_serves(stages: Stages, tmp_path: Path, how: str) -> None:
    stage = stages("one")
    _, a, b = stage.checkpoints
    kept, lost, again = stage.versions(3)
    sync = on_disk(tmp_path) if how == "disk" else {}
    found = stage.rig.run(stage.publish(2, {"tp=2": [(a, kept), (b, lost)]}, {1: (0, "killed")}, sync=sync))
    assert found.failed
    assert list(found.arrived) == [kept]
    assert not any(wrong(stage.held(), stage.rig.expected(a)))
    answer = stage.rig.run(stage.rig.generate())
    assert [span.version for span in answer.generation.spans] == [str(kept)]
    assert difference(answer, a) < 1e-4
    stage.published(2, {"tp=2": [(b, again)]}, sync=sync)
    assert not any(wrong(stage.held(), stage.rig.expected(b)))
    assert [path.name for path in tmp_path.glob("*/*")] == ([f"version_{again}"] if how == "disk" else [])


def test_an_engine_of_another_shape_is_refused_before_a_byte_moves(stages: Stages, tmp_path: Path) -> None:
    stage = stages("one")
    make_model(tmp_path / "wide", MadeModel(layers=4, expert_hidden=96), seed=0)
    held, (version,) = stage.held(), stage.versions(1)
    wide = Oracle(tmp_path / "wide")
    found = stage.rig.run(stage.publish(1, {"tp=1": [(wide, version)]}, model={"path": str(wide.path)}))
    error = found.outcomes[0][0]["error"]
    for layer in range(4):
        assert (
            f"engine.0 rank 0: model.layers.{layer}.mlp.experts.w13_weight: got float32[8, 128, 64], expected float32[8, 192, 64]" in error
        )
        assert f"model.layers.{layer}.mlp.experts.w2_weight: got float32[8, 64, 64], expected float32[8, 64, 96]" in error
    assert "self_attn" not in error
    assert WeightsJoin in stage.asked
    assert found.arrived == {}
    assert stage.held() == held
    assert len(stage.rig.run(stage.rig.generate()).generation.tokens)


def test_a_full_disk_leaves_the_engine_with_the_version_it_serves(stages: Stages, tmp_path: Path) -> None:
    stage = stages("one")
    _, a, b = stage.checkpoints
    kept, lost, again = stage.versions(3)
    nbytes = sum(tensor.nbytes for tensor in a.weights.values())
    with mounted(tmp_path / "disk", f"{int(1.5 * nbytes)}") as disk:
        found = stage.rig.run(stage.publish(1, {"tp=1": [(a, kept), (b, lost)]}, sync=on_disk(disk)))
    assert found.outcomes[0][0]["error"] is None
    assert f"weights of version {lost}: cannot write {tmp_path}" in found.outcomes[0][1]["error"]
    assert "No space left on device" in found.outcomes[0][1]["error"]
    assert not any(wrong(stage.held(), stage.rig.expected(a)))
    stage.published(1, {"tp=1": [(b, again)]}, sync=on_disk(tmp_path))
    assert not any(wrong(stage.held(), stage.rig.expected(b)))


def test_where_one_of_two_engines_dies_the_other_is_sent_the_version_again(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SGLangProcess, "died", None)  # nobody is left to tell
    stage = stages("pair")
    _, a, b = stage.checkpoints
    both, twice, after = stage.versions(3)
    (scheduler,) = family(stage.rig.engines[1], "sglang::scheduler")

    async def kill_in_the_middle() -> Published:
        publishing = asyncio.create_task(stage.publish(1, {"tp=1": [(a, both), (b, twice), (a, after)]}, {1: (0, "slow")}))
        while stage.rig.pool.version < both:
            await asyncio.sleep(0.01)
        while stage.asked[WeightsStage] < stage.asked[WeightsCommit]:
            await asyncio.sleep(0.01)
        scheduler.kill()
        return await publishing

    found = stage.rig.run(kill_in_the_middle())
    assert not found.failed, found.failed
    assert [outcome["error"] for outcome in found.outcomes[0]] == [None] * 3
    assert not any(outcome.get("left_out") for outcome in found.outcomes[0])
    assert sorted(found.arrived) == [both, twice, after]
    assert not any(wrong(found.arrived[twice], stage.rig.expected(b)))
    assert [member.version for member in stage.rig.pool.members] == [after, both]
    assert [member.engine.name for member in stage.rig.pool.serving] == ["engine.0"]
    assert not any(wrong(stage.held(), stage.rig.expected(a)))


def test_an_engine_that_reads_the_version_before_is_fenced(stages: Stages, tmp_path: Path) -> None:
    """Simulates a file system with a stale cache. Must be the last test of this engine, because it is lost."""
    stage = stages("one")
    _, a, b = stage.checkpoints
    before, now = stage.versions(2)
    found = stage.rig.run(stage.publish(1, {"tp=1": [(a, before), (b, now)]}, stale=(now, a.path), sync=on_disk(tmp_path)))
    assert found.outcomes[0][0]["error"] is None
    assert "checksums differ" in found.outcomes[0][1]["error"]
    assert not stage.rig.pool.serving
