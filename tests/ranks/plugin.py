"""Worker: users' own copies of the built-in loss, weight and model family train the same bits. `plugin.py RESULT PATH LAYOUT...`

PATH holds the model, in `hf`, and gets a module for each rank, which differ.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from asyncmoe.config import Config
from asyncmoe.config.objective import ObjectiveSection
from asyncmoe.errors import ConfigError, InvariantBroken
from asyncmoe.models import load_hf_config, with_family
from asyncmoe.trainer import losses, objective, step
from asyncmoe.trainer.loop import agree
from asyncmoe.trainer.model import gpt, mesh, optimizer
from tests.ranks import case, group
from tests.ranks.leaving import leave
from tests.ranks.parity import Job, snapshot

OWN = "tests.unit.plugin_functions"
SECTION: dict[str, Any] = {"clip_low": 0.1, "clip_high": 0.15, "aggregation": "sequence_mean", "updates_per_batch": 2}
PLUGINS: dict[str, Any] = {
    "aggregation": "sequence_mean",
    "updates_per_batch": 2,
    "loss": f"{OWN}:ppo_with_metrics",
    "loss_options": {"low": 0.1, "high": 0.15},
    "correction": {"weight": f"{OWN}:truncated"},
}


def main(result: Path, path: Path, layouts: list[str]) -> None:
    group.begin()
    mine = {layout: try_layout(path, layout) for layout in layouts}
    group.end(result, group.everyone(mine))


def try_layout(path: Path, layout: str) -> dict[str, Any]:
    config = case.config(path, ranks=dist.get_world_size(), **case.sizes_of(layout))
    place = mesh.start(config.trainer)
    reference: dict[str, Any] = {}
    reference["proximal"] = sampled_logprobs(config, place)
    noise = np.random.default_rng(5)
    reference["behaviour"] = [logp + noise.normal(0, 0.2, len(logp)).astype(np.float32) for logp in reference["proximal"]]
    built_in = three_steps(Job(path, config, place, reference), "auto", ObjectiveSection(**SECTION))
    own = three_steps(Job(path, config, place, reference), f"{OWN}:SAME", ObjectiveSection.model_validate(PLUGINS))
    found = {
        "same": all(torch.equal(a, b) for a, b in zip(built_in["weights"], own["weights"], strict=True)),
        "moved": any(not torch.equal(a, b) for a, b in zip(built_in["weights"], built_in["start"], strict=True)),
        "steps": [one.pop("steps") for one in (built_in, own)],
        "metrics": own["metrics"],
        "means": built_in["means"],
        "clipped": built_in["clipped"],
        "wrong": wrong_value(Job(path, config, place, reference)),
        "stale": stale_copy(path),
    }
    leave()
    return found


def build(job: Job, family: str) -> gpt.Model:
    built = gpt.build(with_family(load_hf_config(job.path / "hf"), family), job.config, job.mesh)
    gpt.load_hf(built, job.path / "hf")
    return built


def sampled_logprobs(config: Config, place: mesh.Mesh) -> list[np.ndarray]:
    path = config.model.path.parent
    zeros = [np.zeros(n, np.float32) for n in case.LENGTHS]
    job = Job(path, config, place, {"behaviour": zeros})
    found: Mapping[int, np.ndarray] = step.logprobs_only(build(job, "auto"), job.microbatches("token_mean"), case.LENGTHS, case.TEMPERATURE)
    return [found[i] for i in range(len(case.LENGTHS))]


def three_steps(job: Job, family: str, section: ObjectiveSection) -> dict[str, Any]:
    built = build(job, family)
    start = snapshot(built)
    adam = optimizer.build(job.config, built)
    loss = losses.PolicyLoss(section, case.TEMPERATURE, case.VERSION, plugins=objective.load(section))
    batches = job.microbatches(section.aggregation, proximal=True)
    seen = [step.train_step(built, adam, batches, loss, lr=case.LR) for _ in range(case.STEPS)]
    return {
        "start": start,
        "weights": snapshot(built),
        "steps": [(one.loss, one.grad_norm, one.entropy) for one in seen],
        "metrics": [one.figures["plugin_metrics"] for one in seen],
        "means": [one.figures["ratio_mean"] for one in seen],
        "clipped": seen[-1].figures["clip_fraction"],
    }


def wrong_value(job: Job) -> list[Any]:
    """A value that is not a number, in one row of one rank."""
    built = build(job, "auto")
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
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
