"""A real engine with adapters computes what the merged weights do."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncmoe.engines.sglang.lora import flags
from asyncmoe.engines.sglang.process import SGLangProcess
from asyncmoe.engines.types import Generation, Sampling
from asyncmoe.errors import EngineError
from asyncmoe.models import load_hf_config, qwen3_moe
from asyncmoe.models.lora import peft
from asyncmoe.models.lora.adapter import ATTENTION, DTYPES, Adapter, Experts, Kind, pairs, served_config, served_targets
from asyncmoe.models.shape import Shape
from tests.engine.conftest import running, settings
from tests.engine.oracle import Merged
from tests.unit.adapters import ALL, random_adapter

pytestmark = pytest.mark.engine

LIMIT = 6
"""Of the rank; adapters have less, so that what a slot holds besides them is seen."""


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
        """Return it in the form that engines load: tensors of all experts stacked; targets that the adapter lacks are zero."""
        folder.mkdir()
        kind, stacks = adapter.kind, dict[str, dict[str, np.ndarray]]()
        for pair in pairs(self.m, dataclasses.replace(kind, targets=served_targets(kind))):
            front = f"base_model.model.model.layers.{pair.layer}.{'self_attn' if pair.target in ATTENTION else 'mlp.experts'}"
            for side, name, size in (("A", pair.a, (kind.rank, pair.inputs)), ("B", pair.b, (pair.outputs, kind.rank))):
                value = adapter.values.get(name, np.zeros(size, DTYPES[adapter.dtype]))
                stacks.setdefault(f"{front}.{pair.target}.lora_{side}.weight", {})[name] = value
        found = {name: np.stack([*stack.values()]) if ".experts." in name else stack.popitem()[1] for name, stack in stacks.items()}
        peft.write(folder, peft.Files(served_config(adapter.kind), adapter.dtype, found))
        return folder

    async def unload(self, name: str) -> None:
        await self.engine.client._send("/unload_lora_adapter", {"lora_name": name})

    async def generate(self, prompt: tuple[int, ...], adapter: str | None, tokens: int = 16) -> Generation:
        return await self.engine.client.generate(prompt, Sampling(0.8, tokens, ()), "0", 60.0, adapter=adapter)


NAMED = "{0[0]}-tp{0[1]}".format


@pytest.fixture(scope="module", params=[("per_expert", 1), pytest.param(("shared_outer", 2), marks=pytest.mark.thorough)], ids=NAMED)
def rig(request: pytest.FixtureRequest, model: Path, runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    experts, tp = request.param
    told = flags(Kind(ALL, 4, 8.0, experts), LIMIT)

    config = settings(model, tmp_path_factory.mktemp("adapters"), tp=tp)
    # As in a run with adapters, but without one installed.
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
        # Concurrently with requests without an adapter.
        with_it, base = await asyncio.gather(ask(name), ask(None))
        assert max(plain.difference(p, g.tokens, g.logprobs, 0.8) for p, g in zip(prompts, base, strict=True)) < 1e-4
        await rig.unload(name)
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
    """More than 256 tokens, from prompts shorter than 256."""
    adapter, client = random_adapter(rig.m, rig.kind(), 3), rig.engine.client
    prompts = [tuple(20 + (7 * i + j) % 60 for j in range(40)) for i in range(16)]

    async def use() -> list[Generation]:
        await client.load_adapter("many", rig.write(tmp_path / "many", adapter), 60.0)
        await client.pause()
        asked = [asyncio.create_task(rig.generate(prompt, "many", 2)) for prompt in prompts]
        await asyncio.sleep(0.5)  # so that they wait together
        await client.resume()
        found = await asyncio.gather(*asked)
        await rig.unload("many")
        return found

    merged = Merged(model, rig.m, adapter)
    found = rig.run(use())
    assert max(merged.difference(p, g.tokens, g.logprobs, 0.8) for p, g in zip(prompts, found, strict=True)) < 1e-4
