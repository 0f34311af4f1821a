"""Worker: users' own loss and weight on several ranks. `plugin.py RESULT PATH LAYOUT...`

PATH holds the model, in `hf`, and gets a module for each rank, which differ.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from asyncmoe.config.objective import ObjectiveSection
from asyncmoe.errors import ConfigError, InvariantBroken
from asyncmoe.trainer import losses, objective, step
from asyncmoe.trainer.model import mesh, optimizer
from asyncmoe.trainer.start import agree
from tests.ranks import case, group
from tests.ranks.leaving import leave
from tests.ranks.parity import Job, snapshot

OWN = "tests.unit.plugin_functions"
PLUGINS: dict[str, Any] = {
    "aggregation": "sequence_mean",
    "updates_per_batch": 2,
    "loss": f"{OWN}:ppo_with_metrics",
    "loss_options": {"low": 0.1, "high": 0.15},
    "correction": {"weight": f"{OWN}:truncated"},
}


def main(path: str, *layouts: str) -> list[Any]:
    return group.everyone({layout: try_layout(Path(path), layout) for layout in layouts})


def try_layout(path: Path, layout: str) -> dict[str, Any]:
    config = case.config(path, ranks=dist.get_world_size(), **case.settings_of(layout))
    place, noise = mesh.start(config.trainer), np.random.default_rng(5)
    sampled = [-np.abs(noise.normal(4, 0.2, n)).astype(np.float32) for n in case.LENGTHS]
    job = Job(path, config, place, {"proximal": sampled, "behaviour": [one + np.float32(0.1) for one in sampled]})
    found = {"metrics": metrics(job), "wrong": wrong_value(job), "stale": stale_copy(path)}
    leave()
    return found


def metrics(job: Job) -> list[Any]:
    """A step's metrics of users' own parts, and the built-in figure that one of them is."""
    section = ObjectiveSection.model_validate(PLUGINS)
    built = job.model()
    loss = losses.PolicyLoss(section, case.TEMPERATURE, case.VERSION, plugins=objective.load(section))
    batches = job.microbatches(section.aggregation, proximal=True)
    made = step.train_step(built, optimizer.build(job.config, built), batches, loss, lr=case.LR)
    return [made.figures["plugin_metrics"], made.figures["ratio_mean"]]


def wrong_value(job: Job) -> list[Any]:
    """A value that is not a number, in one row of one rank."""
    built = job.model()
    adam, before = optimizer.build(job.config, built), snapshot(built)
    section = ObjectiveSection(loss=f"{OWN}:breaks_later")
    loss = losses.PolicyLoss(section, case.TEMPERATURE, case.VERSION, plugins=objective.load(section))
    job.reference["behaviour"][3][-1] = -3.0
    try:
        step.train_step(built, adam, job.microbatches("token_mean", proximal=True), loss, lr=case.LR)
    except InvariantBroken as error:
        return [str(error), all(torch.equal(a, b) for a, b in zip(before, snapshot(built), strict=True))]
    return []


def stale_copy(path: Path) -> str:
    """A module that is not the same on both ranks."""
    here = path / f"rank{dist.get_rank()}"
    here.mkdir(exist_ok=True)
    (here / "own_loss.py").write_text(f"# copy {dist.get_rank()}\ndef loss(rows):\n    return rows.logprobs * 1.0\n")
    sys.path.insert(0, str(here))
    try:
        agree(objective.load(ObjectiveSection(loss="own_loss:loss")))
    except ConfigError as error:
        return str(error)
    finally:
        sys.path.remove(str(here))
    return "agreed"


if __name__ == "__main__":
    group.run(main)
