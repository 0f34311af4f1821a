"""Worker: a run that is saved in one layout and goes on in another computes what the run that went on in its own does.
`any_layout.py RESULT REFERENCES JOB...`

A job is "VARIANT: SAVED" or, after that, "VARIANT: SAVED > LOADED", perhaps on another number of ranks. A layout is a list of the trainer's
settings, such as "tp=2,ep=2,distributed=1,ranks=4".
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from asyncmoe import checkpoints
from asyncmoe.trainer import step
from asyncmoe.trainer.losses import SupervisedLoss
from asyncmoe.trainer.model import checkpoint as state
from asyncmoe.trainer.model import gpt, mesh, optimizer
from asyncmoe.weights.sender.gather import Gatherer, tensors_in
from tests.ranks import case, group
from tests.ranks.leaving import leave
from tests.ranks.parity import Job, worst
from tests.saving import save

FIRST = 2
"""Steps before the save; afterwards as many as are left of `STEPS`."""
STEPS = 4


def main(result: Path, path: Path, jobs: list[str]) -> None:
    group.begin()
    found = {job: worst(tried(path, job)) for job in jobs}
    group.end(result, found)


def tried(path: Path, job: str) -> dict[str, Any]:
    """Save and go on; or go on from what was saved, and return how far losses and weights are from those of the run that went on."""
    variant, _, layouts = job.partition(": ")
    saved, _, loaded = layouts.partition(" > ")
    run = path / "runs" / variant / saved
    begun = begin(path / variant, run, loaded or saved)
    built = begun.model()
    adam = optimizer.build(begun.config, built)
    if loaded:
        forget(built)
        assert state.load(checkpoints.directory(run, FIRST), begun.config, built, adam) == FIRST
    else:
        train(begun, built, adam, FIRST)
        save(begun.config, FIRST, built, adam)
    losses, weights = train(begun, built, adam, STEPS - FIRST), gathered(begun, built)
    leave()
    if not loaded:
        if dist.get_rank() == 0:
            torch.save({"losses": losses, "weights": weights}, run / "went-on.pt")
        dist.barrier()
        return {}
    if dist.get_rank() != 0:
        return {"losses": 0.0, "weights": 0.0}
    wanted = torch.load(run / "went-on.pt", weights_only=True)
    assert weights.keys() == wanted["weights"].keys()
    return {
        "losses": max(abs(one - other) for one, other in zip(losses, wanted["losses"], strict=True)),
        "weights": max(float((value.float() - wanted["weights"][name].float()).abs().max()) for name, value in weights.items()),
    }


def begin(folder: Path, run: Path, layout: str) -> Job:
    settings: dict[str, Any] = {}
    for key, _, value in (part.partition("=") for part in layout.split(",")):
        settings[key] = int(value) if value.isdecimal() else value
    distributed = {"distributed": bool(settings.pop("distributed"))} if "distributed" in settings else {"distributed": None}
    assert settings["ranks"] == dist.get_world_size()
    config = case.config(folder, pack=True, optimizer=distributed, router_bias_rate=case.BIAS_RATE, **settings)
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": run})})
    return Job(folder, config, mesh.start(config.trainer), torch.load(folder / "reference.pt", weights_only=False))


@torch.no_grad()
def forget(built: gpt.Model) -> None:
    """Fill all that is saved with another value."""
    for chunk in built.chunks:
        for tensor in (*chunk.parameters(), *chunk.buffers()):
            if tensor.is_floating_point():
                tensor.fill_(0.125)


def train(job: Job, built: gpt.Model, adam: optimizer.MegatronOptimizer, steps: int) -> list[float]:
    return [
        step.train_step(built, adam, job.microbatches("token_mean"), SupervisedLoss(), lr=case.LR * (1 + number)).loss
        for number in range(steps)
    ]


def gathered(job: Job, built: gpt.Model) -> dict[str, torch.Tensor]:
    """Whole tensors, as for an export; on rank 0."""
    found: dict[str, torch.Tensor] = {}
    for bucket, flat in Gatherer(built, 1 << 16, job.config.trainer.timeout_s).run():
        found |= {} if flat is None else {name: value.clone() for name, value in tensors_in(bucket, flat).items()}
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
