"""Worker: the case under layouts of this world size, against the oracle. `parity.py RESULT REFERENCES LAYOUT:VARIANTS...`,
with one folder of references a variant of the model

A layout is a list of sizes, such as "tp=2,pp=2", under their names in the trainer's configuration; variants are joined by "+", each
followed by its checks: "plain/packed/guard".
Errors are maxima over all ranks; of gradients and weights, relative to the tensor's largest element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from asyncmoe.config import Config
from asyncmoe.config.objective import CorrectionSection, ObjectiveSection
from asyncmoe.errors import ConfigError, InvariantBroken
from asyncmoe.models import load_hf_config
from asyncmoe.models.hf_checkpoint import HFCheckpoint
from asyncmoe.platform import collectives
from asyncmoe.queue.group_buffer import describe
from asyncmoe.trainer import losses, objective, step
from asyncmoe.trainer.data import batch
from asyncmoe.trainer.data.batch import MicroBatch
from asyncmoe.trainer.data.credit import outcome_advantages, token_advantages
from asyncmoe.trainer.data.schedule import Schedule, schedule
from asyncmoe.trainer.model import gpt as model
from asyncmoe.trainer.model import mesh, optimizer
from asyncmoe.trainer.model.output_head import OutputHead
from asyncmoe.trajectory import Trajectory
from tests.ranks import case, group
from tests.ranks.leaving import leave

COMPARED = ("clip_fraction", "tis_capped_fraction", "ratio_mean", "train_infer_kl")
"""Figures of the policy loss that are the same in every layout."""
OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bias_activation_fusion": True}
"""Switches of Megatron's that work without a GPU."""


@dataclass
class Job:
    """One layout with one kind of packing."""

    path: Path
    config: Config
    mesh: mesh.Mesh
    reference: dict[str, Any]

    def model(self) -> model.Model:
        hf = load_hf_config(self.path / "hf")
        built = model.build(hf, self.config, self.mesh)
        load(built, self.path / "hf")
        return built

    @property
    def steps(self) -> list[dict[str, float]]:
        """Loss and norm of each of the oracle's steps."""
        return list(self.reference["steps"])

    @property
    def schedule(self) -> Schedule:
        trainer = self.config.trainer
        return schedule(case.LENGTHS, self.mesh.dp, trainer.tokens_per_microbatch, trainer.pack, self.mesh.grid)

    def microbatches(
        self,
        aggregation: str,
        proximal: bool = False,
        advantages: np.ndarray | dict[int, np.ndarray] | None = None,
        weights: np.ndarray | None = None,
    ) -> list[MicroBatch]:
        known = case.trajectories(self.reference["behaviour"])
        planned = objective.token_weights([int(t.loss_mask.sum()) for t in known.values()], aggregation)  # type: ignore[arg-type]
        plain = objective.group_advantages(case.REWARDS, case.GROUPS, "grpo")
        each = {
            "advantages": plain if advantages is None else advantages,
            "proximal": dict(enumerate(self.reference["proximal"])) if proximal else None,
        }
        return packed(known, self.schedule, self.config, self.mesh, planned if weights is None else weights, **each)


def packed(
    known: dict[int, Trajectory], planned: Schedule, config: Config, place: mesh.Mesh, weights: np.ndarray, **each: Any
) -> list[MicroBatch]:
    """The micro-batches of this rank; advantages are 0 if there are none in `each`, further arguments of `batch.pack`."""
    given = {"advantages": np.zeros(len(known)), "grid": place.grid, "packed": config.trainer.pack, "cp_rank": place.cp_rank, **each}
    return [batch.pack(known, indices, weights=weights, rows=planned.rows, **given) for indices in planned.ranks[place.dp_rank]]


