"""Worker: asynchronous checkpoints equal synchronous ones.
`async_save.py RESULT REFERENCES LAYOUT...`

A layout is a list of the trainer's settings, such as "tp=2,dtype=bfloat16,distributed=1"; lora=NAME trains an adapter of lora_case.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader as loader
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from asyncmoe import checkpoints
from asyncmoe.checkpoints import manifest
from asyncmoe.plan import budget
from asyncmoe.platform import collectives
from asyncmoe.platform.megatron import any_layout
from asyncmoe.trainer import losses, step
from asyncmoe.trainer.model import checkpoint, gpt, optimizer
from asyncmoe.trainer.model.checkpoint_saver import Saver
from tests.ranks import case, group, lora, parity
from tests.ranks.leaving import leave


def main(path: str, *layouts: str) -> dict[str, Any]:
    runs = group.result().with_suffix("")  # another world's run of the same layout would have later checkpoints
    return {layout: parity.worst(compared(Path(path), runs / layout, layout)) for layout in layouts}


def compared(path: Path, run: Path, layout: str) -> dict[str, Any]:
    """Save each step both ways, asynchronously during the next step; compare files and loaded values."""
    job = lora.job_of(path, run, layout, async_save=True)
    built = job.model()
    adam = optimizer.build(job.config, built)
    saver = Saver(job.config, built, adam)
    differ: list[str] = []
    plain, copied = run / "plain", 0
    for number in (1, 2, 3):
        train(job, built, adam)
        plainly(moved(job, plain), number, built, adam)
        saver.save(number)
        buckets = saver._under_way.planned._buckets
        copied = max(collectives.everyones(sum(tensor.nbytes for _, _, (_, tensors) in buckets for _, tensor in tensors)))
        train(job, built, adam)  # every parameter changes while the thread writes
        saver.settle()
        differ += [f"{number}: saved {saved}" for saved in [saver.saved()] if [step for step, _ in saved] != [number]]
        differ += different(checkpoints.directory(plain, number), checkpoints.directory(run, number))
        dist.barrier()
    whole = checkpoints.directory(run, 3)
    if dist.get_rank() == 0:
        listed = manifest.read(whole)
        differ += [f"manifest: {fault}" for fault in [manifest.changed(whole, listed, listed)] if fault is not None]
    differ += loaded(job, plain, run)
    settings = budget.training(job.config, built.hf, cpu=True)
    settings = replace(settings, microbatch=replace(settings.microbatch, dtype=str(built.dtype).removeprefix("torch.")))
    planned = max(stage.host["trainer.async_save"] for stage in budget.memory.trainer(built.hf, built.parallel, settings))
    leave()
    return {
        "differ": differ,
        "copied_over_planned": copied / planned,
        "planned_once": saver._planner._strategy.validated_cache_reuse,
        "names": sorted(entry.name for entry in (run / "checkpoints").iterdir()) == ["step-00000002", "step-00000003"],
    }


def moved(job: Any, run: Path) -> Any:
    return job.config.model_copy(update={"run": job.config.run.model_copy(update={"dir": run})})


def plainly(config: Any, number: int, built: gpt.Model, adam: Any) -> None:
    """Save like Megatron, synchronously."""
    if dist.get_rank() == 0:
        checkpoints.start(config.run.dir, number)
    dist.barrier()
    state = checkpoint.sharded_state(built, adam, loading=False)
    checkpoint.dist_checkpointing.save(state, str(checkpoints.temporary(config.run.dir, number)))
    if dist.get_rank() == 0:
        checkpoints.finish(config.run.dir, number, checkpoint.facts_now(config, number, built), checkpoints.Retention(2))
    dist.barrier()


def train(job: Any, built: gpt.Model, adam: Any) -> None:
    step.train_step(built, adam, job.microbatches("token_mean"), losses.SupervisedLoss(), lr=case.LR)


def different(one: Path, other: Path) -> list[str]:
    """Differences between two checkpoints: tensors by their bits, common state."""
    if dist.get_rank() != 0:
        return []
    ours, theirs = (contents(path) for path in (one, other))
    assert len(ours) > 10
    found = [f"{one.name}: only in one: {name}" for name in sorted(ours.keys() ^ theirs.keys())]
    for name in sorted(ours.keys() & theirs.keys()):
        a, b = ours[name], theirs[name]
        if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            found.append(f"{one.name}: {name}")
    common = [torch.load(path / "common.pt", weights_only=True) for path in (one, other)]
    return found if common[0] == common[1] else [*found, f"{one.name}: common"]


def memory(built: gpt.Model, adam: Any) -> list[torch.Tensor]:
    """All tensors that a checkpoint is loaded into: the trained weights, and the optimizers' state."""
    states = [checkpoint.trained(chunk).state_dict() for chunk in built.chunks]
    found = [tensor for state in states for tensor in state.values() if isinstance(tensor, torch.Tensor)]
    for one in any_layout.optimizers(adam):
        found += [weight for group in one.optimizer.param_groups for weight in group["params"]]
        found += [value for state in one.optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    return found


def contents(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, whole."""
    saved = FileSystemReader(path).read_metadata().state_dict_metadata.items()
    state = {name: torch.empty(one.size, dtype=one.properties.dtype) for name, one in saved if isinstance(one, TensorStorageMetadata)}
    loader.load(state, storage_reader=FileSystemReader(path), no_dist=True)
    return state


def loaded(job: Any, plain: Path, run: Path) -> list[str]:
    """Differences after the trainer has loaded both, in weights and in the optimizer's own memory."""
    states = []
    for place in (plain, run):
        built = job.model()
        adam = optimizer.build(job.config, built)
        assert checkpoint.load(checkpoints.directory(place, 3), job.config, built, adam) == 3
        states.append([tensor.clone() for tensor in memory(built, adam)])
    same = len(states[0]) == len(states[1]) > 0 and all(torch.equal(a, b) for a, b in zip(*states, strict=True))
    return [] if all(collectives.everyones(same)) else ["loaded"]


if __name__ == "__main__":
    group.run(main)
