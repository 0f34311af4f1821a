"""Worker: a run with adapters that is saved after a step and goes on under another layout ends where one that was not interrupted does.

`lora_resume.py RESULT REFERENCES SAVED LOADED...`: layouts, such as "tp=2,ep=2".
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from asyncmoe.trainer import losses, step
from asyncmoe.trainer.lora import attach
from asyncmoe.trainer.model import checkpoint as state
from asyncmoe.trainer.model import mesh, optimizer
from tests.ranks import case, group, lora_case, parity
from tests.ranks.leaving import leave
from tests.ranks.lora import Job
from tests.saving import save


def main(result: Path, path: Path, saved: str, loaded: list[str]) -> None:
    group.begin()
    found: dict[str, float] = {}
    for name, distributed in (("per-expert", True), ("shared-outer", False)):
        run = result.parent / f"{result.stem}-{name}"
        checkpoint, size = first_step(path, run, name, distributed, saved)
        found |= {f"{name} {layout}": goes_on(path, run, name, distributed, layout, checkpoint) for layout in loaded}
        found[f"{name} bytes"] = size
    group.end(result, found)


def first_step(path: Path, run: Path, name: str, distributed: bool, sizes: str) -> tuple[Path, int]:
    """A checkpoint of the first step, and its size."""
    job = begin(path, run, name, distributed, sizes)
    built = job.model()
    adam = optimizer.build(job.config, built)
    train(job, built, adam, steps=1)
    checkpoint = save(job.config, 1, built, adam)
    leave()
    return checkpoint, sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())


def goes_on(path: Path, run: Path, name: str, distributed: bool, sizes: str, checkpoint: Path) -> float:
    """The largest error of a half, after the remaining steps from other values than those saved."""
    job = begin(path, run, name, distributed, sizes)
    job.start = True
    built = job.model()
    adam = optimizer.build(job.config, built)
    assert state.load(checkpoint, job.config, built, adam) == 1
    train(job, built, adam, steps=case.STEPS - 1)
    mine, wanted = attach.parameters(built.chunks), job.expected(built, job.oracle["trained"])
    error: float = parity.worst({"error": max(float((mine[n].data - want).abs().max()) for n, want in wanted.items())})["error"]
    leave()
    return error


def begin(path: Path, run: Path, name: str, distributed: bool, sizes: str) -> Job:
    folder = path / lora_case.ADAPTERS[name][0]
    reference, oracle = (torch.load(folder / file, weights_only=False) for file in ("reference.pt", f"{name}.pt"))
    trainer: dict[str, Any] = {"ranks": dist.get_world_size(), **case.sizes_of(sizes)}
    config = case.config(folder, **trainer, pack=True, optimizer={"distributed": distributed})
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": run})})
    return Job(folder, config, mesh.start(config.trainer), reference, lora_case.section(name), oracle)


def train(job: Job, built: Any, adam: Any, steps: int) -> None:
    for _ in range(steps):
        step.train_step(built, adam, job.microbatches("token_mean"), losses.SupervisedLoss(), lr=case.LR)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
