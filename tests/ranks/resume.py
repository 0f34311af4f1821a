"""Worker: a run that is saved after a step and goes on under another layout ends where one that was not interrupted does.

`resume.py RESULT REFERENCES`, on two ranks.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from asyncmoe.trainer import mesh, model, optimizer, state, step
from asyncmoe.trainer.losses import SupervisedLoss
from tests.ranks import case
from tests.ranks.parity import Job, expected, worst

SAVED = {"ranks": 2, "tp": 2}
LOADED: dict[str, dict[str, Any]] = {"same": {"tp": 2}, "data": {}, "pipeline": {"pp": 2}, "uneven": {"pp": 2, "first_stage_layers": 3}}


def main(result: Path, path: Path) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    reference = torch.load(path / "reference.pt", weights_only=False)
    found: dict[str, Any] = {}
    for distributed in (False, True):
        run = result.parent / f"distributed-{distributed}"
        job = start(path, run, reference, distributed, SAVED)
        built = job.model()
        adam = optimizer.build(job.config, built)
        train(job, built, adam, steps=1)
        checkpoint = state.save(job.config, 1, built, adam)
        mesh.leave()
        for name, sizes in LOADED.items():
            job = start(path, run, reference, distributed, {"ranks": 2} | sizes)
            built = job.model()
            adam = optimizer.build(job.config, built)
            assert state.load(checkpoint, job.config, built, adam) == 1
            train(job, built, adam, steps=case.STEPS - 1)
            errors = [float((value - model.parameters(built)[n]).abs().max()) for n, value in expected(built, path / "trained")]
            found[f"{'distributed' if distributed else 'plain'}-{name}"] = worst({"weights": max(errors)})["weights"]
            mesh.leave()
    if dist.get_rank() == 0:
        result.write_text(json.dumps(found))
    mesh.stop()


def start(path: Path, run: Path, reference: dict[str, Any], distributed: bool, sizes: dict[str, Any]) -> Job:
    config = case.config(path, **sizes, pack=True, optimizer={"distributed": distributed})
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": run})})
    return Job(path, config, mesh.start(config.trainer), reference)


def train(job: Job, built: model.Model, adam: optimizer.MegatronOptimizer, steps: int) -> None:
    for _ in range(steps):
        step.train_step(built, adam, job.microbatches("token_mean"), SupervisedLoss(), lr=case.LR)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
