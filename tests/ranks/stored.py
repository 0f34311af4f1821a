"""Worker: what a bfloat16 model makes of a family's weights that are float32, in a step, a checkpoint of the run, an export and an engine.
`stored.py RESULT REFERENCES LAYOUT:VARIANTS`, with one folder of references a variant, as parity.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from asyncmoe.models import EngineParallel, family_of
from asyncmoe.models.hf_checkpoint import HFCheckpoint
from asyncmoe.models.payload import Payload
from asyncmoe.reshard import exchange, plan
from asyncmoe.reshard.checksum import engine_checksums as checksums_of
from asyncmoe.reshard.torch_transport import TorchTransport
from asyncmoe.trainer import step
from asyncmoe.trainer.losses import SupervisedLoss
from asyncmoe.trainer.model import checkpoint as state
from asyncmoe.trainer.model import gpt, mesh, optimizer
from asyncmoe.weights.sender.expected_checksums import ExpectedChecksums
from asyncmoe.weights.sender.gather import Gatherer
from asyncmoe.weights.sender.hf_files import SHARD_BYTES, write_hf
from asyncmoe.weights.sender.sources import WeightSources
from tests.checksums import engine_checksums
from tests.ranks import case, group, parity
from tests.ranks.leaving import leave
from tests.saving import save

RATE = 0.01


def main(path: str, wanted: str) -> dict[str, Any]:
    layout, _, variants = wanted.partition(":")
    found = {}
    for variant in variants.split("+"):
        sizes = {"ranks": dist.get_world_size(), **case.settings_of(layout)}
        out, folder = group.result().parent / f"stored-{variant}-{layout.replace(',', '-')}", Path(path, variant)
        config = case.config(folder, run=out / "run", **sizes, dtype="bfloat16", router_bias_rate=RATE, recompute="full")
        job = parity.Job(folder, config, mesh.start(config.trainer), torch.load(folder / "reference.pt", weights_only=False))
        found[variant] = parity.worst(stored(job, out))
        leave()
    return found


def stored(job: parity.Job, out: Path) -> dict[str, Any]:
    built = job.model()
    before = snapshot(built)
    on_disk = dict(gpt.local_tensors(built, HFCheckpoint(job.path / "hf")))
    loaded = {name: torch.equal(value, on_disk[name].to(value.dtype)) for name, value in before.items()}
    adam = optimizer.build(job.config, built)
    step.logprobs_only(built, job.microbatches("token_mean"), case.LENGTHS, case.TEMPERATURE)  # which counts for nothing
    step.train_step(built, adam, job.microbatches("token_mean"), SupervisedLoss(), lr=case.LR)
    after = snapshot(built)
    biases = [name for name in after if name.endswith("expert_bias")]

    checkpoint = save(job.config, 1, built, adam)
    again = job.model()
    state.load(checkpoint, job.config, again, None)
    write_hf(built, job.path / "hf", out / "export", Gatherer(built, SHARD_BYTES, job.config.trainer.timeout_s))
    dist.barrier()
    exported = gpt.build(built.hf, job.config, job.mesh)
    gpt.load_hf(exported, out / "export")
    return {
        "loaded": [name for name, same in loaded.items() if not same],
        "biases": len(biases) * 1.0,
        "biases_wide": all(after[name].dtype == torch.float32 for name in biases),
        "moved": any(not torch.equal(after[name], before[name]) for name in biases),
        "resumed": [name for name, value in snapshot(again).items() if not torch.equal(value, after[name])],
        "exported": [name for name, value in snapshot(exported).items() if not torch.equal(value, after[name])],
        "engine": engine(job, built, out / "export"),
    }


def snapshot(built: gpt.Model) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in built.weights().items()}


def engine(job: parity.Job, built: gpt.Model, exported: Path) -> list[str]:
    """Names of an engine's parameters, sent from the trainer's ranks, that are not those made of the exported checkpoint."""
    family, checkpoint = family_of(built.hf), HFCheckpoint(exported)
    on_disk = family.hf_layout(built.hf, "bfloat16").storages
    tensors = {name: checkpoint.read(name, one.shape, getattr(torch, one.dtype)) for name, one in on_disk.items()}
    section = job.config.engines.model_copy(update={"tp": 2, "ep": 2, "dtype": "bfloat16"})
    sources = WeightSources(built)
    sources.refresh()
    wanted = engine_checksums(built.hf, section, tensors)
    sync = job.config.sync.model_copy(update={"verify_every": 1, "bucket_bytes": 20_000})
    verified = ExpectedChecksums(job.config.model_copy(update={"engines": section, "sync": sync}), built).of_next()
    wrong = [] if job.mesh.rank else ["verified"] * (verified != wanted)
    for rank, expected in enumerate(wanted):
        layout = family.sglang_layout(built.hf, EngineParallel(2, 2), rank, "bfloat16").at(0)  # the trainer's rank 0 plays the engine's
        mine = {name: torch.empty(one.shape, dtype=getattr(torch, one.dtype)) for name, one in layout.storages.items()}
        made = plan(family.tensors(built.hf), Payload(built.hf).trainer(built.parallel, "bfloat16"), [layout])
        exchange(made, TorchTransport(), sources.tensors, mine if job.mesh.rank == 0 else None, timeout_s=60)
        if job.mesh.rank == 0:
            wrong += [name for name, value in checksums_of(mine).items() if value != expected[name]]
    told = [wrong]
    dist.broadcast_object_list(told)
    return told[0]


if __name__ == "__main__":
    group.run(main)
