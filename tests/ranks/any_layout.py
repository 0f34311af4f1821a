"""Worker: a run saved under one layout and resumed under another computes the same as one that keeps its layout.
`any_layout.py RESULT REFERENCES JOB...`

A job is "SAVED" or, after that, "SAVED > LOADED", perhaps on another number of ranks. A layout is as of `lora.job_of`, such as
"ranks=4,tp=2,ep=2,distributed=1" or "ranks=2,tp=2,lora=per-expert".
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from asyncmoe import checkpoints
from asyncmoe.trainer import step
from asyncmoe.trainer.losses import SupervisedLoss
from asyncmoe.trainer.model import checkpoint as state
from asyncmoe.trainer.model import gpt, optimizer
from asyncmoe.weights.sender.gather import Gatherer, tensors_in
from tests.ranks import case, group
from tests.ranks.leaving import leave
from tests.ranks.lora import job_of
from tests.ranks.parity import Job, worst
from tests.saving import save

FIRST = 2
"""Steps before the save; afterwards as many as are left of `STEPS`."""
STEPS = 4


def main(path: str, *jobs: str) -> dict[str, Any]:
    return {job: worst(tried(Path(path), job)) for job in jobs}


def tried(path: Path, job: str) -> dict[str, Any]:
    """Save and continue; or resume, and return the differences of losses and weights from the continued run."""
    saved, _, loaded = job.partition(" > ")
    run = path / "runs" / saved
    begun = job_of(path, run, loaded or saved, **({} if "lora" in saved else {"router_bias_rate": case.BIAS_RATE}))
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


@torch.no_grad()
def forget(built: gpt.Model) -> None:
    """Overwrite everything that is saved."""
    for chunk in map(state.trained, built.chunks):
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
    for bucket, flat in Gatherer(built, 1 << 16, job.config.trainer.timeout_s, adapter=built.adapter is not None).run():
        found |= {} if flat is None else {name: value.clone() for name, value in tensors_in(bucket, flat).items()}
    return found


if __name__ == "__main__":
    group.run(main)
