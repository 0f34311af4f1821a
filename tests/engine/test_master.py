"""The master test: with the engine at the trainer's version, both give every sampled token the same probability, over the ids it was
sampled from and through the experts it went through."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from asyncmoe.engines.types import Sampling
from asyncmoe.rollout.tokenizer import Tokenizer
from asyncmoe.trajectory import Trajectory, decode_masks, encode, validate
from tests.engine.conftest import RECORDING, Rig
from tests.engine.oracle import Oracle, perturbed
from tests.prompts import arithmetic
from tests.ranks import launch

pytestmark = [pytest.mark.engine, pytest.mark.ranks]

LAYOUTS = {1: ["tp=1"], 2: ["tp=2", "pp=2", "ep=2", "cp=2", "pp=2,vpp=2"], 4: ["tp=2,ep=2", "pp=2,ep=2", "cp=2,tp=2"]}
FEW = {("tp=1",): ("packed", "single"), ("tp=2",): ("packed",), ("cp=2",): ("packed",)}
"""Otherwise; tests/ranks/test_kept.py compares recorded routes with transformers' in the other ways of splitting a model."""
EVERY = {(layout,): ("packed", "single") for layouts in LAYOUTS.values() for layout in layouts}
TEMPERATURE, TOP_P, TOP_K = 0.7, 0.9, 50


@pytest.fixture(scope="module")
def recorded(rig: Rig, model: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trajectories of one engine, sampled at a temperature by weights that were synced to it, and those weights as a checkpoint."""
    path = tmp_path_factory.mktemp("master")
    oracle = perturbed(Oracle(model), path / "hf", seed=3)
    task = arithmetic(tokenizer, ("+", "-", "*"), 3, seed=2)

    def sampling(group: int) -> Sampling:
        return Sampling(TEMPERATURE, 20 + 7 * (group % 6), (tokenizer.eos,), TOP_P, TOP_K, recording=RECORDING)

    version = rig.pool.version + 1

    async def play() -> list[Trajectory]:
        await rig.sender.publish(version, oracle.weights)
        return await rig.sampled(task, tokenizer, 24, sampling)

    trajectories = rig.run(play())
    assert all(t.is_pure and t.oldest_version == version for t in trajectories)
    assert len({len(t) for t in trajectories}) > 3
    for trajectory in trajectories:
        validate(trajectory, RECORDING, newest_version=version)
    (path / "bias.json").write_text(json.dumps([bias for t in trajectories for bias in biases(oracle, t)]))
    (path / "trajectories.msgpack").write_bytes(msgspec.msgpack.encode([[bytes(frame) for frame in encode(t)] for t in trajectories]))
    return path


@pytest.fixture(scope="module")
def differences(recorded: Path, thorough: bool) -> dict[str, dict[str, float]]:
    found: dict[str, Any] = {}
    for ranks, layouts in LAYOUTS.items():
        tried = EVERY if thorough else FEW
        if given := [f"{layout}:{'+'.join(tried[layout,])}" for layout in layouts if (layout,) in tried]:
            found |= launch.run("replay", ranks, recorded, str(recorded), str(TEMPERATURE), *given)
    print({name: f"{value['largest']:.1e}" for name, value in found.items()})
    return found


@pytest.mark.parametrize(("layout", "how"), launch.marked(EVERY, FEW))
def test_trainer_and_engine_agree_on_every_token(differences: dict[str, dict[str, float]], layout: str, how: str) -> None:
    assert differences[f"{layout} {how}"]["largest"] <= 1e-4


def test_without_masks_every_token_has_the_known_bias(differences: dict[str, dict[str, float]], recorded: Path) -> None:
    """By the logarithm of the probability that the engine's cut has left out."""
    expected = np.array(json.loads((recorded / "bias.json").read_text()))
    assert expected.max() <= 0
    assert expected.mean() < -0.1
    for found in differences.values():
        assert found["bias_mean"] == pytest.approx(expected.mean(), abs=1e-4)
        assert found["bias_largest"] == pytest.approx(np.abs(expected).max(), abs=1e-4)


def biases(oracle: Oracle, trajectory: Trajectory) -> list[float]:
    """log of the share of the whole distribution that the ids of each sampled token have, by transformers."""
    masks = decode_masks(trajectory.masks, trajectory.key)
    with torch.no_grad():
        logits = oracle.model(torch.from_numpy(trajectory.tokens).long()[None]).logits[0] / TEMPERATURE
    found = []
    for place in np.flatnonzero(trajectory.loss_mask).tolist():
        ids = torch.from_numpy(masks.ids[masks.offsets[place] : masks.offsets[place + 1]].astype(np.int64))
        found.append(float(logits[place - 1][ids].logsumexp(0) - logits[place - 1].logsumexp(0)))
    return found
