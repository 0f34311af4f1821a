"""A real engine with adapters computes what the merged weights do, and changes them without a request noticing."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncmoe.engines.adapter_slots import ServedBy, attributed
from asyncmoe.engines.member import Member
from asyncmoe.engines.sglang.lora import flags
from asyncmoe.engines.sglang.process import SGLangProcess
from asyncmoe.engines.types import Generation, Sampling
from asyncmoe.errors import EngineError
from asyncmoe.models import load_hf_config, qwen3_moe
from asyncmoe.models.lora.adapter import Adapter, Experts, Kind
from asyncmoe.models.lora.peft import write_served
from asyncmoe.models.make import VOCAB
from asyncmoe.models.shape import Shape
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId, Turn, assemble
from asyncmoe.trajectory import Recording, Routing, decode_routes, validate
from tests.engine.conftest import running, settings
from tests.engine.oracle import TIE, Merged, gaps, routes
from tests.unit.adapters import ALL, random_adapter
from tests.unit.test_adapters_slots import engine, publish

pytestmark = pytest.mark.engine

LIMIT = 6
"""Of the rank; adapters have less, so that what a slot holds besides them is seen."""
WORKERS = 8


@dataclass
class Rig:
    """One engine with adapters."""

    engine: SGLangProcess
    experts: Experts
    m: Shape
    run: Callable[..., Any]

    def kind(self, targets: tuple[str, ...] = ALL, rank: int = 4) -> Kind:
        return Kind(targets, rank, 8.0, self.experts)

    def write(self, folder: Path, adapter: Adapter) -> Path:
        folder.mkdir()
        return write_served(folder, self.m, adapter)

    async def generate(self, prompt: tuple[int, ...], adapter: str | None, tokens: int = 16) -> Generation:
        return await self.engine.client.generate(prompt, Sampling(0.8, tokens, ()), "0", 60.0, adapter=adapter)


NAMED = "{0[0]}-tp{0[1]}".format


@pytest.fixture(scope="module", params=[("per_expert", 1), pytest.param(("shared_outer", 2), marks=pytest.mark.thorough)], ids=NAMED)
def rig(request: pytest.FixtureRequest, model: Path, runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    experts, tp = request.param
    told = flags(Kind(ALL, 4, 8.0, experts), LIMIT)

    config = settings(model, tmp_path_factory.mktemp("adapters"), tp=tp)
    # As for a run with adapters, but none is installed.
    config = config.model_copy(update={"engines": config.engines.model_copy(update={"args": tuple(told)})})
    with running(config, runner) as made:
        yield Rig(made.engine, experts, qwen3_moe.FAMILY.shape_of(load_hf_config(model)), runner.run)


def test_log_probabilities_are_those_of_the_merged_weights(rig: Rig, model: Path, tmp_path: Path) -> None:
    prompts = [(20, 30, i) for i in range(8)]
    made = {name: random_adapter(rig.m, kind, seed) for name, kind, seed in (
        ("all", rig.kind(), 1),
        ("odd", rig.kind(("v_proj", "up_proj"), 2), 2),
    )}  # fmt: skip
    client = rig.engine.client

    async def ask(adapter: str | None) -> list[Generation]:
        return await asyncio.gather(*(rig.generate(prompt, adapter) for prompt in prompts))

    async def use(name: str) -> list[Generation]:
        folder = rig.write(tmp_path / name, made[name])
        await client.load_adapter(name, folder, 60.0)
        shutil.rmtree(folder)
        # At once with requests that have none.
        with_it, base = await asyncio.gather(ask(name), ask(None))
        assert max(plain.difference(p, g.tokens, g.logprobs, 0.8) for p, g in zip(prompts, base, strict=True)) < 1e-4
        await client.unload_adapter(name, 60.0)
        return with_it

    plain = Merged(model, rig.m, None)
    for name, adapter in made.items():
        merged, found = Merged(model, rig.m, adapter), rig.run(use(name))
        worst = max(merged.difference(p, g.tokens, g.logprobs, 0.8) for p, g in zip(prompts, found, strict=True))
        apart = min(plain.difference(p, g.tokens, g.logprobs, 0.8) for p, g in zip(prompts, found, strict=True))
        print(f"{name}: {worst:.1e} from the merged weights, {apart:.2f} from the base")
        assert worst < 1e-4
        assert apart > 0.05
        with pytest.raises(EngineError, match=r"engine\.0: /generate: "):
            rig.run(ask(name))


def test_many_prompts_of_one_adapter_may_come_at_once(rig: Rig, model: Path, tmp_path: Path) -> None:
    """More than 256 tokens, of which no prompt has 256."""
    adapter, client = random_adapter(rig.m, rig.kind(), 3), rig.engine.client
    prompts = [tuple(20 + (7 * i + j) % 60 for j in range(40)) for i in range(16)]

    async def use() -> list[Generation]:
        await client.load_adapter("many", rig.write(tmp_path / "many", adapter), 60.0)
        await client.pause()
        asked = [asyncio.create_task(rig.generate(prompt, "many", 2)) for prompt in prompts]
        await asyncio.sleep(0.5)  # so that they wait together
        await client.resume()
        found = await asyncio.gather(*asked)
        await client.unload_adapter("many", 60.0)
        return found

    merged = Merged(model, rig.m, adapter)
    found = rig.run(use())
    assert max(merged.difference(p, g.tokens, g.logprobs, 0.8) for p, g in zip(prompts, found, strict=True)) < 1e-4


def test_a_record_under_an_adapter_has_its_version_and_its_routes(rig: Rig, model: Path, tmp_path: Path) -> None:
    adapter = random_adapter(rig.m, rig.kind(), 4)
    recording, prompt = Recording(Routing(4, (0, 1, 2, 3), 2, 8), vocabulary=VOCAB), (20, 30, 40)

    async def use() -> Generation:
        slots = engine(rig.engine.client, 60.0)
        await publish(slots, 7, rig.write(tmp_path / "7", adapter))
        with slots.serving() as serving:
            sampling = Sampling(0.8, 16, (), recording=recording)
            generation = await rig.engine.client.generate(prompt, sampling, "7", 60.0, adapter=serving.adapter)
        await rig.engine.client.unload_adapter("v7", 60.0)
        return attributed(generation, serving)

    record = assemble([Turn(prompt, rig.run(use()), 7)], EpisodeId(0, 0, 0), recording, 0.0, {})
    validate(record, recording, newest_version=7)
    assert set(record.versions[record.loss_mask].tolist()) == {7}
    assert record.is_pure
    assert record.routes is not None
    with_it, without = (routes(Merged(model, rig.m, one).model, record.tokens) for one in (adapter, None))
    np.testing.assert_array_equal(decode_routes(record.routes, "g0"), with_it)
    assert (with_it != without).any()


def test_swaps_under_load(rig: Rig, model: Path, tmp_path: Path, thorough: bool) -> None:
    """More than there are slots: each is used again."""
    newest = 20 if thorough else 6
    made = {version: random_adapter(rig.m, rig.kind(), 100 + version) for version in range(1, newest + 1)}
    answers: list[tuple[tuple[int, ...], ServedBy, Generation, bool]] = []

    async def load(slots: Member, worker: int, done: asyncio.Event) -> None:
        turn, last = 0, False
        while not last:
            # One more after the last version is there.
            last = done.is_set()
            prompt, turn = (9, worker, turn % 50), turn + 1
            with slots.serving() as serving:
                generation = await rig.generate(prompt, serving.adapter, 8 + 8 * worker)
            answers.append((prompt, serving, attributed(generation, serving), slots.served != serving))

    async def swap(slots: Member, done: asyncio.Event) -> None:
        for version, adapter in made.items():
            folder = rig.write(tmp_path / str(version), adapter)
            await publish(slots, version, folder)
            shutil.rmtree(folder)
            await asyncio.sleep(0.1)
        done.set()

    async def everything() -> None:
        done = asyncio.Event()
        slots = engine(rig.engine.client, 60.0)
        async with asyncio.timeout(300):
            await asyncio.gather(swap(slots, done), *(load(slots, worker, done) for worker in range(WORKERS)))
        for version in (newest - 1, newest):
            await rig.engine.client.unload_adapter(f"v{version}", 60.0)

    rig.run(everything())
    versions = {serving.version for _, serving, _, _ in answers}
    overtaken = sum(late for *_, late in answers)
    worst = apart = 0.0
    ties = 0
    for version in sorted(versions):
        merged = Merged(model, rig.m, made.get(version))
        for prompt, serving, generation, _ in answers:
            assert [span.version for span in generation.spans] == [str(serving.version)]
            if serving.version == version:
                found = merged.difference(prompt, generation.tokens, generation.logprobs, 0.8)
                gap = 1.0 if found < 1e-4 else float(gaps(merged.model, np.array([*prompt, *generation.tokens])).min())
                if gap < TIE:  # a router may decide it either way, and what follows differs
                    ties += 1
                else:
                    worst = max(worst, found)
            elif serving.version == version + 1 and not apart:
                apart = merged.difference(prompt, generation.tokens, generation.logprobs, 0.8)
    assert versions >= made.keys()
    assert overtaken >= newest
    assert worst < 1e-4
    assert ties <= len(answers) // 50
    assert apart > 0.05
