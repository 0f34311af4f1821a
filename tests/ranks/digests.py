"""Worker: digests of a trainer's state against those of the whole tensors in its checkpoint. `digests.py RESULT REFERENCES JOB...`

A job is as in any_layout.py: "SAVED" trains a step and saves, "SAVED > LOADED" loads that under another layout.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncmoe import checkpoints
from asyncmoe.reshard.element_digest import seed_of
from asyncmoe.trainer import step
from asyncmoe.trainer.losses import SupervisedLoss
from asyncmoe.trainer.model import checkpoint as state
from asyncmoe.trainer.model import gpt, optimizer
from asyncmoe.trainer.model.differences import TensorDifference, differences
from asyncmoe.trainer.model.digests import StateDigests
from tests.ranks import case, group
from tests.ranks.any_layout import forget
from tests.ranks.async_save import contents
from tests.ranks.leaving import leave
from tests.ranks.lora import job_of
from tests.ranks.parity import Job
from tests.saving import save

FRONTS = {
    "weight": [""],
    "exp_avg": ["optimizer.state.exp_avg."],
    "exp_avg_sq": ["optimizer.state.exp_avg_sq."],
    "param": ["optimizer.state.param.", "optimizer.state.fp32_param."],
}
"""What the names of a kind of value begin with in a checkpoint."""


def main(path: str, *jobs: str) -> dict[str, Any]:
    return {job: tried(Path(path), job) for job in jobs}


def tried(path: Path, job: str) -> dict[str, Any]:
    saved, _, loaded = job.partition(" > ")
    run = path / "digested" / saved
    begun = job_of(path, run, loaded or saved, **({} if "lora" in saved else {"router_bias_rate": case.BIAS_RATE}))
    built = begun.model()
    adam = optimizer.build(begun.config, built)
    digests = StateDigests(built, adam)
    if loaded:
        forget(built)
        state.load(checkpoints.directory(run, 1), begun.config, built, adam)
    else:
        train(begun, built, adam, digests)
        save(begun.config, 1, built, adam)
    directory = checkpoints.directory(run, 1)
    whole, wide = contents(directory), built.dtype == torch.float32
    found = {
        "tensors": digests.tensors,
        "weights": wrong(digests, digests.weights(), whole, "weight"),
        "optimizer": wrong(digests, digests.optimizer(), whole, "exp_avg", "exp_avg_sq", *([] if wide else ["param"])),
        "equal": not differences(directory, built),
        "found": not wide or doubled(directory, built, digests, canonical(whole, "weight")),
    }
    found |= train(begun, built, adam, digests)
    leave()
    assert all(one == found for one in group.everyone(found))
    return found


def canonical(whole: Mapping[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint of one kind by their canonical names; layers that it stacks, one by one."""
    found: dict[str, torch.Tensor] = {}
    for front in FRONTS[kind]:
        for name, value in ((key.removeprefix(front), value) for key, value in whole.items() if key.startswith(front)):
            if "layers." in name and not re.search(r"\blayers\.\d", name):
                found |= {name.replace("layers.", f"layers.{number}."): one for number, one in enumerate(value)}
            elif not name.startswith("optimizer."):
                found[name] = value
    return found


def wrong(digests: StateDigests, values: np.ndarray, whole: Mapping[str, torch.Tensor], *kinds: str) -> list[str]:
    """Names of tensors whose digest is not what its definition makes of whole tensors."""
    wanted = dict.fromkeys(digests.tensors, 0)
    for kind in kinds:
        for name, tensor in canonical(whole, kind).items():
            wanted[name] += defined(seed_of(f"{kind} {name}"), tensor)
    return [name for name, value in zip(digests.tensors, values.tolist(), strict=True) if value != wanted[name] % (1 << 64)]


def defined(seed: int, tensor: torch.Tensor) -> int:
    item = tensor.element_size()
    bits = tensor.contiguous().view({2: torch.int16, 4: torch.int32}[item]).numpy().reshape(-1).view(f"u{item}")
    words = bits + np.arange(1, len(bits) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return int((words ^ words >> np.uint64(31)).sum(dtype=np.uint64))


@torch.no_grad()
def doubled(directory: Path, built: gpt.Model, digests: StateDigests, whole: Mapping[str, torch.Tensor]) -> bool:
    """Whether one element, doubled in every copy, changes one digest, and is what differs. Its tensor is one that ranks have parts of."""
    name = next(name for name in reversed(digests.tensors) if "fc1.weight" in name or "gate_proj.b" in name)
    flat, before = whole[name].reshape(-1), digests.weights()
    index = int(flat.abs().argmax())
    size = abs(float(flat[index]))
    copies = [(one, one == flat[index]) for chunk in map(state.trained, built.chunks) for one in chunk.parameters()]
    for tensor, hit in copies:
        tensor[hit] *= 2
    changed = [one for one, old, new in zip(digests.tensors, before, digests.weights(), strict=True) if old != new]
    seen = differences(directory, built)
    for tensor, hit in copies:
        tensor[hit] /= 2
    return changed == [name] and seen == [TensorDifference(name, 1, index, index, size, size)]


def train(job: Job, built: gpt.Model, adam: Any, digests: StateDigests) -> dict[str, Any]:
    """Take a step: digests of its gradients, and the names of those that another gradient of one parameter changes."""
    seen: list[np.ndarray] = []

    def guard(values: Mapping[str, float]) -> bool:
        if "grad_norm" in values:
            seen.append(digests.gradient())
            trained = (one for name, one in built.chunks[-1].named_parameters() if one.requires_grad and "output_layer" not in name)
            if job.mesh.last_stage:
                list(trained)[-1].main_grad.mul_(2)
            seen.append(digests.gradient())
        return True

    step.train_step(built, adam, job.microbatches("token_mean"), SupervisedLoss(), lr=case.LR, guard=guard)
    first, scaled = seen
    return {
        "gradient": first.tolist(),
        "scaled": [name for name, one, other in zip(digests.tensors, first, scaled, strict=True) if one != other],
    }


if __name__ == "__main__":
    group.run(main)
