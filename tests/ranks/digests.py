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
from asyncmoe.trainer.model.differences import differences
from asyncmoe.trainer.model.digests import StateDigests
from tests.ranks import case, group
from tests.ranks.any_layout import forget
from tests.ranks.async_save import contents
from tests.ranks.leaving import leave
from tests.ranks.lora import job_of
from tests.ranks.parity import Job
from tests.saving import save

KINDS = {"weight": [""], "exp_avg": ["optimizer.state.exp_avg."], "exp_avg_sq": ["optimizer.state.exp_avg_sq."]}
MASTERS = {"param": ["optimizer.state.param.", "optimizer.state.fp32_param."]}


def main(path: str, *jobs: str) -> dict[str, Any]:
    return {job: tried(Path(path), job) for job in jobs}


def tried(path: Path, job: str) -> dict[str, Any]:
    saved, _, loaded = job.partition(" > ")
    run = path / "digested" / saved
    begun = job_of(path, run, loaded or saved, **({} if "lora" in saved else {"router_bias_rate": case.BIAS_RATE}))
    built = begun.model()
    adam = optimizer.build(begun.config, built)
    if loaded:
        forget(built)
        digests = StateDigests(built, adam)  # which must not keep the memory of states that the load replaces
        state.load(checkpoints.directory(run, 1), begun.config, built, adam)
    else:
        digests = StateDigests(built, adam)
        train(begun, built, adam)
        save(begun.config, 1, built, adam)
    directory = checkpoints.directory(run, 1)
    whole = contents(directory)
    weights, masters = canonical(whole, KINDS["weight"]), built.dtype == torch.bfloat16
    wanted = {kind: canonical(whole, fronts) for kind, fronts in {**KINDS, **(MASTERS if masters else {})}.items()}
    kinds = [kind for kind in wanted if kind != "weight"]
    found = {
        "tensors": digests.tensors,
        "unnamed": sorted(weights.keys() ^ set(digests.tensors)),
        "weights": wrong(digests, digests.weights(), {"weight": wanted["weight"]}),
        "optimizer": wrong(digests, digests.optimizer(), {kind: wanted[kind] for kind in kinds}),
        "equal": differences(directory, built),
        "poked": [] if masters else [poked(directory, built, digests, name, weights[name]) for name in some(digests.tensors)],
    }
    found["gradient"], found["scaled"] = train(begun, built, adam, digests)
    leave()
    assert all(one == found for one in group.everyone(found))
    return found


def canonical(whole: Mapping[str, torch.Tensor], fronts: list[str]) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint of one kind by their canonical names; layers that it stacks, one by one."""
    found: dict[str, torch.Tensor] = {}
    for key, value in whole.items():
        name = next((key.removeprefix(front) for front in fronts if key.startswith(front)), None)
        if name is None or name.startswith("optimizer."):
            continue
        if re.search(r"\blayers\.\d", name) or "layers." not in name:
            found[name] = value
        else:
            found |= {name.replace("layers.", f"layers.{number}."): one for number, one in enumerate(value)}
    return found


def wrong(digests: StateDigests, values: np.ndarray, wanted: Mapping[str, Mapping[str, torch.Tensor]]) -> list[str]:
    """Names of tensors whose digest is not what its definition makes of whole tensors."""
    sums = [
        sum(defined(seed_of(f"{kind} {name}"), tensors[name]) for kind, tensors in wanted.items() if name in tensors)
        for name in digests.tensors
    ]
    return [name for name, value, want in zip(digests.tensors, values.tolist(), sums, strict=True) if value != want % (1 << 64)]


def defined(seed: int, tensor: torch.Tensor) -> int:
    bits = tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()]).numpy().reshape(-1)
    words = bits.view(f"u{tensor.element_size()}").astype(np.uint64)
    words += np.arange(1, len(words) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return int((words ^ words >> np.uint64(31)).sum(dtype=np.uint64))


def some(names: tuple[str, ...]) -> list[str]:
    """The first tensor, and one that ranks have in parts which Megatron saves as two."""
    return [names[0], next(name for name in reversed(names) if "fc1.weight" in name or "gate_proj.b" in name)]


@torch.no_grad()
def poked(directory: Path, built: gpt.Model, digests: StateDigests, name: str, whole: torch.Tensor) -> dict[str, Any]:
    """Change one element, which is found by its value, in every copy: the names of changed digests, and what `differences` says of it."""
    before, index = digests.weights(), int(whole.abs().argmax())
    value = whole.reshape(-1)[index]
    live = [tensor for chunk in map(state.trained, built.chunks) for tensor in (*chunk.parameters(), *chunk.buffers())]
    copies = [(tensor, tensor == value) for tensor in live if tensor.dtype == value.dtype]
    for tensor, hit in copies:
        tensor[hit] = 2 * value
    changed = [one for one, old, new in zip(digests.tensors, before, digests.weights(), strict=True) if old != new]
    seen = [
        [
            one.name,
            one.elements,
            one.first - index,
            one.last - index,
            one.largest / abs(float(value)),
            one.magnitude - abs(float(value)),
        ]
        for one in differences(directory, built)
    ]
    for tensor, hit in copies:
        tensor[hit] = value
    return {"name": name, "changed": changed, "seen": seen}


def train(job: Job, built: gpt.Model, adam: Any, digests: StateDigests | None = None) -> tuple[list[int], list[str]]:
    """Take a step: digests of its gradients, and the names of those that another gradient of one parameter changes."""
    seen: list[np.ndarray] = []

    def guard(values: Mapping[str, float]) -> bool:
        if digests is not None and "grad_norm" in values:
            seen.extend([digests.gradient(0), digests.gradient(0), digests.gradient(1)])
            trained = (one for name, one in built.chunks[-1].named_parameters() if one.requires_grad and "output_layer" not in name)
            if job.mesh.last_stage:
                list(trained)[-1].main_grad.mul_(2)
            seen.append(digests.gradient(0))
        return True

    step.train_step(built, adam, job.microbatches("token_mean"), SupervisedLoss(), lr=case.LR, guard=guard)
    if digests is None:
        return [], []
    first, again, later, scaled = seen
    assert np.array_equal(first, again)
    assert [name for name, one, other in zip(digests.tensors, first, later, strict=True) if one == other] == [
        name for name in digests.tensors if name.endswith("expert_bias")
    ]
    return first.tolist(), [name for name, one, other in zip(digests.tensors, first, scaled, strict=True) if one != other]


if __name__ == "__main__":
    group.run(main)
