"""Worker: log-probabilities of recorded trajectories under every layout of this world size. `replay.py RESULT DIRECTORY T LAYOUT...`

DIRECTORY holds `hf` (the weights that sampled them, at temperature T) and `trajectories.msgpack`. A layout is as in kept.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch.distributed as dist

from asyncmoe.config import Config
from asyncmoe.trainer import start, step
from asyncmoe.trainer.data.schedule import schedule
from asyncmoe.trainer.model import gpt, mesh
from asyncmoe.trajectory import Trajectory, decode
from tests.ranks import case, group, parity
from tests.ranks.leaving import leave


def main(folder: str, temperature: str, *layouts: str) -> dict[str, dict[str, float]]:
    path, found = Path(folder), {}
    recorded = read(path / "trajectories.msgpack")
    for layout in layouts:
        sizes, _, ways = layout.partition(":")
        for how in ways.split("+"):
            settings = case.settings_of(sizes) | {"pack": how == "packed"}
            found[f"{sizes} {how}"] = differences(path, recorded, float(temperature), settings)
    return found


def read(file: Path) -> list[Trajectory]:
    return [decode(frames) for frames in msgspec.msgpack.decode(file.read_bytes())]


def differences(path: Path, recorded: list[Trajectory], temperature: float, trainer: dict[str, Any]) -> dict[str, float]:
    """Run `compare` on a trainer with the weights that sampled them."""
    if mesh.groups.is_initialized():
        leave()
    config = case.config(path, ranks=dist.get_world_size(), tokens_per_microbatch=256, **trainer)
    return compare(config, parity.Job(path, config, mesh.start(config.trainer), {}).model(), recorded, temperature)


def compare(config: Config, built: gpt.Model, recorded: list[Trajectory], temperature: float) -> dict[str, float]:
    """Over every sampled token of every trajectory, between this trainer and what the engine recorded.

    Returns:
        largest: with routes and masks as recorded. bias_mean, bias_largest: of trainer - engine with routes as recorded, but without masks.
    """
    place, lengths = built.mesh, [len(t) for t in recorded]
    planned = schedule(lengths, place.dp, 256, config.trainer.pack, place.grid)
    replay = start.replay(config, built)
    batches = parity.packed(dict(enumerate(recorded)), planned, config, place, np.zeros(len(recorded)), routing=replay.routing)
    ours = step.logprobs_only(built, batches, lengths, temperature, replay)
    bare = step.logprobs_only(built, [replace(b, support=None) for b in batches], lengths, temperature, replay)
    bias = np.concatenate([(bare[i] - t.logprobs)[t.loss_mask] for i, t in enumerate(recorded)])
    return {
        "largest": max(float(np.abs(ours[i] - t.logprobs)[t.loss_mask].max()) for i, t in enumerate(recorded)),
        "bias_mean": float(bias.mean()),
        "bias_largest": float(np.abs(bias).max()),
    }


if __name__ == "__main__":
    group.run(main)
