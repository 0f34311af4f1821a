"""The master test: with the engine at the trainer's version, both give every sampled token the same probability."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncmoe.rollout import episode, scoring
from asyncmoe.rollout.engine_client import Sampling
from asyncmoe.rollout.tasks.arithmetic import Arithmetic
from asyncmoe.rollout.tokenizer import Tokenizer
from asyncmoe.rollout.turns import Place
from asyncmoe.trajectory import Trajectory, encode
from tests.engine.conftest import Rig
from tests.engine.oracle import Oracle, perturbed
from tests.ranks import case, launch

pytestmark = [pytest.mark.engine, pytest.mark.ranks]

VERSION = 7
LAYOUTS = {1: ["1,1,1"], 2: ["2,1,1", "1,2,1", "1,1,2"], 4: ["2,1,2", "1,2,2"]}


@pytest.fixture(scope="module")
def recorded(rig: Rig, model: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trajectories of one engine, sampled at a temperature by weights that were synced to it, and those weights as a checkpoint."""
    path = tmp_path_factory.mktemp("master")
    oracle = perturbed(Oracle(model), path / "hf", seed=3)
    task, sampling, scorer = (
        Arithmetic(tokenizer, ("+", "-", "*"), 3, seed=2),
        Sampling(case.TEMPERATURE, 60, (tokenizer.eos,)),
        scoring.Exact(),
    )

    async def play() -> list[Trajectory]:
        await rig.sender.publish(VERSION, oracle.weights)
        return await asyncio.gather(
            *(episode.run(task.prompt(g), Place(g, 0, 0), rig.pool, sampling, tokenizer, scorer) for g in range(24))
        )

    trajectories = rig.run(play())
    assert all(t.is_pure and t.oldest_version == VERSION for t in trajectories)
    assert len({len(t) for t in trajectories}) > 3
    (path / "trajectories.msgpack").write_bytes(msgspec.msgpack.encode([[bytes(frame) for frame in encode(t)] for t in trajectories]))
    return path


@pytest.fixture(scope="module")
def differences(recorded: Path) -> dict[str, float]:
    found: dict[str, Any] = {}
    for ranks, layouts in LAYOUTS.items():
        found |= launch.run("replay", ranks, recorded, str(recorded), *layouts)
    print({name: f"{value:.1e}" for name, value in found.items()})
    return found


@pytest.mark.parametrize("how", ["packed", "single"])
@pytest.mark.parametrize("layout", [layout for layouts in LAYOUTS.values() for layout in layouts])
def test_trainer_and_engine_agree_on_every_token(differences: dict[str, float], layout: str, how: str) -> None:
    assert differences[f"{layout} {how}"] <= 1e-4
