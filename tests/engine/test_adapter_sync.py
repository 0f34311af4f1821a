"""Adapters alone are sent from real Megatron ranks to the adapter memory of real engines; all sides then agree."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from asyncmoe import config as configuration
from asyncmoe.engines.types import Sampling
from asyncmoe.models import family_of, load_hf_config
from asyncmoe.models.lora.adapter import Adapter, Kind
from asyncmoe.models.shape import Shape
from asyncmoe.rollout.tokenizer import Tokenizer
from asyncmoe.rpc.messages import Reply, Request, WeightsCommit
from asyncmoe.trajectory import Recording, Trajectory, decode_routes, encode, validate
from tests import families
from tests.engine.conftest import Rig, running, settings
from tests.engine.oracle import Merged, comparable
from tests.prompts import arithmetic
from tests.unit.adapters import random_adapter

pytestmark = [pytest.mark.engine, pytest.mark.ranks]

QWEN = "qwen3_moe"
FEW = {2: ["tp=2"], 4: ["pp=2,ep=2"]}
LAYOUTS = {1: ["tp=1"], 2: ["tp=2", "pp=2", "ep=2"], 4: ["tp=2,ep=2", "pp=2,ep=2"]}
"""In a thorough test; in others only `FEW`, which have each of them, alone or in a combination."""
OF_OTHERS = {1: ["tp=1"], 2: ["tp=2", "pp=2,first_stage_layers=1"]}
ADAPTED = {"rank": 4, "alpha": 10.0}
RESPONSES = 12
NAMED = "{0[0]}-{0[1]}-tp{0[2]}".format
OTHERS = [
    *((QWEN, experts, tp) for experts, tp in (("shared_outer", 2), ("per_expert", 2), ("shared_outer", 1))),
    *((family, "per_expert", 1) for family in ("mixtral", "glm", "deepseek", "moonlight")),
    *((family, "shared_outer", 2) for family in ("mixtral", "deepseek")),
]
ENGINES = [(QWEN, "per_expert", 1), *(pytest.param(one, marks=pytest.mark.thorough) for one in OTHERS)]


@dataclass
class Dock:
    """An engine that trainers of adapters can reach, and two alternating adapters."""

    rig: Rig
    model: Path
    m: Shape
    recording: Recording
    tokenizer: Tokenizer
    adapters: list[Adapter]
    files: list[Path]
    folder: Path
    layouts: dict[int, list[str]]

    async def sampled(self, version: int) -> list[Trajectory]:
        def sampling(group: int) -> Sampling:
            temperature = self.rig.config.rollout.temperature
            return Sampling(temperature, 10 + 5 * (group % 4), (self.tokenizer.eos,), recording=self.recording)

        return await self.rig.sampled(arithmetic(self.tokenizer, ("+",), 2, seed=version), self.tokenizer, RESPONSES, sampling)

    async def publish(self, ranks: int, publications: dict[str, list[tuple[int, int]]]) -> tuple[list[dict[str, Any]], dict[int, Any]]:
        """Publish (number of the adapter, version) from a trainer under each layout; return outcomes, and the samples of each version."""
        out = self.folder / f"{ranks}-ranks"
        seen: dict[int, list[Trajectory]] = {}

        async def answer(request: Request) -> Reply:
            reply = await self.rig.coordinator.handle(request)  # type: ignore[arg-type]  # only those of weights are sent
            if isinstance(request, WeightsCommit):
                seen[request.version] = await self.sampled(request.version)
                frames = [[bytes(frame) for frame in encode(t)] for t in seen[request.version]]
                (out / f"{request.version}.msgpack").write_bytes(msgspec.msgpack.encode(frames))
            return reply

        job = {
            "config": self.rig.config.model_dump(mode="json"),
            "publications": {layout: [(str(self.model), version) for _, version in several] for layout, several in publications.items()},
            "halves": {str(version): str(self.files[which]) for several in publications.values() for which, version in several},
        }
        return await self.rig.publish_by_ranks(answer, out, ranks, 200.0, **job), seen


@pytest.fixture(scope="module", params=ENGINES, ids=NAMED)
def dock(
    request: pytest.FixtureRequest,
    model: Path,
    tokenizer: Tokenizer,
    runner: asyncio.Runner,
    tmp_path_factory: pytest.TempPathFactory,
    thorough: bool,
) -> Iterator[Dock]:
    family, experts, tp = request.param
    folder = tmp_path_factory.mktemp("adapter-sync")
    if family != QWEN:
        model = families.write(folder / "model", family)
        tokenizer = Tokenizer(model)
    values = settings(model, folder, tp=tp).model_dump(mode="json")
    sync = {"bucket_bytes": 40_000, "timeout_s": 60.0}
    config = configuration.parse({**values, "train": "lora", "lora": {**ADAPTED, "experts": experts}, "sync": sync})
    hf = load_hf_config(model)
    m = family_of(hf).shape_of(hf)
    recording = Recording(family_of(hf).routing(hf), vocabulary=hf["vocab_size"])
    adapters = [random_adapter(m, Kind(m.adapters, experts=experts, **ADAPTED), seed) for seed in (1, 2)]
    files = [folder / f"{number}.pt" for number in range(2)]
    for file, adapter in zip(files, adapters, strict=True):
        torch.save({name: torch.from_numpy(value) for name, value in adapter.values.items()}, file)

    with running(config, runner) as rig:
        layouts = OF_OTHERS if family != QWEN else LAYOUTS if thorough else FEW
        yield Dock(rig, model, m, recording, tokenizer, adapters, files, folder, layouts)


def test_engine_trainer_and_merged_weights_agree(dock: Dock) -> None:
    """Agree on every token, at each of two versions per layout, and with the base model before."""
    base = Merged(dock.model, dock.m, None)
    worst = {"base": max(difference(base, t) for t in dock.rig.run(dock.sampled(0)))}
    merged, version = [Merged(dock.model, dock.m, adapter) for adapter in dock.adapters], 0
    for ranks, layouts in dock.layouts.items():
        several = {layout: [(0, version + 2 * at + 1), (1, version + 2 * at + 2)] for at, layout in enumerate(layouts)}
        version += 2 * len(layouts)
        outcomes, seen = dock.rig.run(dock.publish(ranks, several))
        assert [outcome["error"] for outcome in outcomes] == [None] * len(outcomes)
        for layout, published in several.items():
            for which, number in published:
                for trajectory in seen[number]:
                    validate(trajectory, dock.recording, newest_version=number)
                    assert trajectory.is_pure
                    assert trajectory.oldest_version == number
                worst[f"{layout} engine"] = max(difference(merged[which], t) for t in seen[number])
                assert min(difference(merged[1 - which], t) for t in seen[number]) > 0.01
        for outcome in outcomes:
            worst[f"{outcome['layout']} trainer"] = max(outcome["largest"], worst.get(f"{outcome['layout']} trainer", 0.0))
    print({name: f"{value:.1e}" for name, value in worst.items()})
    assert max(worst.values()) <= 1e-4


def difference(oracle: Merged, t: Trajectory) -> float:
    """Over the sampled tokens of a response of one turn; up to a router's near tie, if transformers decides it the other way."""
    sampled = [int(token) for token in t.tokens[t.loss_mask]]
    prompt = [int(token) for token in t.tokens[: len(t.tokens) - len(sampled)]]
    logprobs = [float(value) for value in t.logprobs[t.loss_mask]]
    compared = max(0, comparable(oracle.model, t.tokens, decode_routes(t.routes, t.key)) - len(prompt))
    sampled, logprobs = sampled[:compared], logprobs[:compared]
    return oracle.difference(prompt, sampled, logprobs, 1.0) if sampled else 0.0
