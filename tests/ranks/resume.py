"""Worker: a run that is saved after a step and goes on under another layout ends where one that was not interrupted does, in
every rank's shards and in whole tensors gathered from them.

`resume.py RESULT REFERENCES KIND-LOADED...`, on two ranks: the optimizer is plain or distributed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from asyncmoe.models.hf_checkpoint import HFCheckpoint
from asyncmoe.trainer import step
from asyncmoe.trainer.losses import SupervisedLoss
from asyncmoe.trainer.model import checkpoint as state
from asyncmoe.trainer.model import gpt, mesh, optimizer
from asyncmoe.weights.sender.gather import Gatherer, tensors_in
from tests.ranks import case, group
from tests.ranks.leaving import leave
from tests.ranks.parity import Job, expected, worst
from tests.saving import save

SAVED: dict[str, dict[str, Any]] = {"tensor": {"tp": 2}, "chunks": {"pp": 2, "vpp": 2}}
LOADED: dict[str, tuple[str, dict[str, Any]]] = {
    "same": ("tensor", {"tp": 2}),
    "data": ("tensor", {}),
    "pipeline": ("tensor", {"pp": 2}),
    "uneven": ("tensor", {"pp": 2, "first_stage_layers": 3}),
    "interleaved": ("tensor", {"pp": 2, "vpp": 2}),
    "from-interleaved": ("chunks", {"tp": 2}),
}
"""What a run is saved under, and the sizes that it goes on under."""


def main(result: Path, path: Path, wanted: list[str]) -> None:
    group.begin()
    reference = torch.load(path / "reference.pt", weights_only=False)
    found: dict[str, Any] = {}
    checkpoints: dict[tuple[bool, str], Path] = {}
    for resumed in wanted:
        kind, _, name = resumed.partition("-")
        distributed, (origin, sizes) = kind == "distributed", LOADED[name]
        run = result.parent / f"distributed-{distributed}" / origin
        if (distributed, origin) not in checkpoints:
            checkpoints[distributed, origin] = saved(path, run, reference, distributed, SAVED[origin])
        job = start(path, run, reference, distributed, sizes)
        built = job.model()
        adam = optimizer.build(job.config, built)
        assert state.load(checkpoints[distributed, origin], job.config, built, adam) == 1
        train(job, built, adam, steps=case.STEPS - 1)
        errors = [float((value - built.weights()[n]).abs().max()) for n, value in expected(built, path / "trained")]
        found[resumed] = worst({"weights": max(errors + gathered(job, built))})["weights"]
        leave()
    group.end(result, found)


def saved(path: Path, run: Path, reference: dict[str, Any], distributed: bool, sizes: dict[str, Any]) -> Path:
    """A checkpoint of the first step."""
    job = start(path, run, reference, distributed, sizes)
    built = job.model()
    adam = optimizer.build(job.config, built)
    train(job, built, adam, steps=1)
    checkpoint = save(job.config, 1, built, adam)
    leave()
    return checkpoint


def gathered(job: Job, built: gpt.Model) -> list[float]:
    """Errors of the whole tensors that rank 0 gathers, as for an export."""
    wanted, errors = HFCheckpoint(job.path / "trained"), []
    for bucket, flat in Gatherer(built, 1 << 16, job.config.trainer.timeout_s).run():
        for name, value in () if flat is None else tensors_in(bucket, flat).items():
            errors.append(float((value - wanted.read(name, tuple(value.shape), value.dtype)).abs().max()))
    return errors


def start(path: Path, run: Path, reference: dict[str, Any], distributed: bool, sizes: dict[str, Any]) -> Job:
    config = case.config(path, ranks=2, **sizes, pack=True, optimizer={"distributed": distributed})
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": run})})
    return Job(path, config, mesh.start(config.trainer), reference)


def train(job: Job, built: gpt.Model, adam: optimizer.MegatronOptimizer, steps: int) -> None:
    for _ in range(steps):
        step.train_step(built, adam, job.microbatches("token_mean"), SupervisedLoss(), lr=case.LR)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