def main(path: str, *wanted: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for layout, _, variants in (one.partition(":") for one in wanted):
        found[layout] = {}
        for variant, *checks in (each.split("/") for each in variants.split("+")):
            found[layout][variant] = try_layout(Path(path, variant), layout, checks)
    return found


def try_layout(path: Path, layout: str, chosen: list[str]) -> dict[str, Any]:
    reference = torch.load(path / "reference.pt", weights_only=False)
    sizes = {"ranks": dist.get_world_size(), **case.settings_of(layout)}
    place = mesh.start(case.config(path, **sizes).trainer)
    with pytest.raises(ConfigError, match=r"trainer\.ranks: got 8, expected"):
        mesh.start(case.config(path, ranks=8).trainer)
    checks: dict[str, Callable[[Callable[..., Job]], dict[str, Any]]] = {
        "packed": lambda job: forward_and_gradients(job(pack=True)),
        "single": lambda job: forward_and_gradients(job(pack=False)),
        "recompute": lambda job: forward_and_gradients(job(pack=True, recompute="full")),
        "plain": lambda job: three_steps(job(pack=True)),
        "distributed": lambda job: three_steps(job(pack=False, optimizer={"distributed": True})),
        "overlapped": lambda job: three_steps(job(pack=True, optimizer={"distributed": True}, megatron=OVERLAPPED)),
        "grouped": lambda job: grouped(job),
        "guard": lambda job: not_a_number(job(pack=True)),
        "rejected": lambda job: rejected(job(pack=True)),
        "credited": lambda job: credited(job(pack=True)),
        "bfloat16": lambda job: half_precision(job),
        "balanced": lambda job: balance(job(pack=True, recompute="full", router_bias_rate=case.BIAS_RATE)),
    }

    def job(place: mesh.Mesh = place, sizes: dict[str, int] = sizes, **trainer: Any) -> Job:
        return Job(path, case.config(path, **sizes, **trainer), place, reference)

    found = {name: worst(checks[name](job)) for name in chosen}
    leave()
    return found


def worst(values: dict[str, Any]) -> dict[str, Any]:
    """The largest of each number over all ranks; lists as they are on rank 0; every rank must agree on what is not a number."""
    everywhere = group.everyone(values)
    merged: dict[str, Any] = {}
    for name, value in values.items():
        seen = [one[name] for one in everywhere]
        if isinstance(value, float):
            merged[name] = max(seen)
        else:
            assert all(one == value for one in seen), (name, seen)
            merged[name] = value
    return merged


def forward_and_gradients(job: Job) -> dict[str, Any]:
    built = job.model()
    batches = job.microbatches("token_mean")
    adam = optimizer.build(unclipped(job.config), built)
    logprobs = step.logprobs_only(built, batches, case.LENGTHS, case.TEMPERATURE)
    sampled = {i: one.loss_mask for i, one in case.trajectories(job.reference["behaviour"]).items()}
    chosen = step.logprobs_only(built, batches, case.LENGTHS, case.TEMPERATURE, sampled_only=True)
    before = snapshot(built)
    supervised = step.train_step(built, adam, batches, losses.SupervisedLoss(), lr=0.0)
    found = {
        "logits": logits_error(job, built, batches),
        "logprobs": max(float(np.abs(logprobs[i] - want).max()) for i, want in enumerate(job.reference["logprobs"])),
        "sampled_only": max(float(np.abs(chosen[i] - logprobs[i] * mask).max()) for i, mask in sampled.items()),
        "supervised_gradients": relative_error(gradients(built), expected(built, job.path / "supervised")),
        "supervised_loss": abs(supervised.loss - job.reference["supervised"]["loss"]),
        "supervised_norm": abs(supervised.grad_norm / job.reference["supervised"]["grad_norm"] - 1),
    }
    loss = policy_loss(job.mesh, job.config.objective)
    policy = step.train_step(built, adam, job.microbatches("sequence_mean", proximal=True), loss, lr=0.0)
    found |= {
        "policy_gradients": relative_error(gradients(built), expected(built, job.path / "policy")),
        "policy_loss": abs(policy.loss - job.reference["policy"]["loss"]),
        "policy_norm": abs(policy.grad_norm / job.reference["policy"]["grad_norm"] - 1),
        "same_version": policy.figures["logprob_diff_max_same_version"],
        "metrics": [round(value, 5) for value in (*(policy.figures[name] for name in COMPARED), policy.entropy)],
        "counts": [policy.rows, policy.tokens, {str(age): count for age, count in policy.figures["ages"].items()}],
        "microbatches": len(batches),
        "filler": sum(not indices for rank in job.schedule.ranks for indices in rank),
        "unchanged": all(torch.equal(a, b) for a, b in zip(before, snapshot(built), strict=True)),
    }
    return found


def three_steps(job: Job) -> dict[str, Any]:
    built = job.model()
    adam = optimizer.build(job.config, built)
    errors = step_errors(job, built, adam)
    model.gather_weights(built)
    weights = max(float((value - built.weights()[name]).abs().max()) for name, value in expected(built, job.path / "trained"))
    return {"weights": weights, **errors}


def step_errors(job: Job, built: model.Model, adam: Any) -> dict[str, float]:
    """Take the steps of the oracle; errors of their losses and norms."""
    batches = job.microbatches("token_mean")
    seen = [step.train_step(built, adam, batches, losses.SupervisedLoss(), lr=case.LR) for _ in range(case.STEPS)]
    return {
        "losses": max(abs(one.loss - want["loss"]) for one, want in zip(seen, job.steps, strict=True)),
        "norms": max(abs(one.grad_norm / want["grad_norm"] - 1) for one, want in zip(seen, job.steps, strict=True)),
    }


def grouped(job: Callable[..., Job]) -> dict[str, Any]:
    """Experts that torch multiplies all at once, recomputed and with gradients reduced on the way, next to one after the other."""
    seen, norms = [], []
    for megatron, recompute in (
        ({"moe_grouped_gemm": False}, "none"),
        ({"moe_grouped_gemm": True, "overlap_grad_reduce": True}, "selective"),
    ):
        here = job(pack=True, megatron=megatron, recompute=recompute)
        built = here.model()
        classes = {type(module).__name__ for chunk in built.chunks for module in chunk.modules()}
        assert ("GroupedExperts" in classes) == megatron["moe_grouped_gemm"]
        adam = optimizer.build(unclipped(here.config), built)
        for _ in range(2):  # the first time Megatron reduces after the backward pass
            metrics = step.train_step(built, adam, here.microbatches("token_mean"), losses.SupervisedLoss(), lr=0.0)
        seen.append({name: value.clone() for name, value in gradients(built).items()})
        norms.append(metrics.grad_norm)
    return {"gradients": relative_error(seen[1], iter(seen[0].items())), "norm": abs(norms[1] / norms[0] - 1)}


def balance(job: Job) -> dict[str, Any]:
    """Biases that routers choose by move against the tokens that Hugging Face's model sends to each expert."""
    built = job.model()
    before = {name: value.clone() for name, value in built.weights().items() if name.endswith("expert_bias")}
    batches, adam = job.microbatches("token_mean"), optimizer.build(job.config, built)
    step.logprobs_only(built, batches, case.LENGTHS, case.TEMPERATURE)  # which counts for nothing
    step.train_step(built, adam, batches, losses.SupervisedLoss(), lr=0.0)
    errors, layers = [0.0], [layer for chunk in built.parallel.chunk_layers(built.config.num_layers, job.mesh.rank) for layer in chunk]
    biases = [(layer, router.expert_bias) for layer, router in routers(built)]
    assert len(biases) == len(before) == sum(layer in job.reference["experts"] for layer in layers)
    for (layer, bias), old in zip(biases, before.values(), strict=True):
        tokens = job.reference["experts"][layer]
        errors.append(float((bias - old - case.BIAS_RATE * (tokens.mean() - tokens).sign()).abs().max()))
    return {"biases": max(errors)}


def routers(built: model.Model) -> list[tuple[int, Any]]:
    """(number of the layer, its router) of this rank."""
    every = (module for chunk in built.chunks for module in chunk.modules() if hasattr(module, "expert_bias"))
    return [(module.layer_number - 1, module) for module in every]


def not_a_number(job: Job) -> dict[str, Any]:
    """A loss that is not finite, a gradient that is not, a token from the future, in one micro-batch of one rank: every rank stops with its
    weights as they were."""
    built = job.model()
    adam = optimizer.build(job.config, built)
    before = snapshot(built)
    advantages = np.ones(len(case.LENGTHS), np.float32)
    advantages[3] = np.nan
    messages = []
    loss = policy_loss(job.mesh, job.config.objective)
    future = policy_loss(job.mesh, job.config.objective, case.VERSION - 1)
    for attempt, given in ((loss, advantages), (PoisonedGradient(), advantages), (future, None)):
        try:
            step.train_step(built, adam, job.microbatches("token_mean", proximal=True, advantages=given), attempt, lr=case.LR)
        except InvariantBroken as error:
            messages.append(str(error))
    # A guard that refuses the gradients of a healthy batch; a batch that it allows afterwards is trained.
    healthy = job.microbatches("token_mean", proximal=True)
    refused = step.train_step(built, adam, healthy, loss, lr=case.LR, guard=lambda values: "grad_norm" not in values)
    messages.append([refused.refused, refused.updated, math.isfinite(refused.grad_norm) and refused.grad_norm > 0])
    return {"messages": messages, "unchanged": all(torch.equal(a, b) for a, b in zip(before, snapshot(built), strict=True))}


def credited(job: Job) -> dict[str, Any]:
    """Rewards of steps and a teacher: a rank has its own trajectories, and of the others what the queue says about them."""
    built = job.model()
    adam = optimizer.build(unclipped(job.config), built)
    section = ObjectiveSection.model_validate({**case.OBJECTIVE, **case.CREDIT})
    known = case.trajectories(job.reference["behaviour"])
    mine = {i: known[i] for i in job.schedule.indices(job.mesh.dp_rank)}
    items = [describe(t) for t in known.values()]
    advantages = token_advantages(items, mine, section, outcome_advantages(items, section)[0], {})
    batches = job.microbatches("sequence_mean", proximal=True, advantages=advantages)
    made = step.train_step(built, adam, batches, policy_loss(job.mesh, section), lr=0.0)
    return {
        "gradients": relative_error(gradients(built), expected(built, job.path / "credited")),
        "loss": abs(made.loss - job.reference["credited"]["loss"]),
        "apart": abs(job.reference["credited"]["loss"] - job.reference["policy"]["loss"]),
    }


def rejected(job: Job) -> dict[str, Any]:
    """Rejecting the tokens of older versions, which are those of the odd trajectories, is as if the step had never had them; rejecting all
    changes nothing."""
    built = job.model()
    adam = optimizer.build(unclipped(job.config), built)
    objective_ = {**case.OBJECTIVE, "aggregation": "token_mean", "correction": {"cap": 1.1, "max_age": 0}}
    section = ObjectiveSection.model_validate(objective_)
    counts = [int(t.loss_mask.sum()) * (i % 2 == 0) for i, t in case.trajectories(job.reference["behaviour"]).items()]
    alone = np.array([bool(count) / sum(counts) for count in counts])
    seen = []
    for weights, kept in ((None, section), (alone, section.model_copy(update={"correction": CorrectionSection(cap=1.1)}))):
        batches = job.microbatches("token_mean", proximal=True, weights=weights)
        metrics = step.train_step(built, adam, batches, policy_loss(job.mesh, kept), lr=0.0)
        seen.append((metrics, {name: value.clone() for name, value in gradients(built).items()}))
    (with_rule, got), (without, wanted) = seen
    before = snapshot(built)
    later = policy_loss(job.mesh, section, case.VERSION + 1)
    nothing = step.train_step(built, adam, job.microbatches("token_mean", proximal=True), later, lr=case.LR)
    return {
        "gradients": relative_error(got, iter(wanted.items())),
        "loss": abs(with_rule.loss - without.loss),
        "share": with_rule.figures["rejected_fraction"],
        "nothing": [nothing.updated, nothing.loss, nothing.grad_norm, nothing.figures["rejected_fraction"]],
        "unchanged": all(torch.equal(a, b) for a, b in zip(before, snapshot(built), strict=True)),
    }


class PoisonedGradient(losses.SupervisedLoss):
    """A finite loss with a gradient that is not, where an advantage is NaN."""

    def __call__(self, logprobs: torch.Tensor, rows: MicroBatch, *_: object) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        poison = torch.where(rows.advantages.isnan(), torch.nan, 1.0)
        logprobs.register_hook(lambda gradient: gradient * poison)
        return logprobs.sum(), dict.fromkeys(self.sums, rows.mask.sum())


def half_precision(
    job: Callable[..., Job], weights: Callable[[model.Model], dict[str, torch.Tensor]] = lambda built: built.weights()
) -> dict[str, Any]:
    """bfloat16 weights with float32 masters, under both optimizers."""
    seen = {}
    for name in ("plain", "distributed"):
        here = job(pack=True, dtype="bfloat16", optimizer={"distributed": name == "distributed"})
        built = here.model()
        adam = optimizer.build(here.config, built)
        seen[name] = step_errors(here, built, adam)["losses"]
        inner = [one.optimizer for one in getattr(adam, "chained_optimizers", [adam]) if one.optimizer is not None]
        masters = {parameter.dtype for one in inner for group in one.param_groups for parameter in group["params"]}
        assert masters == {torch.float32}, masters
        assert {value.dtype for value in weights(built).values()} == {torch.bfloat16}
    return seen


def policy_loss(place: mesh.Mesh, section: ObjectiveSection, version: int = case.VERSION) -> losses.PolicyLoss:
    over_ranks = partial(collectives.summed, group=place.cp_group) if place.cp > 1 else None
    return losses.PolicyLoss(section, case.TEMPERATURE, version, over_ranks=over_ranks)


def unclipped(config: Config) -> Config:
    adam = config.trainer.optimizer.model_copy(update={"clip_grad": 1e9})
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"optimizer": adam})})


