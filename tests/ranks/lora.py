"""Worker: adapters under layouts of this world size, against the oracle. `lora.py RESULT REFERENCES LAYOUT:ADAPTERS...`

A layout is as in parity.py; adapters are names of lora_case.py, joined by "+", each followed by its checks: "dense/packed/distributed".
Errors are maxima over all ranks; of gradients and halves, relative to the largest element.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from asyncmoe.config import Config
from asyncmoe.config.lora import LoraSection
from asyncmoe.models import MegatronParallel, family_of
from asyncmoe.models.lora.adapter import halves as halves_of
from asyncmoe.models.lora.adapter import kind_of
from asyncmoe.models.lora.halves import canonical_layout, layer_halves, rank_layout
from asyncmoe.reshard import LocalTransport, exchange, plan
from asyncmoe.trainer import losses, step
from asyncmoe.trainer.lora import attach, canonical, values
from asyncmoe.trainer.model import gpt as model
from asyncmoe.trainer.model import mesh, optimizer
from asyncmoe.weights.sender.gather import Gatherer
from tests.ranks import case, group, lora_case, parity
from tests.ranks.leaving import leave

SEED = 11


OVERLAPPED = {"overlap_grad_reduce": True, "bias_activation_fusion": True}
GROUPED = OVERLAPPED | {"moe_grouped_gemm": True}


@dataclass
class Job(parity.Job):
    """One layout with one adapter."""

    section: LoraSection
    oracle: dict[str, Any]
    start: bool = False

    def __post_init__(self) -> None:
        changes = {"train": "lora", "lora": self.section, "run": self.config.run.model_copy(update={"seed": SEED})}
        self.config = self.config.model_copy(update=changes)

    def model(self) -> model.Model:
        """With the oracle's halves, or with those that training starts from."""
        built = super().model()
        if not self.start:
            canonical.write(built, self.oracle["halves"])
        return built

    @property
    def steps(self) -> list[dict[str, float]]:
        return list(self.oracle["steps"])

    def expected(self, built: model.Model, halves: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """This rank's part of whole halves, by the layouts that adapters are sent with."""
        shape = family_of(built.hf).shape_of(built.hf)
        kind = kind_of(self.section, shape)
        here = rank_layout(shape, kind, built.parallel, self.mesh.rank, "float32").at(0)
        steps = plan(halves_of(shape, kind), [canonical_layout(shape, kind, "float32")], [here])
        whole = {name: halves[name].detach().float().contiguous() for name in steps.sources.get(0, {})}
        made = {name: torch.empty(storage.shape) for name, storage in here.storages.items()}
        exchange(steps, LocalTransport(), whole, made)
        return made


def job_of(path: Path, run: Path, layout: str, **trainer: Any) -> parity.Job:
    """A job of a layout with settings of the trainer, such as "tp=2,dtype=bfloat16,distributed=1"; lora=NAME trains an adapter, from its
    first values, and model=NAME another variant than the plain one. The run's directory is `run`."""
    settings = case.settings_of(layout)
    name, variant, distributed = settings.pop("lora", None), settings.pop("model", "plain"), settings.pop("distributed", 0)
    folder = path / (lora_case.ADAPTERS[name][0] if name else variant)
    settings = {"ranks": dist.get_world_size(), "pack": True, "optimizer": {"distributed": bool(distributed)}, **settings, **trainer}
    config = case.config(folder, run, **settings)
    place = mesh.start(config.trainer)
    if name is not None:
        return adapter_job(folder, config, place, name, start=True)
    return parity.Job(folder, config, place, torch.load(folder / "reference.pt", weights_only=False))


def adapter_job(path: Path, config: Config, place: mesh.Mesh, name: str, start: bool = False) -> Job:
    """A job with an adapter of lora_case.py, in the folder of its model's references."""
    reference, oracle = (torch.load(path / file, weights_only=False) for file in ("reference.pt", f"{name}.pt"))
    return Job(path, config, place, reference, lora_case.section(name), oracle, start)


def main(path: str, *wanted: str) -> dict[str, Any]:
    words = (one.partition(":") for one in wanted)
    return {layout: try_layout(Path(path), layout, adapters.split("+")) for layout, _, adapters in words}


def try_layout(path: Path, layout: str, adapters: list[str]) -> dict[str, Any]:
    sizes = {"ranks": dist.get_world_size(), **case.settings_of(layout)}
    place = mesh.start(case.config(path, **sizes).trainer, SEED)
    found = {}
    for name, *checks in (each.split("/") for each in adapters):
        found[name] = try_adapter(path / lora_case.ADAPTERS[name][0], place, sizes, name, checks)
    leave()
    return found


def try_adapter(path: Path, place: mesh.Mesh, sizes: dict[str, int], name: str, chosen: list[str]) -> dict[str, Any]:
    def job(start: bool = False, **trainer: Any) -> Job:
        return adapter_job(path, case.config(path, **sizes, **trainer), place, name, start)

    checks: dict[str, Callable[[], dict[str, Any]]] = {
        "packed": lambda: forward_and_gradients(job(pack=True)),
        "recompute": lambda: forward_and_gradients(job(pack=True, recompute="full", megatron=GROUPED)),
        "plain": lambda: three_steps(job(pack=False)),
        "distributed": lambda: three_steps(job(pack=True, optimizer={"distributed": True}, megatron=OVERLAPPED)),
        "start": lambda: start(job(pack=True, start=True)),
        "gathered": lambda: gathered(job(pack=True)),
        "bfloat16": lambda: parity.half_precision(job, weights=lambda built: attach.parameters(built.chunks)),
    }
    return {check: parity.worst(checks[check]()) for check in chosen}


def forward_and_gradients(job: Job) -> dict[str, Any]:
    built = job.model()
    adam = optimizer.build(parity.unclipped(job.config), built)
    batches = job.microbatches("token_mean")
    found = {"logits": logits_error(job, built, job.oracle["logits"])}
    with attach.switched_off(built.chunks):
        found["base"] = logits_error(job, built, job.reference["logits"])
    found["apart"] = float((job.oracle["logits"][0] - job.reference["logits"][0]).abs().max())
    policy = parity.policy_loss(job.mesh, job.config.objective)
    for kind, rows, loss in (
        ("supervised", batches, losses.SupervisedLoss()),
        ("policy", job.microbatches("sequence_mean", proximal=True), policy),
    ):
        made = step.train_step(built, adam, rows, loss, lr=0.0)  # type: ignore[arg-type]
        wanted = job.oracle[kind]
        found |= {
            f"{kind}_gradients": gradient_error(job, built, wanted["gradients"]),
            f"{kind}_loss": abs(made.loss - wanted["loss"]),
            f"{kind}_norm": abs(made.grad_norm / wanted["grad_norm"] - 1),
        }
    return found


def three_steps(job: Job) -> dict[str, Any]:
    built = job.model()
    adam = optimizer.build(job.config, built)
    before = parity.snapshot(built)
    errors = parity.step_errors(job, built, adam)
    mine = {name: parameter.data for name, parameter in attach.parameters(built.chunks).items()}
    wanted = job.expected(built, job.oracle["trained"])
    assert mine.keys() == wanted.keys()
    sizes = [p.numel() for p in built.ddp[0].parameters() if p.requires_grad]
    state = sum(s["exp_avg"].numel() for o in adam.chained_optimizers for s in ({} if o.optimizer is None else o.optimizer.state).values())
    found = {
        "halves": max(float((mine[name] - want).abs().max()) for name, want in wanted.items()),
        **errors,
        "frozen": all(torch.equal(a, b) for a, b in zip(before, parity.snapshot(built), strict=True)),
    }
    if not job.config.trainer.distributed_optimizer and len(built.ddp) == 1:
        found["state"] = state == sum(sizes) == sum(value.numel() for value in mine.values())
    return found


def start(job: Job) -> dict[str, Any]:
    """The values training starts from are those of one process, and make no difference to the base model."""
    built = job.model()
    shape = family_of(built.hf).shape_of(built.hf)
    whole: dict[str, torch.Tensor] = {}
    for i in range(shape.layers):
        for half in layer_halves(shape, kind_of(job.section, shape), MegatronParallel(), 0, i in shape.dense_layers):
            value = values.initial(half, i, SEED)
            each = value.unbind() if half.experts is not None else [value]
            whole |= {f"layers.{i}.{name}": one for name, one in zip(half.canonical, each, strict=True)}
    wanted = job.expected(built, whole)
    distinct = len({float(half.flatten()[0]) for name, half in whole.items() if name.endswith(".a")})
    return {
        "equal": all(torch.equal(parameter.data, wanted[name]) for name, parameter in attach.parameters(built.chunks).items()),
        "b": max(float(half.abs().max()) for name, half in whole.items() if name.endswith(".b")),
        "a": max(abs(float(half.abs().max()) * half.shape[1] ** 0.5 - 1) for name, half in whole.items() if name.endswith(".a")),
        "distinct": distinct == sum(name.endswith(".a") for name in whole),
        "logits": logits_error(job, built, job.reference["logits"]),
    }


def gathered(job: Job) -> dict[str, Any]:
    """Reading returns what was written, on rank 0, without more bytes than the adapter's."""
    built = job.model()
    gatherer = Gatherer(built, 20_000, 60.0, adapter=True)
    wanted, seen = job.oracle["halves"], {}
    for bucket, flat in gatherer.run():
        if flat is not None:
            parts = torch.split(flat, [torch.Size(s).numel() for s in bucket.shapes])
            seen |= {n: part.view(s) for n, s, part in zip(bucket.names, bucket.shapes, parts, strict=True)}
    right = job.mesh.rank != 0 or (seen.keys() == wanted.keys() and all(torch.equal(seen[name], wanted[name]) for name in wanted))
    total = sum(bucket.nbytes for bucket in gatherer.buckets)
    return {"right": right, "buckets": len(gatherer.buckets), "bytes": total == sum(half.numel() * 4 for half in wanted.values())}


def logits_error(job: Job, built: model.Model, wanted: list[torch.Tensor]) -> float:
    return parity.logits_error(job, built, job.microbatches("token_mean"), wanted)


def gradient_error(job: Job, built: model.Model, wanted: dict[str, torch.Tensor]) -> float:
    """Of every pair: relative to the largest element of its canonical half, on every rank that has a part of it or a copy."""
    scales = {name: torch.full_like(gradient, float(gradient.abs().max())) for name, gradient in wanted.items()}
    here, scale = job.expected(built, wanted), job.expected(built, scales)
    mine = {name: parameter.main_grad for name, parameter in attach.parameters(built.chunks).items()}
    assert mine.keys() == here.keys()
    return max(float(((mine[name] - want).abs() / scale[name].clamp(min=1e-12)).max()) for name, want in here.items())


if __name__ == "__main__":
    group.run(main)