def logits_error(job: Job, built: model.Model, batches: list[MicroBatch], wanted: list[torch.Tensor] | None = None) -> float:
    """Against Hugging Face's, or `wanted`, of every row of every trajectory, from the shards of the vocabulary put together."""

    def keep(rows: MicroBatch, head: OutputHead, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        logits = hidden @ head.weight.t()
        parts = [torch.empty_like(logits) for _ in range(job.mesh.tp)]
        dist.all_gather(parts, logits.contiguous(), group=job.mesh.tp_group)
        return logits.sum(), torch.zeros([], dtype=torch.int), {"logits": rows.everywhere(torch.cat(parts, dim=2)[0])}

    results, _ = step._run(built, batches, keep, forward_only=True, sampled_only=False)
    errors, reference = [0.0], wanted or job.reference["logits"]
    for rows, kept in zip(batches, results, strict=False):
        here = rows.everywhere(torch.ones(rows.rows))
        for index, first, count in rows.places:
            differs = (kept["logits"][first : first + count] - reference[index]).abs().amax(dim=1)
            errors.append(float((differs * here[first : first + count]).max()))
    assert len(errors) > 1 or not job.mesh.last_stage or not any(rows.places for rows in batches)
    return max(errors)


def gradients(built: model.Model) -> dict[str, torch.Tensor]:
    """Of all weights that have one: the biases that routers choose by have none."""
    return {name: tensor.main_grad for name, tensor in model.named_tensors(built) if isinstance(tensor, torch.nn.Parameter)}


_loaded: dict[Any, dict[str, torch.Tensor]] = {}
_expected: dict[Any, dict[str, torch.Tensor]] = {}
"""By what a rank's part of a checkpoint depends on: to plan and to read it takes as long as a step, and each layout builds ten models."""


def _part(built: model.Model, checkpoint: Path) -> Any:
    return checkpoint, built.parallel, built.dtype, tuple(built.weights())


def load(built: model.Model, checkpoint: Path) -> None:
    """As `model.load_hf`, which the first model of a layout is loaded by; the others get copies of what that has."""
    weights, key = built.weights(), _part(built, checkpoint)
    if key in _loaded:
        for name, value in _loaded[key].items():
            weights[name].copy_(value)
    else:
        model.load_hf(built, checkpoint)
        _loaded[key] = {name: value.clone() for name, value in weights.items()}


def expected(built: model.Model, checkpoint: Path) -> Iterator[tuple[str, torch.Tensor]]:
    key = _part(built, checkpoint)
    if key not in _expected:
        _expected[key] = dict(model.local_tensors(built, HFCheckpoint(checkpoint)))
    return iter(_expected[key].items())


def relative_error(got: dict[str, torch.Tensor], wanted: Iterator[tuple[str, torch.Tensor]]) -> float:
    mine = {name: want for name, want in wanted if not name.endswith("expert_bias")}
    errors = {name: float((got[name] - want).abs().max() / want.abs().max().clamp(min=1e-12)) for name, want in mine.items()}
    assert errors.keys() == got.keys()
    return max(errors.values())


def snapshot(built: model.Model) -> list[torch.Tensor]:
    return [value.clone() for value in built.weights().values()]


if __name__ == "__main__":
    group.run(main)
